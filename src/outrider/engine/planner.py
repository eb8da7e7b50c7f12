"""Who drafts now, for which sequences, how deep. Zero is a good answer, and often the best one.

A step is planned in three moves, each from what is known before the drafts that it decides on (law 5):

1. *Lookups* (drafters that run no model) are asked where past evidence says that a look pays. What they find is a function of
   the committed text, so it may be looked at.
2. *Models* are asked for those sequences, and to that depth, where they gain most tokens a millisecond
   (:mod:`outrider.engine.allocation`), the lookups' finds and the drafter's own time counted. A drawn draft is verified as
   it was drawn.
3. *Trees with estimates* hold deterministic candidates only. Their nodes, of all sequences together, queue up by their
   corrected chance, and those that do not pay for their rows are left out.

Whoever is not asked is tried again now and then. Tries are paid from a purse that every step fills with a fixed share
(:mod:`outrider.engine.idle`) of its time, so that trying costs at most that share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any, Protocol

from outrider.drafters.base import Drafter, ModelDrafter, TapDrafter
from outrider.drafters.forced import FORCED
from outrider.engine.allocation import Bid, best_prefix, share_depths
from outrider.engine.beliefs import Evidence, Own
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable, DraftCosts, LiveCosts
from outrider.engine.idle import HOPELESS, WARM, Listeners, PlainLooks, Purse, Use, is_ready
from outrider.engine.plan import NO_ASK, Ask, StepPlan, ask_for
from outrider.engine.plan_costs import learn_costs, spent_ms, step_so_far
from outrider.engine.planlog import PlanLog, PlanRecord
from outrider.engine.speculation import SpeculationParams
from outrider.types import Proposal, StepReport

__all__ = ["Plannable", "Planner"]

MARGIN = 1.01
"""Predicted gain below which a step is left as it is: costs are measured, and measuring errs."""
TRY_DEPTH = 3
"""Most drafts of a try."""
TRY_FLOOR = 0.1
"""Share of a try's cost that is paid at least, however much it may gain."""
FIRST_LOOKS = 2
"""Looks of each request before its own evidence counts."""
NAP = 8
"""Steps that pass before the next look where nobody was worth asking."""
HORIZON = 64
"""Steps over which reading what a drafter missed is spread."""


