"""Counting passes that were never run. What counts is decided where the engine's passes are counted: ``report_of``.

A pass over a chain is told by three numbers (draft tokens, how many of them were kept, tokens committed), so that passes
of equal numbers are counted together, with a weight: a probability where the pass is one of several possible ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from outrider.engine.report import PassCost, report_of
from outrider.measure.record import Counts
from outrider.metrics import SpeculationStats
from outrider.types import NO_DRAFT, Proposal, StepReport, Verdict

__all__ = ["NO_COST", "Mark", "Scores", "Tally", "chain_report"]

NO_COST = PassCost(draft_ms=0.0, verify_ms=0.0, other_ms=0.0, batch_size=1, rows=1)
"""Of a pass that was not run."""


@lru_cache(maxsize=65536)
def chain_report(num_drafted: int, num_kept: int, num_committed: int) -> StepReport:
    """The record of a pass over a chain; its tokens stand for any."""
    proposal = Proposal.chain((0,) * num_drafted, drafter="chain") if num_drafted else NO_DRAFT
    verdict = Verdict(path=tuple(range(num_kept)), next_token=0)
    return report_of(proposal, verdict, (0,) * num_committed, NO_COST)


@lru_cache(maxsize=65536)
def _chain_counts(num_drafted: int, num_kept: int, num_committed: int) -> Counts:
    stats = SpeculationStats()
    stats.add(chain_report(num_drafted, num_kept, num_committed))
    return Counts.from_stats(stats)


@dataclass(slots=True)
class Tally:
    """Passes of one request under one arm."""

    _chains: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _trees: SpeculationStats = field(default_factory=SpeculationStats)

    def add_chain(self, num_drafted: int, num_kept: int, num_committed: int, weight: float = 1.0) -> None:
        """Count a pass over a chain, or over nothing but the root (``num_drafted`` 0)."""
        key = num_drafted, num_kept, num_committed
        self._chains[key] = self._chains.get(key, 0.0) + weight

    def add(self, report: StepReport) -> None:
        """Count any pass."""
        self._trees.add(report)

    def counts(self) -> Counts:
        """All of it."""
        chains = (_chain_counts(*key).times(weight) for key, weight in self._chains.items())
        return Counts.pooled([Counts.from_stats(self._trees), *chains])


@dataclass(frozen=True, slots=True)
class Mark:
    """One pass of a watched arm: where it began in the output, draft tokens kept, tokens committed, drafts refused."""

    start: int
    num_kept: int
    num_committed: int
    refused: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What each length did on one text; ``marks`` are those of the watched length, where its passes are certain."""

    counts: dict[int, Counts]
    marks: tuple[Mark, ...] = ()
