"""What the checks of a device share: how much is run, until when, and on what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.audit.identity import explain
from outrider.drafters.base import Drafter
from outrider.drafters.build import make_drafter
from outrider.engine.result import GenerationResult
from outrider.models.base import LoadedTarget
from outrider.sampling.params import SamplingParams

__all__ = ["OUT_OF_TIME", "Clock", "Size", "Subject", "compared", "params_of"]

OUT_OF_TIME = "not run: out of time"
TEMPERATURE = 0.8
SEED = 20240229

Triple = tuple[Sequence[int], GenerationResult, GenerationResult]
"""A prompt, its plain result and the one that is compared with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is run: ``scheduled`` of the prompts go through the scheduler's check."""

    prompts: int
    scheduled: int
    tokens: int
    num_draft_tokens: int
    rounds: int
    precisions: tuple[str, ...]


class Clock:
    """Seconds since the start against a budget: what does not fit is named, never dropped silently."""

    def __init__(self, budget_s: float) -> None:
        self._begun = time.perf_counter()
        self._budget_s = budget_s

    @property
    def is_over(self) -> bool:
        """True once the budget is spent."""
        return time.perf_counter() - self._begun > self._budget_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked: one path of one precision, and the head that drafts for it."""

    target: LoadedTarget
    head: Path

    def drafter(self, name: str) -> Drafter | None:
        """A drafter by its name, in which ``HEAD`` stands for the head's folder."""
        return make_drafter(name.replace("HEAD", str(self.head)), self.target)


def params_of(kind: str, tokens: int) -> SamplingParams:
    """Sampling of a ``greedy`` or ``seeded`` request."""
    if kind == "greedy":
        return SamplingParams(max_tokens=tokens)
    return SamplingParams(max_tokens=tokens, temperature=TEMPERATURE, seed=SEED)


def compared(
    target: LoadedTarget, triples: Sequence[tuple[str, Triple]], tokens: int, tolerance: float
) -> dict[str, Any]:
    """How many outputs are equal, differ at a tie, or differ; each comes with the kind of its request."""
    found = [
        explain(target, prompt, plain, other, params=params_of(kind, tokens), tolerance=tolerance)
        for kind, (prompt, plain, other) in triples
    ]
    differences = [asdict(each) for each in found if each is not None]
    num_bugs = sum(each["verdict"] == "bug" for each in differences)
    return {
        "equal": len(triples) - len(differences),
        "ties": len(differences) - num_bugs,
        "different": num_bugs,
        "differences": differences,
        "verdict": "different" if num_bugs else "identical up to ties" if differences else "identical",
    }
