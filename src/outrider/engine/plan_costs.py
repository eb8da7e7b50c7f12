"""A plan's milliseconds: what the step takes as decided so far, and what came of the prediction."""

from __future__ import annotations

from outrider.engine.allocation import Step
from outrider.engine.costs import LiveCosts
from outrider.engine.plan import StepPlan
from outrider.types import StepReport

__all__ = ["learn_costs", "spent_ms", "step_so_far"]


def step_so_far(costs: LiveCosts, plan: StepPlan, *, rows: float, tokens: float, more: float) -> Step:
    """The step so far, when up to ``more`` rows may follow. What prompts take, they take whatever is drafted."""
    size, spent = len(plan.asks), spent_ms(costs, plan)
    is_plain = rows <= size + plan.num_other_rows
    return Step(
        tokens=tokens,
        ms=costs.around_ms(size, plan.context) + spent - plan.other_ms,
        rows=rows,
        curve=costs.passes(int(rows + more) + 2),
        row_ms=costs.row_ms(plan.context),
        bare_ms=plan.plain_ms + spent if is_plain else None,
    )


def spent_ms(costs: LiveCosts, plan: StepPlan) -> float:
    """Predicted time of the calls so far; what they really took must not decide anything in this step."""
    total = 0.0
    for call in plan.calls:
        drafter = costs.drafts(call.drafter)
        total += drafter(call.num_sequences, call.depth) + drafter.row * call.num_read
    return total


def learn_costs(costs: LiveCosts, plan: StepPlan, report: StepReport) -> None:
    """What the pass and the calls took, by the clock."""
    if not plan.num_other_rows:  # rows of prompts cost less: no logits are wanted of them
        costs.learn_pass(
            num_sequences=report.batch_size,
            rows=report.rows,
            context=plan.context,
            verify_ms=report.verify_ms,
            other_ms=report.other_ms,
        )
    for call in plan.calls:
        costs.learn_draft(
            call.drafter,
            num_sequences=call.num_sequences,
            depth=call.depth,
            num_read=call.num_read,
            draft_ms=call.ms,
        )