class Plannable(Protocol):
    """What the planner reads of a running sequence; :class:`outrider.engine.sequence.LiveSequence` is one."""

    @property
    def key(self) -> int: ...
    @property
    def most_drafts(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def speculation(self) -> SpeculationParams: ...


class Planner:
    """Plans every step of an engine, and learns from it.

    Args:
        config: ``schedule="fixed"`` always asks the first drafter (or the request's own) for ``num_draft_tokens``.
        costs: of passes and drafts; only the adaptive schedule reads them.
        members: drafters that may be asked; none: every step is plain.
    """

    def __init__(self, config: EngineConfig, costs: CostTable, members: Sequence[Drafter] = ()) -> None:
        self._most = config.num_draft_tokens if members else 0
        self._is_fixed = config.schedule == "fixed"
        self._names = [member.name for member in members]
        self.models: dict[str, ModelDrafter] = {m.name: m for m in members if isinstance(m, ModelDrafter)}
        self._lookups = [name for name in self._names if name not in self.models]
        self._uses = {name: Use() for name in self._names}
        self._listeners = {m.name: Listeners(self._uses[m.name]) for m in members if isinstance(m, TapDrafter)}
        cards = {name: self.models[name].card_rates if name in self.models else () for name in self._names}
        deepest = {name: self.models[name].deepest if name in self.models else self._most for name in self._names}
        self.evidence = Evidence(cards, {name: min(self._most, depth) for name, depth in deepest.items()})
        self.costs = LiveCosts(costs, self._names)
        self.log = PlanLog()
        self._purse = Purse()
        self._nap_until, self._signature = 0, (0, 0)
        self._plain_looks = PlainLooks()

    def open(self, sequences: Sequence[Plannable], *, num_other_rows: int = 0) -> StepPlan:
        """A step begins: who is asked first. With a fixed schedule that is all.

        Args:
            sequences: of the step; there may be none.
            num_other_rows: of prompts that are read in the same pass.
        """
        self.evidence.step += 1
        size = len(sequences)
        context = sum(s.num_tokens for s in sequences) / max(1, size)
        curve = self.costs.passes(size + num_other_rows, is_drafted=False)
        plain_ms = curve[size] + self.costs.around_ms(size, context, is_drafted=False)
        self._purse.fill(plain_ms, is_hopeless=self._is_hopeless())
        plan = StepPlan(
            asks=[NO_ASK] * size,
            gains=[0.0] * size,
            num_rows=float(size + num_other_rows),
            num_other_rows=num_other_rows,
            other_ms=curve[size + num_other_rows] - curve[size],
            context=context,
            plain_ms=plain_ms,
        )
        if not self._most or not size:
            return plan
        if self._is_fixed:
            plan.asks = [self._fixed_ask(sequence) for sequence in sequences]
            return plan
        plan.is_nap = self._naps(sequences) or self._looks_at_plain(plan)
        if not plan.is_nap:
            plan.caps = [self._cap(sequence) for sequence in sequences]
            if self._lookups:
                self._plan_lookups(plan, sequences)
        return plan

    def ask_models(self, plan: StepPlan, sequences: Sequence[Plannable], proposals: Sequence[Proposal]) -> list[Ask]:
        """The second round, with the lookups' finds at hand; empty where no model is asked.

        Args:
            plan: of this step; its gains are brought up to date.
            sequences: of this step.
            proposals: what the lookups found, one a sequence.
        """
        if self._is_fixed or not self._most or plan.is_nap or not sequences:
            return []
        asks = self._ask_each_model(plan, sequences, proposals) if self.models else []
        asked = {index for each in (plan.asks, asks) for index, ask in enumerate(each) if ask.depth}
        if len(asked) == len(plan.tried):
            self._nap_until = self.evidence.step + NAP
        return asks if any(ask.depth for ask in asks) else []

    def _ask_each_model(
        self, plan: StepPlan, sequences: Sequence[Plannable], proposals: Sequence[Proposal]
    ) -> list[Ask]:
        asks = [NO_ASK] * len(sequences)
        for index, (sequence, proposal) in enumerate(zip(sequences, proposals, strict=True)):
            if len(proposal):
                plan.gains[index] = self.evidence.worth(sequence.key, plan.asks[index].drafter, proposal)
                plan.num_rows += len(proposal)
        for name in self.models:
            self._plan_model(name, plan, sequences, proposals, asks)
        return asks

    def prune(self, plan: StepPlan, sequences: Sequence[Plannable], proposals: Sequence[Proposal]) -> list[Proposal]:
        """Leave out those deterministic candidates whose rows do not pay; the step's prediction is made then."""
        if not any(map(len, proposals)):
            plan.gains = [0.0] * len(proposals)
            plan.predicted_ms = plan.plain_ms + plan.other_ms + spent_ms(self.costs, plan)
            return list(proposals)
        probs: dict[int, list[float]] = {}
        gains, rows = [0.0] * len(proposals), len(proposals) + plan.num_other_rows
        for index, (sequence, ask, proposal) in enumerate(zip(sequences, plan.asks, proposals, strict=True)):
            if proposal.scores is not None and len(proposal) and not self._is_fixed:
                probs[index] = self.evidence.probs(sequence.key, ask.drafter, proposal)
            elif len(proposal):
                gains[index] = self._gain(sequence, ask, proposal)
                rows += len(proposal)
        step = step_so_far(
            self.costs, plan, rows=rows, tokens=len(proposals) + sum(gains), more=sum(map(len, probs.values()))
        )
        # Of equally likely nodes the first: the sort leaves their order alone.
        nodes = [(prob, index, node) for index, each in probs.items() for node, prob in enumerate(each)]
        nodes.sort(key=itemgetter(0), reverse=True)
        taken = best_prefix([prob for prob, _, _ in nodes], step)
        chosen: dict[int, list[int]] = {index: [] for index in probs}
        for prob, index, node in nodes[:taken]:
            chosen[index].append(node)
            gains[index] += prob
        plan.gains, plan.left_out, plan.predicted_ms = gains, len(nodes) - taken, step.ms_with(taken) + plan.other_ms
        if not plan.left_out:
            return list(proposals)
        return [
            proposal.only(sorted(chosen[index])) if index in chosen else proposal
            for index, proposal in enumerate(proposals)
        ]

    def _gain(self, sequence: Plannable, ask: Ask, proposal: Proposal) -> float:
        """Tokens expected of a proposal without estimates; what a grammar forces is certain to be kept."""
        if proposal.drafter == FORCED:
            return float(len(proposal))
        return min(self.evidence.worth(sequence.key, ask.drafter, proposal), float(ask.depth))

    def learn(
        self,
        plan: StepPlan,
        sequences: Sequence[Plannable],
        proposals: Sequence[Proposal],
        reports: Sequence[StepReport],
    ) -> None:
        """What came of it: the clocks, and what verification looked at. One report a sequence."""
        if not sequences:
            return
        if not self._is_fixed:
            learn_costs(self.costs, plan, reports[0])
        asked: dict[str, int] = {}
        for index, (ask, proposal, report) in enumerate(zip(plan.asks, proposals, reports, strict=True)):
            if ask.depth and proposal.drafter != FORCED:
                key, is_try = sequences[index].key, index in plan.tried
                self.evidence.learn(key, ask.drafter, proposal, report, is_try=is_try)
                if is_try and not report.accepted and ask.drafter in self._listeners:
                    self._listeners[ask.drafter].note_failure(self.evidence.own(key, ask.drafter), self.evidence.step)
                asked[ask.drafter] = asked.get(ask.drafter, 0) + 1
        for index, name in plan.silent:
            self.evidence.learn(sequences[index].key, name, Proposal(), reports[index])
        first, tokens = reports[0], sum(len(report.tokens) for report in reports)
        sizes = [len(proposal.tokens) for proposal in proposals]
        record = PlanRecord(
            step=self.evidence.step,
            batch_size=len(reports),
            context=round(plan.context),
            asked=asked,
            nodes=sum(sizes),
            left_out=plan.left_out,
            tries=len(plan.tried),
            predicted_ms=plan.predicted_ms,
            predicted_tokens=len(reports) + sum(plan.gains),
            observed_ms=first.draft_ms + first.verify_ms + first.other_ms,
            tokens=tokens,
            plain_ms=plan.plain_ms + plan.other_ms,
        )
        self._plain_looks.count(record)
        self.log.add(record, len(sizes) - sizes.count(0))

    def forget(self, sequence: Plannable) -> None:
        """The sequence ended."""
        self.evidence.forget(sequence.key)

    def wants_taps(self, sequence: Plannable) -> bool:
        """False while the hidden states of an idle sequence are not worth keeping."""
        if not self._listeners:
            return False
        wishes = sequence.speculation
        if not wishes.enabled or wishes.num_draft_tokens == 0:
            return False
        if self._is_fixed:
            return True
        step, key = self.evidence.step, sequence.key
        is_wanted = False
        for name, listeners in self._listeners.items():
            is_wanted |= listeners.keeps(self._admitted(key, name), step)
        return is_wanted

    def snapshot(self) -> dict[str, Any]:
        """Counters, rates and costs, as JSON values, for metrics and pages."""
        return {
            "schedule": "fixed" if self._is_fixed else "adaptive",
            "num_draft_tokens": self._most,
            "drafters": self.evidence.to_json(),
            "counters": asdict(self.log.counters),
            "purse_ms": round(self._purse.ms or 0.0, 3),
            "costs": self.costs.to_json(),
            "last": self.log.records[-1].to_json() if self.log.records else None,
        }

    def _is_hopeless(self) -> bool:
        """No model is of use, nor is any likely to be soon."""
        step, pooled = self.evidence.step, self.evidence.pooled
        hopes = [self._uses[name].is_recent(step) or pooled[name].rates(1)[0] > HOPELESS for name in self.models]
        return bool(hopes) and not any(hopes)

    def _naps(self, sequences: Sequence[Plannable]) -> bool:
        """For a few steps after one in which nobody was worth asking, unless somebody has come or gone."""
        known, self._signature = self._signature, (len(sequences), sum(sequence.key for sequence in sequences))
        return self.evidence.step < self._nap_until and known == self._signature

    def _looks_at_plain(self, plan: StepPlan) -> bool:
        """Go without drafts once, only to know what that takes now."""
        looks = self._plain_looks
        is_due = looks.is_due(is_known=self.costs.knows_both)
        return is_due and self._purse.pay(looks.price_ms(plan.plain_ms))

    # --- what a request allows

    def _cap(self, sequence: Plannable) -> int:
        """Deepest draft for a sequence: never past what its limit could commit."""
        wishes = sequence.speculation
        most = self._most if wishes.num_draft_tokens is None else min(self._most, wishes.num_draft_tokens)
        return max(0, min(sequence.most_drafts, most)) if wishes.enabled else 0

    @staticmethod
    def _allowed(sequence: Plannable, names: Sequence[str]) -> Sequence[str]:
        wanted = sequence.speculation.drafter
        return names if wanted is None else [name for name in names if name == wanted]

    def _fixed_ask(self, sequence: Plannable) -> Ask:
        cap = self._cap(sequence)
        return Ask(cap, self._allowed(sequence, self._names)[0]) if cap else NO_ASK

    # --- lookups

    def _plan_lookups(self, plan: StepPlan, sequences: Sequence[Plannable]) -> None:
        token_ms = plan.plain_ms / len(sequences)
        look_ms = {name: self.costs.drafts(name)(1, 1) for name in self._lookups}
        idle: list[tuple[int, int, Ask]] = []
        for index, (sequence, cap) in enumerate(zip(sequences, plan.caps, strict=True)):
            names = self._allowed(sequence, self._lookups) if cap else ()
            if not names:
                continue
            own, name = self._most_hopeful(sequence.key, names)
            if own.hope * token_ms > look_ms[name] or own.num_asks < FIRST_LOOKS:
                plan.asks[index] = ask_for(cap, name)
            else:
                idle.append((own.last_asked, index, ask_for(cap, name)))
        for _, index, ask in sorted(idle, key=lambda entry: entry[:2]):
            if not self._purse.pay(look_ms[ask.drafter]):
                return
            plan.asks[index] = ask
            plan.tried.add(index)

    def _most_hopeful(self, key: int, names: Sequence[str]) -> tuple[Own, str]:
        """Of these drafters the one of which most is expected, with what is known of it."""
        if len(names) == 1:
            return self.evidence.of(key, names[0]), names[0]
        return max(((self.evidence.of(key, name), name) for name in names), key=lambda pair: pair[0].hope)

    # --- models

    def _plan_model(
        self,
        name: str,
        plan: StepPlan,
        sequences: Sequence[Plannable],
        proposals: Sequence[Proposal],
        asks: list[Ask],
    ) -> None:
        """Give the drafter those sequences where it beats what they have."""
        call = self.costs.drafts(name)
        token_ms = plan.plain_ms / len(sequences)
        able = [
            index
            for index, sequence in enumerate(sequences)
            if plan.caps[index] and not asks[index].depth and sequence.speculation.drafter in (None, name)
        ]
        owns = {index: self.evidence.of(sequences[index].key, name) for index in able}
        for index in able if name in self._listeners else ():
            self._admitted(sequences[index].key, name)
        hoped = [index for index in able if owns[index].hope > plan.gains[index]]
        depths: dict[int, int] = {}
        if sum(owns[i].hope - plan.gains[i] for i in hoped) * token_ms > call.fixed + call.level:
            depths = self._share(name, plan, sequences, proposals, owns, hoped)
            if [index for index in depths if not self._is_ready(name, owns[index])]:
                ready = [index for index in hoped if not owns[index].has_lapsed]
                depths = self._share(name, plan, sequences, proposals, owns, ready)
        for index, depth in depths.items():
            asks[index] = Ask(depth, name)
            plan.tried.discard(index)
            plan.num_rows += self._rows(name, depth) - len(proposals[index])
            plan.gains[index] = sum(owns[index].survivals[:depth])
        if depths:
            self._uses[name].note(self.evidence.step)
        self._try_model(name, call, plan, sequences, owns, asks)

    def _share(
        self,
        name: str,
        plan: StepPlan,
        sequences: Sequence[Plannable],
        proposals: Sequence[Proposal],
        owns: dict[int, Own],
        hoped: Sequence[int],
    ) -> dict[int, int]:
        """For which of the hoped a drafter is worth asking, and how deep."""
        call = self.costs.drafts(name)
        bids = [self._bid(name, call, plan, sequences[i], owns[i], i, len(proposals[i])) for i in hoped]
        tokens = len(sequences) + sum(plan.gains)
        step = step_so_far(self.costs, plan, rows=plan.num_rows, tokens=tokens, more=self._most_rows(bids))
        depths = share_depths(bids, step, call, margin=MARGIN)
        return {index: depth for index, depth in zip(hoped, depths, strict=True) if depth}

    def _bid(
        self, name: str, call: DraftCosts, plan: StepPlan, sequence: Plannable, own: Own, index: int, lost_rows: int
    ) -> Bid:
        model = self.models[name]
        return Bid(
            survivals=own.survivals[: plan.caps[index]],
            rows_each=model.nodes_per_level,
            levels=model.levels,
            entry_ms=call.row * self._unread(name, sequence, own) / max(1, min(HORIZON, sequence.most_drafts)),
            lost=plan.gains[index],
            lost_rows=lost_rows,
        )

    def _try_model(
        self,
        name: str,
        call: DraftCosts,
        plan: StepPlan,
        sequences: Sequence[Plannable],
        owns: dict[int, Own],
        asks: list[Ask],
    ) -> None:
        """Ask for those that were not asked for longest, as far as the purse goes.

        Of those whose hidden states must be waited for, no more are listened to than it could pay for.
        """
        is_called = any(ask.drafter == name for ask in asks)
        opening = 0.0 if is_called else call.fixed + call.level + self._first_draft_ms(plan)
        if not self._purse.holds(TRY_FLOOR * (opening + call.sequence + call.node)):
            return
        awaited, can_await = 0.0, True
        for _, index in sorted((own.last_asked, index) for index, own in owns.items() if not asks[index].depth):
            own = owns[index]
            if own.has_lapsed and not can_await:
                continue
            price, depth = self._price_of_try(name, opening, plan, sequences[index], own, index)
            if not self._purse.holds(price + awaited * own.has_lapsed):
                if opening and not own.has_lapsed:
                    return
                can_await = can_await and not own.has_lapsed
            elif self._is_ready(name, own):
                self._purse.pay(price)
                asks[index], opening = Ask(depth, name), 0.0
                plan.gains[index] = sum(own.survivals[:depth])
                plan.num_rows += self._rows(name, depth)
                plan.tried.add(index)
            else:
                awaited += price

    def _price_of_try(
        self, name: str, opening: float, plan: StepPlan, sequence: Plannable, own: Own, index: int
    ) -> tuple[float, int]:
        """What asking for a sequence costs less what it may gain, at the depth where that is least; and that depth."""
        model, call, rows = self.models[name], self.costs.drafts(name), int(plan.num_rows)
        token_ms = plan.plain_ms / len(plan.asks)
        curve = self.costs.passes(rows + int(self._rows(name, TRY_DEPTH)))
        reading = call.row * self._unread(name, sequence, own) + plan.gains[index] * token_ms
        prices = []
        for depth in range(1, min(TRY_DEPTH, plan.caps[index], model.deepest) + 1):
            levels = min(depth, model.levels)
            cost = opening + call.level * (levels - 1) + call.sequence + call.node * levels
            cost += curve[rows + int(self._rows(name, depth))] - curve[rows] + reading
            prices.append((max(TRY_FLOOR * cost, cost - token_ms * sum(own.survivals[:depth])), depth))
        return min(prices)

    def _first_draft_ms(self, plan: StepPlan) -> float:
        """What it takes that there are any drafts at all, where the step has none so far."""
        rows = int(plan.num_rows)
        if rows > len(plan.asks) + plan.num_other_rows:
            return 0.0
        plain, drafted = (self.costs.passes(rows, is_drafted=kind)[rows] for kind in (False, True))
        return max(0.0, drafted - plain)

    def _admitted(self, key: int, name: str) -> Own:
        """What is known of a model's drafts for a sequence; whether it is listened to has been decided."""
        own = self.evidence.own(key, name)
        if own.is_new and name in self._listeners:
            self._listeners[name].admit(own, self.evidence.step)
        return own

    def _is_ready(self, name: str, own: Own) -> bool:
        return name not in self._listeners or is_ready(own, self.evidence.step)

    def _unread(self, name: str, sequence: Plannable, own: Own) -> int:
        """Tokens that a model has to read before it drafts; what was heard before its hidden states lapsed is void."""
        unread = self.models[name].backlog(sequence.key, sequence.num_tokens)
        return min(unread, WARM) if own.has_lapsed else unread

    @staticmethod
    def _most_rows(bids: Sequence[Bid]) -> float:
        return sum(min(len(bid.survivals), bid.levels) * bid.rows_each for bid in bids)

    def _rows(self, name: str, depth: int) -> float:
        """Rows that a model's drafts of some depth take."""
        model = self.models[name]
        return min(depth, model.levels) * model.nodes_per_level
