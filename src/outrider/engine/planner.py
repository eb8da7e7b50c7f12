"""Who drafts now, for which sequences, how deep. Zero is a good answer, and often the best one.

A step is planned in three moves, each from what is known before the drafts that it decides on (law 5):

1. *Lookups* (drafters that run no model) are asked where past evidence says that a look pays. What they find is a function of
   the committed text, so it may be looked at.
2. *Models* are asked for those sequences, and to that depth, where they gain most tokens a millisecond
   (:mod:`outrider.engine.model_asks`), the lookups' finds and the drafter's own time counted. A drawn draft is verified as
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
from typing import Any

from outrider.drafters.base import Drafter, ModelDrafter, TapDrafter
from outrider.drafters.forced import FORCED
from outrider.engine.allocation import best_prefix
from outrider.engine.beliefs import Evidence, Own
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable, LiveCosts
from outrider.engine.idle import Listeners, PlainLooks, Purse, Use
from outrider.engine.model_asks import ModelAsks
from outrider.engine.plan import NO_ASK, Ask, Plannable, StepPlan, ask_for
from outrider.engine.plan_costs import learn_costs, spent_ms, step_so_far
from outrider.engine.planlog import PlanLog, PlanRecord
from outrider.types import Proposal, StepReport

__all__ = ["Planner"]

FIRST_LOOKS = 2
"""Looks of each request before its own evidence counts."""
NAP = 8
"""Steps that pass before the next look where nobody was worth asking."""


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
        cards = {name: self.models[name].card_rates if name in self.models else () for name in self._names}
        deepest = {name: self.models[name].deepest if name in self.models else self._most for name in self._names}
        self.evidence = Evidence(cards, {name: min(self._most, depth) for name, depth in deepest.items()})
        self.costs = LiveCosts(costs, self._names)
        self.log = PlanLog()
        self._purse = Purse()
        uses = {name: Use() for name in self._names}
        self._listeners = {m.name: Listeners(uses[m.name]) for m in members if isinstance(m, TapDrafter)}
        self._asks_of = {
            name: ModelAsks(
                name,
                model,
                evidence=self.evidence,
                costs=self.costs,
                purse=self._purse,
                use=uses[name],
                listeners=self._listeners.get(name),
            )
            for name, model in self.models.items()
        }
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
        for model in self._asks_of.values():
            model.plan(plan, sequences, proposals, asks)
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
            is_wanted |= listeners.keeps(self.evidence.own(key, name), step)
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
        return bool(self._asks_of) and all(model.is_hopeless for model in self._asks_of.values())

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
