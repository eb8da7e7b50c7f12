"""Step laws with everything visible: fixed choices, fixed uniforms, and a record of what was asked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from scipy import stats
from torch import Tensor

from outrider.types import Verdict
from outrider.verify.base import Place

Path = tuple[int, ...]


class ScriptedLaws:
    """Answers by (sequence, path); one uniform for all tests; residual draws take the heaviest token."""

    def __init__(
        self,
        *,
        choices: Mapping[tuple[int, Path], int] | None = None,
        laws: Mapping[tuple[int, Path], Sequence[float]] | None = None,
        uniforms: Mapping[tuple[int, Path], float] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._choices = choices or {}
        self._laws = laws or {}
        self._uniforms = uniforms or {}
        self._dtype = dtype
        self.asked: list[tuple[str, list[Place]]] = []
        self.residuals: list[list[float]] = []

    def choose(self, places: Sequence[Place]) -> list[int]:
        self.asked.append(("choose", list(places)))
        return [self._choices[place.sequence, place.path] for place in places]

    def probs_BV(self, places: Sequence[Place]) -> Tensor:
        self.asked.append(("probs", list(places)))
        return torch.tensor([self._laws[place.sequence, place.path] for place in places], dtype=self._dtype)

    def uniforms(self, places: Sequence[Place]) -> list[float]:
        return [self._uniforms[place.sequence, place.path] for place in places]

    def draw_from(self, weights_BV: Tensor, places: Sequence[Place]) -> list[int]:
        self.asked.append(("draw", list(places)))
        self.residuals.extend(weights_BV.tolist())
        return [int(row.argmax()) for row in weights_BV]


def g_test(tokens: Sequence[int], law: Sequence[float]) -> float:
    """p-value of the G-test that ``tokens`` were drawn from ``law``."""
    counts = [list(tokens).count(token) for token in range(len(law))]
    expected = [len(tokens) * p / math.fsum(law) for p in law]
    return float(stats.power_divergence(counts, expected, lambda_="log-likelihood").pvalue)


def verdict(path: Path, next_token: int) -> Verdict:
    return Verdict(path=path, next_token=next_token)
