"""The drafting of a step: ask lookups, ask models, leave out what does not pay; in this order and no other (law 5)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from outrider.drafters.base import Drafter, DraftRequest, ModelDrafter
from outrider.drafters.forced import ForcedDrafter
from outrider.drafters.portfolio import members_of
from outrider.engine.plan import NO_ASK, Ask, Call, StepPlan
from outrider.engine.planner import Planner
from outrider.engine.sequence import LiveSequence
from outrider.types import NO_DRAFT, Proposal

__all__ = ["draft"]


def draft(
    drafter: Drafter | None,
    planner: Planner,
    sequences: Sequence[LiveSequence],
    verification: str,
    *,
    num_other_rows: int = 0,
) -> tuple[StepPlan, list[Proposal]]:
    """Plan a step and draft for it.

    Args:
        drafter: one, a portfolio, or none.
        planner: decides who is asked.
        sequences: of the step.
        verification: of the engine; with the request it gives the mode of drafting.
        num_other_rows: of texts that are read in the same pass.

    Returns:
        The plan, and one proposal a sequence.
    """
    plan = planner.open(sequences, num_other_rows=num_other_rows)
    proposals = [NO_DRAFT] * len(sequences)
    if drafter is None:
        return plan, planner.prune(plan, sequences, proposals)
    models = planner.models
    _ask(drafter, models, plan, sequences, plan.asks, proposals, verification)
    asks = planner.ask_models(plan, sequences, proposals)
    if asks:
        found = [NO_DRAFT] * len(sequences)
        _ask(drafter, models, plan, sequences, asks, found, verification)
        for index, ask in enumerate(asks):
            # A model that has nothing to say gave up before it drew a token: the lookup's find may stand.
            if ask.depth and len(found[index]) == 0 and len(proposals[index]):
                plan.silent.append((index, ask.drafter))
            elif ask.depth:
                if plan.asks[index].depth and not len(proposals[index]):
                    plan.silent.append((index, plan.asks[index].drafter))
                plan.asks[index], proposals[index] = ask, found[index]
    _force_alone(sequences, proposals, verification)
    proposals = planner.prune(plan, sequences, proposals)
    return plan, [
        _fitted(sequence, proposal) if len(proposal) else proposal
        for sequence, proposal in zip(sequences, proposals, strict=True)
    ]


def _fitted(sequence: LiveSequence, proposal: Proposal) -> Proposal:
    """Chains are no longer than was asked for, which fits; a tree may have more nodes than its cache has room for."""
    return proposal.truncate(sequence.most_nodes) if proposal.draft_probs_NV is None else proposal


def _force_alone(sequences: Sequence[LiveSequence], proposals: list[Proposal], verification: str) -> None:
    """What a grammar leaves no choice about is drafted for nothing, also where nobody was asked or had anything to say."""
    mine = [
        index
        for index, (sequence, proposal) in enumerate(zip(sequences, proposals, strict=True))
        if sequence.request.grammar is not None and sequence.speculation.enabled and not len(proposal)
    ]
    if not mine:
        return
    wishes = [_draft_request(sequences[index], NO_ASK, verification) for index in mine]
    for index, proposal in zip(mine, ForcedDrafter().propose(wishes), strict=True):
        proposals[index] = proposal


def _ask(
    drafter: Drafter,
    models: Mapping[str, ModelDrafter],
    plan: StepPlan,
    sequences: Sequence[LiveSequence],
    asks: Sequence[Ask],
    proposals: list[Proposal],
    verification: str,
) -> None:
    """Call each drafter that is asked once, for all of its sequences; its time is kept."""
    asked = [index for index, ask in enumerate(asks) if ask.depth]
    for member in members_of(drafter) if asked else ():
        mine = [index for index in asked if asks[index].drafter == member.name]
        if not mine:
            continue
        wishes = [_draft_request(sequences[index], asks[index], verification) for index in mine]
        model = models.get(member.name)
        num_read = 0 if model is None else sum(model.backlog(wish.sequence, len(wish.tokens)) for wish in wishes)
        began = time.perf_counter()
        found = _with_forced(member, wishes)
        ms = (time.perf_counter() - began) * 1e3
        for index, proposal in zip(mine, found, strict=True):
            proposals[index] = proposal
        depth = max((max(proposal.depths, default=0) for proposal in found), default=0)
        levels = max(1, depth if model is None else min(depth, model.levels))
        call = Call(drafter=member.name, num_sequences=len(mine), depth=levels, num_read=num_read, ms=ms)
        plan.calls.append(call)


def _with_forced(member: Drafter, wishes: Sequence[DraftRequest]) -> list[Proposal]:
    """The drafter's proposals; tokens that a grammar forces are put in front of them, between and behind."""
    has_grammar = any(wish.grammar is not None for wish in wishes)
    if not has_grammar or isinstance(member, ForcedDrafter):
        return member.propose(wishes)
    return ForcedDrafter(member).propose(wishes)


def _draft_request(sequence: LiveSequence, ask: Ask, verification: str) -> DraftRequest:
    return DraftRequest(
        sequence=sequence.key,
        tokens=sequence.tokens,
        num_draft_tokens=ask.depth,
        mode=sequence.draft_mode(verification),
        params=sequence.params,
        seed=sequence.request.seed,
        choice=sequence.index,
        grammar=sequence.state.grammar,
        most_depth=sequence.most_drafts,
        prediction=sequence.request.prediction,
        drafter=ask.drafter,
    )
