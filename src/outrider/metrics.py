"""The one definition of every acceptance metric (docs/glossary.md repeats it in words)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.types import StepReport

__all__ = ["Rates", "SpeculationStats"]


class Rates:
    """The rates of whatever counts passes: whole numbers of a decoding, or expectations of a replay."""

    __slots__ = ()

    passes: float
    steps: float
    committed: float
    drafted: float
    accepted: float

    @property
    def accepted_length(self) -> float | None:
        """1 + accepted / steps: the literature's tau, bonus included. ``None`` without a step."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def tokens_per_pass(self) -> float | None:
        """committed / passes: exactly 1.0 for plain decoding. ``None`` without a pass."""
        return self.committed / self.passes if self.passes else None

    @property
    def draft_rate(self) -> float | None:
        """steps / passes. ``None`` without a pass."""
        return self.steps / self.passes if self.passes else None

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted (of a tree: nodes). ``None`` without a draft."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(slots=True, kw_only=True)
class SpeculationStats(Rates):
    """Pooled counts: sums over passes and requests first, one division last.

    Attributes:
        passes: decode passes of the target. The pass that reads the prompt is not one.
        steps: passes that had at least one draft token.
        committed: tokens committed by decode passes, never the token that comes from prefill.
        drafted: draft tokens (of a tree: nodes) proposed, without those cut off by a stop or a limit.
        accepted: draft tokens committed.
        reached: ``reached[i]`` steps whose verification arrived at depth i + 1.
        kept: ``kept[i]`` steps that kept a draft token at depth i + 1.
    """

    passes: int = 0
    steps: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        """Count one pass; the prefill pass is ignored."""
        if report.is_prefill:
            return
        self.passes += 1
        self.committed += len(report.tokens)
        if not report.drafter:
            return
        self.steps += 1
        self.drafted += report.drafted
        self.accepted += report.accepted
        _add_into(self.reached, report.reached)
        _add_into(self.kept, report.kept)

    def merge(self, other: SpeculationStats) -> None:
        """Pool another record into this one."""
        self.passes += other.passes
        self.steps += other.steps
        self.committed += other.committed
        self.drafted += other.drafted
        self.accepted += other.accepted
        _add_into(self.reached, other.reached)
        _add_into(self.kept, other.kept)

    @staticmethod
    def pooled(parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """Sum of many records."""
        total = SpeculationStats()
        for part in parts:
            total.merge(part)
        return total

    def per_position(self) -> list[dict[str, int]]:
        """For each depth 1..: how many steps reached it and how many kept a draft token there."""
        kept = self.kept + [0] * (len(self.reached) - len(self.kept))
        return [{"reached": r, "accepted": a} for r, a in zip(self.reached, kept, strict=True)]

    def to_json(self, drafter: str) -> dict[str, object]:
        """The ``speculation`` object of a result."""
        return {
            "drafter": drafter,
            "passes": self.passes,
            "steps": self.steps,
            "committed": self.committed,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_length": self.accepted_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_pass": self.tokens_per_pass,
            "draft_rate": self.draft_rate,
            "per_position": self.per_position(),
        }


def _add_into(total: list[int], part: Iterable[int]) -> None:
    for depth, value in enumerate(part):
        if depth == len(total):
            total.append(0)
        total[depth] += value
