"""Statistics of timings: medians with spread, paired ratios, bootstrap intervals. Plain Python and numpy, no global state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["PairedRatio", "Spread", "alternate", "paired_ratio", "pooled_ratio", "spread"]

NUM_RESAMPLES = 4000
MIN_PAIRS_NEAR_ONE = 20
NEAR_ONE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and quartiles of ``count`` values, with the extremes."""

    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    high: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """Rounded values."""
        names = ("median", "lower_quartile", "upper_quartile", "low", "high")
        return {**{name: round(getattr(self, name), 5) for name in names}, "count": self.count}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """A ratio measured over pairs, with its bootstrap 95 % interval.

    Attributes:
        value: the ratio.
        low, high: 2.5 % and 97.5 % points of the bootstrap over pairs.
        pairs: how many pairs.
        kind: ``median of pairs`` or ``ratio of sums``.
    """

    value: float
    low: float
    high: float
    pairs: int
    kind: str

    def to_json(self) -> dict[str, Any]:
        """Rounded values."""
        return {
            "value": round(self.value, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "pairs": self.pairs,
            "kind": self.kind,
        }


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles (linear interpolation) and extremes.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values were measured")
    low, first, middle, third, high = np.percentile(np.asarray(values, dtype=np.float64), [0, 25, 50, 75, 100])
    return Spread(
        median=float(middle),
        lower_quartile=float(first),
        upper_quartile=float(third),
        low=float(low),
        high=float(high),
        count=len(values),
    )


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> PairedRatio:
    """Median of the ratios pair by pair, which one slow moment of the machine cannot move; pairs are resampled."""
    top, bottom = _pairs(numerators, denominators)
    ratios = top / bottom
    picks = _resamples(len(ratios), seed)
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    return PairedRatio(
        value=float(np.median(ratios)), low=float(low), high=float(high), pairs=len(ratios), kind="median of pairs"
    )


def pooled_ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> PairedRatio:
    """Ratio of the sums: what a user waits in all. Pairs are resampled together."""
    top, bottom = _pairs(numerators, denominators)
    picks = _resamples(len(top), seed)
    low, high = np.percentile(top[picks].sum(axis=1) / bottom[picks].sum(axis=1), [2.5, 97.5])
    value = float(top.sum() / bottom.sum())
    return PairedRatio(value=value, low=float(low), high=float(high), pairs=len(top), kind="ratio of sums")


def alternate(names: Sequence[str], turn: int, *, seed: int = 0) -> list[str]:
    """Order of the arms in one round: two arms swap every round, more are shuffled anew (and repeatably)."""
    if len(names) <= 2:
        return list(names) if turn % 2 == 0 else list(reversed(names))
    order = list(names)
    random.Random(f"{seed}/{turn}").shuffle(order)
    return order


def _pairs(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators cannot be paired with {len(denominators)} denominators")
    if not numerators:
        raise ValueError("no pairs were measured")
    if min(denominators) <= 0:
        raise ValueError("a denominator is not positive")
    return np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)


def _resamples(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, size=(NUM_RESAMPLES, count))
