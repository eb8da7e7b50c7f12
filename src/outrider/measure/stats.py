"""Rates of a group of requests, and how far chance alone could have moved them.

Counts are summed over requests first and divided last (docs/glossary.md). Intervals come from resampling: whole lines of
traffic are drawn with replacement, all counts are summed again, and the middle 95 % of a thousand such rates is the
interval. Turns of one conversation share a line and are drawn together, since they are not independent of each other.

The plain percentile interval is too narrow for few lines. Its tail is therefore widened to what Student's t demands, by
sqrt(n / (n - 1)) t / z (Hesterberg, "What teachers should know about the bootstrap", 2015, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from outrider.measure.record import Arm, Counts, RequestRecord

__all__ = [
    "FEWEST_LINES",
    "NUM_RESAMPLES",
    "SMALL_LINES",
    "FloatArray",
    "Interval",
    "Pool",
    "RateIntervals",
    "interval_of",
    "is_judged",
    "pool_arms",
    "rate_intervals",
    "requests_to_decide",
    "requests_to_halve",
    "why_not_judged",
]

FloatArray = NDArray[np.float64]

NUM_RESAMPLES = 1000
FEWEST_LINES = 5
"""Below this many lines of traffic no interval is given: resampling so few says nothing about the rest."""
SMALL_LINES = 30
"""Below this many lines a group is called small."""

_LEVEL = 0.95
_NORMAL = NormalDist()
_CHUNK_NUMBERS = 2_000_000  # weights held at once, so that memory does not grow with the traffic
_SUMMED = ("passes", "steps", "committed", "drafted", "accepted")
_NOT_OWN = ("repeated", "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A rate with its 95 % interval; ``None`` where there is no rate, or too little to say how sure it is."""

    value: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """Half the interval's length."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def to_json(self) -> dict[str, float | None]:
        """Plain values."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Summed counts of one arm on a group of requests.

    Attributes:
        counts: the sums; their properties are the rates.
        num_requests: records that were summed.
        num_lines: lines of traffic that they come from, the unit of resampling.
        columns: by name of a count, its sum ``[1 + NUM_RESAMPLES]``: the real one first, then those of the resamplings.
        by_depth: ``reached`` and ``kept``, ``[1 + NUM_RESAMPLES, depths]``.
    """

    counts: Counts
    num_requests: int
    num_lines: int
    columns: Mapping[str, FloatArray]
    by_depth: Mapping[str, FloatArray]

    @property
    def is_small(self) -> bool:
        """True if the group is too small for anybody to rest a decision on."""
        return self.num_lines < SMALL_LINES

    def interval(self, values: FloatArray) -> Interval:
        """The interval of a rate that was computed for the real sums and for each resampling, ``[1 + NUM_RESAMPLES]``."""
        return interval_of(values, self.num_lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateIntervals:
    """The rates of docs/glossary.md with intervals; by depth from depth 1 on."""

    tokens_per_pass: Interval
    accepted_length: Interval
    acceptance_rate: Interval
    draft_rate: Interval
    unconditional: tuple[Interval, ...]
    conditional: tuple[Interval, ...]


def why_not_judged(record: RequestRecord) -> str:
    """Why a record may be shown but never decide anything: ``off-policy``, ``repeated``, ``synthetic``; else empty."""
    if not record.is_on_policy:
        return "off-policy"
    traffic = record.labels.get("traffic", "")
    return traffic if traffic in _NOT_OWN else ""


def is_judged(record: RequestRecord) -> bool:
    """True if verdicts may rest on the record: text of this target's own, for a prompt met for the first time."""
    return not why_not_judged(record)


def pool_arms(records: Iterable[RequestRecord], *, seed: int = 0) -> dict[Arm, Pool]:
    """Pool the records of a group, arm by arm.

    All arms see the same resamplings of lines, so that differences between arms are differences on the same traffic.
    """
    by_arm: dict[Arm, list[RequestRecord]] = {}
    for record in records:
        by_arm.setdefault(record.arm, []).append(record)
    lines = sorted({record.line for each in by_arm.values() for record in each})
    place = {line: index for index, line in enumerate(lines)}
    blocks = {arm: _matrix(each, place) for arm, each in by_arm.items()}
    if not blocks:
        return {}
    sums = _resampled_sums(np.hstack(list(blocks.values())), seed)
    pools: dict[Arm, Pool] = {}
    for arm, block in blocks.items():
        pools[arm] = _pool(by_arm[arm], sums[:, : block.shape[1]])
        sums = sums[:, block.shape[1] :]
    return pools


def _depth(records: Sequence[RequestRecord]) -> int:
    return max((len(record.counts.reached) for record in records), default=0)


