"""From a verdict to the record of a pass: the one place that decides what counts (docs/glossary.md).

Tokens cut off by a stop or a limit leave ``drafted``, ``reached`` and ``accepted`` alike: a draft deeper than the last
committed token could not have been committed, however good it was.

Worked example: chain a-b-c-d, the verdict keeps a, b, c and adds a bonus token; b ends the output. Committed are a, b;
c, d and the bonus never existed: drafted 2, accepted 2, reached (1, 1), kept (1, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.types import ROOT, Proposal, StepReport, Verdict

__all__ = ["PassCost", "report_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """What a pass cost, in milliseconds, and how large it was. Shared by all its sequences."""

    draft_ms: float
    verify_ms: float
    other_ms: float
    batch_size: int
    rows: int
    is_prefill: bool = False


def report_of(
    proposal: Proposal, verdict: Verdict, tokens: tuple[int, ...], cost: PassCost, planned: int = 0
) -> StepReport:
    """The record of one sequence's share in a pass that committed ``tokens``; ``planned`` is what the planner allowed."""
    depths = proposal.depths
    was_cut = len(tokens) <= len(verdict.path)
    deepest = len(tokens) if was_cut else max(depths, default=0)
    accepted = min(len(tokens), len(verdict.path))
    last_kept = (ROOT, *verdict.path)[-1]
    return StepReport(
        tokens=tokens,
        drafted=sum(depth <= deepest for depth in depths),
        accepted=accepted,
        reached=tuple(_reached(proposal, verdict, depth) for depth in range(1, deepest + 1)),
        kept=tuple(int(depth <= accepted) for depth in range(1, deepest + 1)),
        refused=() if was_cut else tuple(proposal.tokens[node] for node in proposal.children(last_kept)),
        drafter=proposal.drafter if len(proposal) else "",
        draft_ms=cost.draft_ms,
        verify_ms=cost.verify_ms,
        other_ms=cost.other_ms,
        batch_size=cost.batch_size,
        rows=cost.rows,
        planned=planned,
        is_prefill=cost.is_prefill,
    )


def _reached(proposal: Proposal, verdict: Verdict, depth: int) -> int:
    """1 if verification stood above ``depth`` and a draft token waited there."""
    if depth - 1 > len(verdict.path):
        return 0
    return int(bool(proposal.children((ROOT, *verdict.path)[depth - 1])))
