"""Drafters at work: requests are decoded, with every arm, by the engine that serves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.drafters.base import Drafter
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.measure.answers import Question
from outrider.measure.planned import PlannedPass, plan_of
from outrider.measure.record import Counts
from outrider.measure.tally import Mark
from outrider.models.base import Target

__all__ = ["LiveRun", "decode_live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """One request, decoded: its output, what the passes counted and cost, each of them, and the plan they followed."""

    question: Question
    output: tuple[int, ...]
    counts: Counts
    marks: tuple[Mark, ...]
    plan: tuple[PlannedPass, ...]


def decode_live(
    target: Target,
    drafter: Drafter | None,
    questions: Sequence[Question],
    *,
    num_draft_tokens: int,
    batch_size: int,
    verification: str = "auto",
    schedule: str = "fixed",
    costs: CostTable | None = None,
) -> Iterator[LiveRun]:
    """Decode all requests with one arm; yields them as they finish.

    Args:
        target, drafter: who decodes. questions: the requests.
        num_draft_tokens: of every step. batch_size: requests decoded together.
        verification: as the engine's setting.
        schedule: ``fixed`` drafts as many tokens in every step; ``adaptive`` lets the planner decide.
        costs: of passes and drafts, for the planner; measured if not given.
    """
    config = EngineConfig.from_dict(
        {
            "num_draft_tokens": num_draft_tokens,
            "schedule": schedule,
            "verification": verification,
            "max_batch_size": batch_size,
            "num_cached_prefixes": 0,  # so that no request's figures depend on its neighbours in the file
        }
    )
    engine = Engine(target, drafter=drafter, config=config, costs=costs)
    by_id = {question.request.id: question for question in questions}
    for question in questions:
        engine.submit(list(question.request.prompt), question.request.params, id=question.request.id)
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                yield _run(by_id[event.id], event.result)


def _run(question: Question, result: GenerationResult) -> LiveRun:
    steps = [step for step in result.steps if not step.is_prefill]
    counts = Counts.from_stats(
        result.stats,
        draft_ms=sum(step.draft_ms / step.batch_size for step in steps),
        verify_ms=sum(step.verify_ms / step.batch_size for step in steps),
        other_ms=sum(step.other_ms / step.batch_size for step in steps),
    )
    marks: list[Mark] = []
    start = sum(len(step.tokens) for step in result.steps if step.is_prefill)
    for step in steps:
        marks.append(Mark(start, step.accepted, len(step.tokens), step.refused))
        start += len(step.tokens)
    return LiveRun(question=question, output=result.token_ids, counts=counts, marks=tuple(marks), plan=plan_of(steps))