def _matrix(records: Sequence[RequestRecord], place: Mapping[int, int]) -> FloatArray:
    """One row a line: the summed counts, then ``reached`` by depth, then ``kept`` by depth."""
    depth = _depth(records)
    matrix = np.zeros((len(place), len(_SUMMED) + 2 * depth))
    for record in records:
        row, counts = matrix[place[record.line]], record.counts
        row[: len(_SUMMED)] += [getattr(counts, name) for name in _SUMMED]
        row[len(_SUMMED) : len(_SUMMED) + len(counts.reached)] += counts.reached
        row[len(_SUMMED) + depth : len(_SUMMED) + depth + len(counts.kept)] += counts.kept
    return matrix


def _resampled_sums(matrix: FloatArray, seed: int) -> FloatArray:
    """Column sums ``[1 + NUM_RESAMPLES, columns]``: of the matrix itself, then of resamplings of its rows."""
    num_lines = len(matrix)
    noise = np.random.default_rng([seed, num_lines])
    chances = np.full(num_lines, 1 / num_lines)
    sums = [matrix.sum(axis=0, keepdims=True)]
    left = NUM_RESAMPLES
    while left > 0:
        size = min(left, max(1, _CHUNK_NUMBERS // num_lines))
        sums.append(noise.multinomial(num_lines, chances, size=size) @ matrix)
        left -= size
    return np.vstack(sums)


def _pool(records: Sequence[RequestRecord], sums: FloatArray) -> Pool:
    depth, first = _depth(records), len(_SUMMED)
    return Pool(
        counts=Counts.pooled(record.counts for record in records),
        num_requests=len(records),
        num_lines=len({record.line for record in records}),
        columns={name: sums[:, index] for index, name in enumerate(_SUMMED)},
        by_depth={"reached": sums[:, first : first + depth], "kept": sums[:, first + depth :]},
    )


def rate_intervals(pool: Pool) -> RateIntervals:
    """All rates of a pool."""
    c, kept, reached = pool.columns, pool.by_depth["kept"], pool.by_depth["reached"]
    steps = c["steps"]
    return RateIntervals(
        tokens_per_pass=pool.interval(_divide(c["committed"], c["passes"])),
        accepted_length=pool.interval(1 + _divide(c["accepted"], steps)),
        acceptance_rate=pool.interval(_divide(c["accepted"], c["drafted"])),
        draft_rate=pool.interval(_divide(steps, c["passes"])),
        unconditional=tuple(pool.interval(_divide(column, steps)) for column in kept.T),
        conditional=tuple(pool.interval(_divide(ours, of)) for ours, of in zip(kept.T, reached.T, strict=True)),
    )


def _divide(parts: FloatArray, wholes: FloatArray) -> FloatArray:
    """Quotients; not a number where there is nothing to divide by."""
    quotients: FloatArray = np.divide(parts, wholes, out=np.full(len(parts), np.nan), where=wholes > 0)
    return quotients


def interval_of(values: FloatArray, num_lines: int) -> Interval:
    """The interval of a rate.

    Args:
        values: the rate itself, then the rate in each resampling, ``[1 + NUM_RESAMPLES]``; NaN where it does not exist.
        num_lines: lines that were resampled.

    Returns:
        no ends below :data:`FEWEST_LINES` lines, or where the rate is missing in more than one resampling in twenty.
    """
    value = float(values[0])
    if math.isnan(value):
        return Interval()
    tried = values[1:][~np.isnan(values[1:])]
    if num_lines < FEWEST_LINES or len(tried) < 0.95 * (len(values) - 1):
        return Interval(value=value)
    tail = _tail(num_lines)
    low, high = np.quantile(tried, [tail, 1 - tail])
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def _tail(num_lines: int) -> float:
    """Mass to leave out at either end, so that the interval is as wide as Student's t asks for."""
    freedom = num_lines - 1
    wide = _student(freedom) * math.sqrt(num_lines / freedom)
    return _NORMAL.cdf(-wide)


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by the series in 1 / freedom (Abramowitz and Stegun, 26.7.5)."""
    z, n = _NORMAL.inv_cdf((1 + _LEVEL) / 2), float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def requests_to_halve(num_requests: int) -> int:
    """How many requests more would halve an interval: its width falls with the square root of their number."""
    return 3 * num_requests


def requests_to_decide(interval: Interval, *, bound: float, num_requests: int) -> int | None:
    """How many requests more it would take for the interval to leave ``bound``, if the rate stays where it is.

    Returns:
        0 if it has left already; ``None`` without an interval, or if the rate is so near that no number would do.
    """
    half = interval.half_width
    if interval.value is None or half is None:
        return None
    distance = abs(interval.value - bound)
    if distance >= half:
        return 0
    if distance < half / 30:
        return None
    return math.ceil(num_requests * ((half / distance) ** 2 - 1))
