"""The planner drafts where it pays, stops where it does not, and comes back when the text changes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.planner import Planner, RowCosts
from outrider.types import StepReport

FLAT = RowCosts(rows=(1, 33), ms=(10.0, 11.0))
STEEP = RowCosts(rows=(1, 9), ms=(10.0, 50.0))


@dataclass
class Running:
    """What the planner reads of a sequence."""

    key: int = 0
    most_drafts: int = 1000


def step(depth: int, kept: int) -> StepReport:
    """A step that drafted a chain of ``depth`` of which ``kept`` were kept."""
    return StepReport(
        tokens=tuple(range(kept + 1)),
        drafted=depth,
        accepted=kept,
        reached=tuple(int(i <= kept) for i in range(depth)),
        kept=tuple(int(i < kept) for i in range(depth)),
        drafter="test" if depth else "",
    )


def run(planner: Planner, sequence: Running, *, passes: int, kept_of: float) -> list[int]:
    """Budgets over ``passes`` steps in which the share ``kept_of`` of each chain is kept."""
    budgets = []
    for _ in range(passes):
        [budget] = planner.budgets([sequence])  # type: ignore[list-item]
        planner.record(sequence, step(budget, int(budget * kept_of)))  # type: ignore[arg-type]
        budgets.append(budget)
    return budgets


def test_fixed_schedule_never_changes() -> None:
    planner = Planner(EngineConfig(num_draft_tokens=5, schedule="fixed"), STEEP)
    assert set(run(planner, Running(), passes=50, kept_of=0.0)) == {5}


def test_zero_draft_tokens_never_drafts() -> None:
    planner = Planner(EngineConfig(num_draft_tokens=0), FLAT)
    assert set(run(planner, Running(), passes=20, kept_of=1.0)) == {0}


def test_good_drafts_get_the_whole_budget() -> None:
    planner = Planner(EngineConfig(num_draft_tokens=8), FLAT)
    assert run(planner, Running(), passes=30, kept_of=1.0)[-10:] == [8] * 10


def test_refused_drafts_become_rare() -> None:
    planner = Planner(EngineConfig(num_draft_tokens=8), STEEP)
    budgets = run(planner, Running(), passes=400, kept_of=0.0)
    assert sum(budget > 0 for budget in budgets) < 40
    assert sum(budget > 0 for budget in budgets[200:]) >= 1, "it must try again"


def test_a_text_that_turns_predictable_is_drafted_again() -> None:
    planner = Planner(EngineConfig(num_draft_tokens=8), FLAT)
    sequence = Running()
    run(planner, sequence, passes=300, kept_of=0.0)
    budgets = run(planner, sequence, passes=200, kept_of=1.0)
    assert sum(budget > 0 for budget in budgets[-50:]) >= 45


def test_the_end_of_the_output_bounds_the_depth() -> None:
    planner = Planner(EngineConfig(num_draft_tokens=8), FLAT)
    sequence = Running(most_drafts=3)
    assert run(planner, sequence, passes=1, kept_of=1.0) == [3]
    assert planner.budgets([Running(most_drafts=0)]) == [0]  # type: ignore[list-item]


def test_steep_costs_draft_less_than_flat_ones() -> None:
    flat = Planner(EngineConfig(num_draft_tokens=8), FLAT)
    steep = Planner(EngineConfig(num_draft_tokens=8), STEEP)
    assert sum(run(steep, Running(), passes=60, kept_of=0.5)) < sum(run(flat, Running(), passes=60, kept_of=0.5))


def test_forgotten_sequences_leave_nothing() -> None:
    planner = Planner(EngineConfig(num_draft_tokens=8), FLAT)
    run(planner, Running(key=7), passes=5, kept_of=1.0)
    planner.forget(Running(key=7))  # type: ignore[arg-type]
    assert not planner._plans


@pytest.mark.parametrize(("rows", "ms"), [(1, 10.0), (5, 30.0), (9, 50.0), (17, 90.0)])
def test_costs_are_linear_between_and_beyond(rows: int, ms: float) -> None:
    assert STEEP(rows) == pytest.approx(ms)
