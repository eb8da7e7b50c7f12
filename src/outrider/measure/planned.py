"""Replay of a recorded plan: how deep each pass drafted was decided while it decoded, by measured times and luck.

With a fixed number of draft tokens replay knows what every pass is allowed. A planner decides anew at each pass, from times
that no text tells. So its decisions are recorded (each pass's report has them), and replay follows them: the drafter is asked
for what it was asked for then, at the place where replay itself has arrived, and the text says what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.base import Drafter
from outrider.engine.report import report_of
from outrider.errors import ConfigError
from outrider.measure.expected import FollowedText
from outrider.measure.replay import draft_mode, matching_path
from outrider.measure.tally import NO_COST, Mark, Scores, Tally
from outrider.measure.target_pass import ReadText
from outrider.types import NO_DRAFT, DraftMode, Proposal, StepReport, Verdict

__all__ = ["PlannedPass", "plan_of", "replay_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPass:
    """What one pass was allowed.

    Attributes:
        drafter: who was asked; empty if nothing was drafted.
        depth: deepest draft that was asked for.
        num_nodes: draft nodes that the pass held (less those behind a stop); 0 if nothing was drafted.
        is_cut: a stop or a limit ended the output inside this pass, so that ``num_nodes`` may be fewer than it held.
    """

    drafter: str
    depth: int
    num_nodes: int
    is_cut: bool = False


def plan_of(steps: Sequence[StepReport]) -> tuple[PlannedPass, ...]:
    """The plan that a request's passes followed; the reading of its prompt is no part of it."""
    return tuple(
        PlannedPass(
            drafter=step.drafter,
            depth=step.planned,
            num_nodes=step.drafted,
            is_cut=0 < len(step.tokens) <= step.accepted,
        )
        for step in steps
        if not step.is_prefill
    )


def replay_plan(
    drafter: Drafter, read: ReadText, plan: Sequence[PlannedPass], *, key: int, verification: str = "auto"
) -> Scores:
    """Score one text as passes with this plan would have decoded it.

    Args:
        drafter: as it was while the plan was made, with what it then remembered.
        read: what the target said, with the taps that the drafter wants.
        plan: of each pass, in order.
        key: a fresh id of a sequence.
        verification: as the engine's setting.

    Returns:
        Scores under the length 0, since the plan has no single one; ``marks`` tell each pass.

    Raises:
        ConfigError: drafts that are drawn; a plan that is not of this text and drafter.
    """
    mode = draft_mode(read, verification)
    text = FollowedText(drafter, read, key)
    try:
        return _follow(drafter, text, plan, mode)
    finally:
        text.finish()


def _follow(drafter: Drafter, text: FollowedText, plan: Sequence[PlannedPass], mode: DraftMode) -> Scores:
    output, tally, marks = text.read.text.output, Tally(), []
    here = 1
    for asked in plan:
        if here >= len(output):
            raise ConfigError(f"the plan has more passes than text {text.read.text.id!r}; give the plan of this text")
        text.advance(here)
        proposal = _proposal(drafter, text, asked, mode)
        path = matching_path(proposal, output, here)
        tokens = output[here : here + len(path) + 1]
        report = report_of(proposal, Verdict(path=path, next_token=tokens[-1]), tokens, NO_COST, asked.depth)
        tally.add(report)
        marks.append(Mark(here, report.accepted, len(tokens), report.refused))
        here += len(tokens)
    if here < len(output):
        raise ConfigError(f"the plan has fewer passes than text {text.read.text.id!r}; give the plan of this text")
    return Scores(counts={0: tally.counts()}, marks=tuple(marks))


def _proposal(drafter: Drafter, text: FollowedText, asked: PlannedPass, mode: DraftMode) -> Proposal:
    if not asked.num_nodes:
        return NO_DRAFT
    [proposal] = drafter.propose([text.request(asked.depth, mode, drafter=asked.drafter)])
    if proposal.draft_probs_NV is not None:
        raise ConfigError(f"{drafter.name} draws its drafts, so that no plan tells what it drafted; give --seed")
    if asked.is_cut and proposal.is_chain:
        return proposal  # what stood behind the stop counts nowhere
    if len(proposal) > asked.num_nodes and not proposal.is_chain and not asked.is_cut:
        raise ConfigError(
            f"the plan left out {len(proposal) - asked.num_nodes} of {len(proposal)} nodes of a tree and does not say which; "
            "plans of trees are replayed where all of their nodes were kept"
        )
    return proposal if asked.is_cut else proposal.truncate(asked.num_nodes)
