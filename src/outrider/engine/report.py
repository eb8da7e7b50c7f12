"""From a verdict to the record of a pass: the one place that decides what counts (docs/glossary.md).

Tokens cut off by a stop or a limit leave ``drafted``, ``reached`` and ``accepted`` alike: a draft deeper than the last
committed token could not have been committed, however good it was.

Worked example: chain a-b-c-d, the verdict keeps a, b, c and adds a bonus token; b ends the output. Committed are a, b;
c, d and the bonus never existed: drafted 2, accepted 2, reached (1, 1), kept (1, 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.engine.queue import Ticket
from outrider.types import ROOT, Proposal, StepReport, Verdict

__all__ = ["PassCost", "count_reading", "prefill_cost", "report_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """What a pass cost, in milliseconds, and how large it was. Shared by all its sequences."""

    draft_ms: float
    verify_ms: float
    other_ms: float
    batch_size: int
    rows: int
    prefill_rows: int = 0
    is_prefill: bool = False
    is_recomputed: bool = False


def count_reading(ticket: Ticket, num_tokens: int, cost: PassCost) -> None:
    """A pass has read so many tokens more of a text."""
    ticket.num_read += num_tokens
    ticket.verify_ms += cost.verify_ms
    ticket.other_ms += cost.other_ms + cost.draft_ms


def prefill_cost(ticket: Ticket, cost: PassCost) -> PassCost:
    """What it took to read a text whose last part this pass read: all passes that read a part of it."""
    return replace(
        cost,
        draft_ms=0.0,
        verify_ms=ticket.verify_ms,
        other_ms=ticket.other_ms,
        rows=ticket.num_read - ticket.num_held,
        prefill_rows=0,
        is_prefill=True,
        is_recomputed=ticket.was_put_back,
    )


def report_of(
    proposal: Proposal, verdict: Verdict, tokens: tuple[int, ...], cost: PassCost, planned: int = 0
) -> StepReport:
    """The record of one sequence's share in a pass that committed ``tokens``; ``planned`` is what the planner allowed."""
    if not len(proposal):
        return _plain_report(tokens, cost, planned)
    depths = proposal.depths
    was_cut = len(tokens) <= len(verdict.path)
    deepest = len(tokens) if was_cut else max(depths, default=0)
    accepted = min(len(tokens), len(verdict.path))
    last_kept = (ROOT, *verdict.path)[-1]
    stood = min(deepest, len(verdict.path) + (last_kept in proposal.parents))
    return StepReport(
        tokens=tokens,
        drafted=sum(depth <= deepest for depth in depths) if was_cut else len(depths),
        accepted=accepted,
        reached=(1,) * stood + (0,) * (deepest - stood),
        kept=(1,) * accepted + (0,) * (deepest - accepted),
        refused=() if was_cut else tuple(proposal.tokens[node] for node in proposal.children(last_kept)),
        drafter=proposal.drafter,
        draft_ms=cost.draft_ms,
        verify_ms=cost.verify_ms,
        other_ms=cost.other_ms,
        batch_size=cost.batch_size,
        rows=cost.rows,
        prefill_rows=cost.prefill_rows,
        planned=planned,
        is_prefill=cost.is_prefill,
        is_recomputed=cost.is_recomputed,
    )


def _plain_report(tokens: tuple[int, ...], cost: PassCost, planned: int) -> StepReport:
    """Nothing was drafted, so nothing but the tokens and the cost is to be told."""
    return StepReport(
        tokens=tokens,
        draft_ms=cost.draft_ms,
        verify_ms=cost.verify_ms,
        other_ms=cost.other_ms,
        batch_size=cost.batch_size,
        rows=cost.rows,
        prefill_rows=cost.prefill_rows,
        planned=planned,
        is_prefill=cost.is_prefill,
        is_recomputed=cost.is_recomputed,
    )
