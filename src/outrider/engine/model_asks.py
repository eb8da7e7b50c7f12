"""For which sequences a drafter that runs a model is asked, and how deep.

The second of the planner's three moves (:mod:`outrider.engine.planner`): those are asked for that gain most tokens a
millisecond; who is not is tried now and then, as far as the purse (:mod:`outrider.engine.idle`) goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import ModelDrafter
from outrider.engine.allocation import Bid, share_depths
from outrider.engine.beliefs import Evidence, Own
from outrider.engine.costs import LiveCosts
from outrider.engine.idle import HOPELESS, WARM, Listeners, Purse, Use, is_ready
from outrider.engine.plan import Ask, Plannable, StepPlan
from outrider.engine.plan_costs import step_so_far
from outrider.types import Proposal

__all__ = ["ModelAsks"]

MARGIN = 1.01
"""Predicted gain below which a step is left as it is: costs are measured, and measuring errs."""
TRY_DEPTH = 3
"""Most drafts of a try."""
TRY_FLOOR = 0.1
"""Share of a try's cost that is paid at least, however much it may gain."""
HORIZON = 64
"""Steps over which reading what a drafter missed is spread."""


class ModelAsks:
    """Plans one model's drafts.

    Args:
        name, model: a drafter that runs one.
        evidence: what is known of all drafts. costs: of passes and drafts. purse: what tries are paid from.
        use: where it is noted that the model drafts.
        listeners: whose hidden states are kept for it; ``None`` if it reads none.
    """

    def __init__(
        self,
        name: str,
        model: ModelDrafter,
        *,
        evidence: Evidence,
        costs: LiveCosts,
        purse: Purse,
        use: Use,
        listeners: Listeners | None,
    ) -> None:
        self.name = name
        self._model, self._evidence, self._costs, self._purse = model, evidence, costs, purse
        self._use, self._listeners = use, listeners

    def plan(
        self,
        plan: StepPlan,
        sequences: Sequence[Plannable],
        proposals: Sequence[Proposal],
        asks: list[Ask],
    ) -> None:
        """Give the drafter those sequences where it beats what they have."""
        call = self._costs.drafts(self.name)
        token_ms = plan.plain_ms / len(sequences)
        able = [
            index
            for index, sequence in enumerate(sequences)
            if plan.caps[index] and not asks[index].depth and sequence.speculation.drafter in (None, self.name)
        ]
        owns = {index: self._evidence.of(sequences[index].key, self.name) for index in able}
        if self._listeners is not None:
            for own in owns.values():
                self._listeners.admit(own, self._evidence.step)
        hoped = [index for index in able if owns[index].hope > plan.gains[index]]
        depths: dict[int, int] = {}
        if sum(owns[i].hope - plan.gains[i] for i in hoped) * token_ms > call.fixed + call.level:
            depths = self._share(plan, sequences, proposals, owns, hoped)
            # All are asked whether they are ready: from then on who is not is listened to.
            if [index for index in depths if not self._is_ready(owns[index])]:
                ready = [index for index in hoped if not owns[index].has_lapsed]
                depths = self._share(plan, sequences, proposals, owns, ready)
        for index, depth in depths.items():
            asks[index] = Ask(depth, self.name)
            plan.tried.discard(index)
            plan.num_rows += self._rows(depth) - len(proposals[index])
            plan.gains[index] = sum(owns[index].survivals[:depth])
        if depths:
            self._use.note(self._evidence.step)
        self._try(plan, sequences, owns, asks)

    def _share(
        self,
        plan: StepPlan,
        sequences: Sequence[Plannable],
        proposals: Sequence[Proposal],
        owns: dict[int, Own],
        hoped: Sequence[int],
    ) -> dict[int, int]:
        """For which of the hoped a drafter is worth asking, and how deep."""
        call = self._costs.drafts(self.name)
        bids = [self._bid(plan, sequences[i], owns[i], i, len(proposals[i])) for i in hoped]
        tokens = len(sequences) + sum(plan.gains)
        step = step_so_far(self._costs, plan, rows=plan.num_rows, tokens=tokens, more=self._most_rows(bids))
        depths = share_depths(bids, step, call, margin=MARGIN)
        return {index: depth for index, depth in zip(hoped, depths, strict=True) if depth}

    def _bid(self, plan: StepPlan, sequence: Plannable, own: Own, index: int, lost_rows: int) -> Bid:
        model, call = self._model, self._costs.drafts(self.name)
        return Bid(
            survivals=own.survivals[: plan.caps[index]],
            rows_each=model.nodes_per_level,
            levels=model.levels,
            entry_ms=call.row * self._unread(sequence, own) / max(1, min(HORIZON, sequence.most_drafts)),
            lost=plan.gains[index],
            lost_rows=lost_rows,
        )

    def _try(self, plan: StepPlan, sequences: Sequence[Plannable], owns: dict[int, Own], asks: list[Ask]) -> None:
        """Ask for those that were not asked for longest, as far as the purse goes.

        Of those whose hidden states must be waited for, no more are listened to than it could pay for.
        """
        call, is_called = self._costs.drafts(self.name), any(ask.drafter == self.name for ask in asks)
        opening = 0.0 if is_called else call.fixed + call.level + self._first_draft_ms(plan)
        if not self._purse.holds(TRY_FLOOR * (opening + call.sequence + call.node)):
            return
        awaited, can_await = 0.0, True
        for _, index in sorted((own.last_asked, index) for index, own in owns.items() if not asks[index].depth):
            own = owns[index]
            if own.has_lapsed and not can_await:
                continue
            price, depth = self._price_of_try(opening, plan, sequences[index], own, index)
            if not self._purse.holds(price + awaited * own.has_lapsed):
                if opening and not own.has_lapsed:
                    return
                can_await = can_await and not own.has_lapsed
            elif self._is_ready(own):
                self._purse.pay(price)
                asks[index], opening = Ask(depth, self.name), 0.0
                plan.gains[index] = sum(own.survivals[:depth])
                plan.num_rows += self._rows(depth)
                plan.tried.add(index)
            else:
                awaited += price

    def _price_of_try(
        self, opening: float, plan: StepPlan, sequence: Plannable, own: Own, index: int
    ) -> tuple[float, int]:
        """What asking for a sequence costs less what it may gain, at the depth where that is least; and that depth."""
        model, call, rows = self._model, self._costs.drafts(self.name), int(plan.num_rows)
        token_ms = plan.plain_ms / len(plan.asks)
        curve = self._costs.passes(rows + int(self._rows(TRY_DEPTH)))
        reading = call.row * self._unread(sequence, own) + plan.gains[index] * token_ms
        prices = []
        for depth in range(1, min(TRY_DEPTH, plan.caps[index], model.deepest) + 1):
            levels = min(depth, model.levels)
            cost = opening + call.level * (levels - 1) + call.sequence + call.node * levels
            cost += curve[rows + int(self._rows(depth))] - curve[rows] + reading
            prices.append((max(TRY_FLOOR * cost, cost - token_ms * sum(own.survivals[:depth])), depth))
        return min(prices)

    def _first_draft_ms(self, plan: StepPlan) -> float:
        """What it takes that there are any drafts at all, where the step has none so far."""
        rows = int(plan.num_rows)
        if rows > len(plan.asks) + plan.num_other_rows:
            return 0.0
        plain, drafted = (self._costs.passes(rows, is_drafted=kind)[rows] for kind in (False, True))
        return max(0.0, drafted - plain)

    @property
    def is_hopeless(self) -> bool:
        """It is of no use, nor likely to be soon."""
        return not self._use.is_recent(self._evidence.step) and self._evidence.pooled[self.name].rates(1)[0] <= HOPELESS

    def _is_ready(self, own: Own) -> bool:
        return self._listeners is None or is_ready(own, self._evidence.step)

    def _unread(self, sequence: Plannable, own: Own) -> int:
        """Tokens that a model has to read before it drafts; what was heard before its hidden states lapsed is void."""
        unread = self._model.backlog(sequence.key, sequence.num_tokens)
        return min(unread, WARM) if own.has_lapsed else unread

    @staticmethod
    def _most_rows(bids: Sequence[Bid]) -> float:
        return sum(min(len(bid.survivals), bid.levels) * bid.rows_each for bid in bids)

    def _rows(self, depth: int) -> float:
        """Rows that a model's drafts of some depth take."""
        model = self._model
        return min(depth, model.levels) * model.nodes_per_level
