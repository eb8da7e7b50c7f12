"""How likely drafts are to be kept: counts of committed passes, decayed, by request, drafter and depth.

Of a pass only what verification looked at counts: the depths at which it stood before a draft token, and whether it kept one
there. How much was drafted behind a refusal never counts: the noise that drew those tokens serves again in the next step,
and a budget that depends on them would be a budget that depends on the tokens it is for (law 5).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.types import ROOT, Proposal, StepReport

__all__ = ["Belief", "Calibration", "Evidence", "Own", "Pooled", "evidence_of", "sibling_groups"]

DECAY, IDLE_DECAY = 0.96, 0.98
"""Weight of a request's older evidence after each ask, and after each step."""
POOLED_DECAY, SLOW_DECAY = 0.97, 0.9995
"""The same of the evidence of all requests, after each ask: what is so now, and what was ever so."""
SURPRISE = 0.5
"""Weight of older evidence after a try that succeeds: the text, or the traffic, is not what it was."""
OWN_PRIOR, POOLED_PRIOR = 6.0, 3.0
"""How many asks the next wider knowledge is worth: of all requests to one, of ever to now, of the card to ever."""
UNKNOWN_RATE = 0.6
"""Share of drafts that are kept, where neither a card nor a pass has told."""
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_TRUST = 8.0
"""How many tested nodes a drafter's own estimate is worth."""
_SCALE_PRIOR = 3.0
_LARGEST = 1e9
REFRESH = 8
"""Steps after which an idle request's chances are computed anew."""


def evidence_of(report: StepReport) -> tuple[bool, ...]:
    """Of each depth at which verification stood before a draft token: was one kept?"""
    flags: list[bool] = []
    for reached, kept in zip(report.reached, report.kept, strict=True):
        if not reached:
            break
        flags.append(bool(kept))
    return tuple(flags)


def sibling_groups(proposal: Proposal, report: StepReport) -> Iterable[tuple[list[float], int]]:
    """Siblings that verification stood before: what each was said to be worth there, and which was kept (-1: none)."""
    assert proposal.scores is not None
    node, children = ROOT, _children_of(proposal.parents)
    for depth, token in enumerate((*report.tokens[: report.accepted], None)):
        siblings = children.get(node, [])
        above = 0.0 if node == ROOT else proposal.scores[node]
        kept = next((place for place, child in enumerate(siblings) if proposal.tokens[child] == token), -1)
        if siblings and len(report.tokens) > depth:
            yield [math.exp(min(0.0, proposal.scores[child] - above)) for child in siblings], kept
        if kept < 0:
            return
        node = siblings[kept]


def _children_of(parents: Sequence[int]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


@dataclass(slots=True)
class Belief:
    """Decayed counts. ``offered`` of ``asked`` passes had drafts at all; ``kept`` of ``reached`` by depth.

    That older passes weigh less is kept as one number: a new pass counts for ``unit``, which grows.

    Attributes:
        expected, got: of drafts with estimates: what the estimates promised and what was kept.
        seen: the step that the counts were faded to.
        unit: what one pass counts for now; all counts are to be read in it.
    """

    asked: float = 0.0
    offered: float = 0.0
    reached: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    expected: float = 0.0
    got: float = 0.0
    seen: int = 0
    unit: float = 1.0

    def add(self, flags: Sequence[bool], *, decay: float) -> None:
        """One pass that asked the drafter; no flags: it had nothing to offer."""
        if decay < 1:
            self.fade(decay)
        unit, missing = self.unit, len(flags) - len(self.reached)
        self.asked += unit
        if missing > 0:
            self.reached += [0.0] * missing
            self.kept += [0.0] * missing
        if flags:
            self.offered += unit
        for depth, kept in enumerate(flags):
            self.reached[depth] += unit
            if kept:
                self.kept[depth] += unit

    def compare(self, promised: float, is_kept: bool) -> None:
        """Siblings with estimates were tested: of them so many were to be kept."""
        self.expected += self.unit * promised
        self.got += self.unit * is_kept

    def fade(self, factor: float) -> None:
        """Old evidence weighs less."""
        self.unit /= max(factor, 1 / _LARGEST)
        if self.unit > _LARGEST:
            self._rescale()

    def _rescale(self) -> None:
        """A pass counts for 1 again."""
        share, self.unit = 1 / self.unit, 1.0
        self.asked *= share
        self.offered *= share
        self.expected *= share
        self.got *= share
        self.reached = [value * share for value in self.reached]
        self.kept = [value * share for value in self.kept]

    def fade_to(self, step: int, decay: float = IDLE_DECAY) -> None:
        """Steps went by."""
        if step > self.seen and self.asked:
            self.fade(decay ** (step - self.seen))
        self.seen = step

    def offer_rate(self, prior: float) -> float:
        """Share of the passes that ask which get drafts."""
        weight = OWN_PRIOR * self.unit
        return (self.offered + weight * prior) / (self.asked + weight)

    @property
    def scale(self) -> float:
        """By how much this request keeps more, or fewer, drafts than the estimates promise."""
        weight = _SCALE_PRIOR * self.unit
        return min(1.5, (self.got + weight) / (self.expected + weight))


class Calibration:
    """What a drafter's own estimates are worth: of the nodes said to be kept with a probability, how many were."""

    def __init__(self) -> None:
        self._tested = [0.0] * (len(_EDGES) + 1)
        self._kept = [0.0] * (len(_EDGES) + 1)

    def __call__(self, probability: float) -> float:
        """The estimate, corrected."""
        place = bisect_right(_EDGES, probability)
        return (self._kept[place] + _TRUST * probability) / (self._tested[place] + _TRUST)

    def add(self, estimates: Sequence[float], kept: int) -> float:
        """Siblings were tested, and one of them was kept (-1: none). Returns how many of them it had promised."""
        promised = 0.0
        for index, probability in enumerate(estimates):
            place = bisect_right(_EDGES, probability)
            num_tested, num_kept = self._tested[place], self._kept[place]
            promised += (num_kept + _TRUST * probability) / (num_tested + _TRUST)
            self._tested[place] = 0.999 * num_tested + 1
            self._kept[place] = 0.999 * num_kept + (index == kept)
        return promised

    def path_probs(self, proposal: Proposal, scale: float) -> list[float]:
        """Corrected probability that each node of a proposal is kept; a child's never exceeds its parent's."""
        assert proposal.scores is not None
        probs: list[float] = []
        scores, calibrated = proposal.scores, self.__call__
        for score, parent in zip(scores, proposal.parents, strict=True):
            above, base = (1.0, 0.0) if parent == ROOT else (probs[parent], scores[parent])
            rate = scale * calibrated(math.exp(score - base) if score < base else 1.0)
            probs.append(above * rate if rate < 1.0 else above)
        return probs


class Pooled:
    """A drafter's evidence from all requests, now and ever, and what was known of it before.

    Args:
        card_rates: rates by depth from the drafter's evaluation; empty where nobody knows.
    """

    def __init__(self, card_rates: Sequence[float] = ()) -> None:
        self._card = tuple(card_rates)
        self._rates: list[float] = []
        self.now, self.ever = Belief(), Belief()
        self.calibration = Calibration()

    def add(self, flags: Sequence[bool], *, is_surprise: bool = False) -> None:
        """A request's pass that asked the drafter."""
        self.now.add(flags, decay=SURPRISE if is_surprise else POOLED_DECAY)
        self.ever.add(flags, decay=SLOW_DECAY)
        self._rates = []

    def rates(self, most: int) -> list[float]:
        """Share of the drafts at each depth that are kept where verification stands before them.

        A depth that nothing is known of is taken to be as the one above it.
        """
        if len(self._rates) < most:
            rate = UNKNOWN_RATE
            self._rates = []
            for depth in range(most):
                rate = self._card[min(depth, len(self._card) - 1)] if self._card else rate
                for belief in (self.ever, self.now):
                    if depth < len(belief.reached):
                        weight = POOLED_PRIOR * belief.unit
                        rate = (belief.kept[depth] + weight * rate) / (belief.reached[depth] + weight)
                self._rates.append(rate)
        return self._rates

    @property
    def offer_rate(self) -> float:
        """Share of the passes that ask which get drafts."""
        rate = 1.0
        for belief in (self.ever, self.now):
            weight = POOLED_PRIOR * belief.unit
            rate = (belief.offered + weight * rate) / (belief.asked + weight)
        return rate

    def survivals(self, own: Belief, most: int) -> list[float]:
        """Chance that the first 1, 2, .. ``most`` drafts of a request are kept, once drafts are there.

        Where the request's own evidence ends, its rate one depth up and the others' rate there are each half the truth.
        """
        survivals: list[float] = []
        chance = rate = 1.0
        reached, kept, weight, known = own.reached, own.kept, OWN_PRIOR * own.unit, len(own.reached)
        for depth, prior in enumerate(self.rates(most)[:most]):
            rate = prior if depth == 0 else 0.5 * (prior + rate)
            if depth < known:
                rate = (kept[depth] + weight * rate) / (reached[depth] + weight)
            chance *= rate
            survivals.append(chance)
        return survivals


@dataclass(slots=True)
class Own:
    """What is remembered of one request and one drafter.

    Attributes:
        belief: counts of the request's own passes.
        last_asked: step at which it was asked (or began); num_asks: how often it was.
        given: chances of its drafts, once they are there, as computed at step ``computed``.
        survivals: the same when it is not yet known whether drafts come; ``hope`` is their sum.
        is_new: it has not been decided yet whether its hidden states are kept.
        has_lapsed, warm_since: its hidden states are not kept any more; are kept again since a step.
    """

    belief: Belief
    last_asked: int
    num_asks: int = 0
    given: list[float] = field(default_factory=list)
    survivals: list[float] = field(default_factory=list)
    computed: int = -1
    hope: float = 0.0
    is_new: bool = True
    has_lapsed: bool = False
    warm_since: int | None = None


class Evidence:
    """Everything learned, of all requests and drafters.

    Args:
        card_rates: by drafter's name; see :class:`outrider.drafters.base.ModelDrafter`.
        most: deepest draft that is ever asked for, by drafter's name.
    """

    def __init__(self, card_rates: Mapping[str, Sequence[float]], most: Mapping[str, int]) -> None:
        self.pooled = {name: Pooled(rates) for name, rates in card_rates.items()}
        self.step = 0
        self._most = most
        self._own: dict[int, dict[str, Own]] = {}

    def own(self, key: int, name: str) -> Own:
        """A request's memory of a drafter; its chances may be old."""
        each = self._own.get(key)
        if each is None:
            each = self._own[key] = {}
        own = each.get(name)
        if own is None:
            own = each[name] = Own(Belief(seen=self.step), self.step)
        return own

    def of(self, key: int, name: str) -> Own:
        """The same, its chances not older than :data:`REFRESH` steps."""
        own = self.own(key, name)
        if own.computed < 0 or self.step - own.computed >= REFRESH:
            own.belief.fade_to(self.step)
            pooled = self.pooled[name]
            own.given = pooled.survivals(own.belief, self._most[name])
            offer = own.belief.offer_rate(pooled.offer_rate)
            own.survivals = [offer * chance for chance in own.given]
            own.hope, own.computed = sum(own.survivals), self.step
        return own

    def probs(self, key: int, name: str, proposal: Proposal) -> list[float]:
        """Chance that each node of a proposal with estimates is kept."""
        return self.pooled[name].calibration.path_probs(proposal, self.of(key, name).belief.scale)

    def worth(self, key: int, name: str, proposal: Proposal) -> float:
        """Tokens that a proposal is expected to gain. Of a drawn one only its being there is looked at."""
        if proposal.scores is not None:
            return sum(self.probs(key, name, proposal))
        depth = max(proposal.depths, default=0) if proposal.draft_probs_NV is None else self._most[name]
        return sum(self.of(key, name).given[:depth])

    def learn(self, key: int, name: str, proposal: Proposal, report: StepReport, *, is_try: bool = False) -> None:
        """A request's pass that asked a drafter.

        Args:
            key, name: of the request and the drafter.
            proposal: as verified; an empty one had nothing to offer, or nothing that paid.
            report: what came of it.
            is_try: it was asked to learn.
        """
        own, pooled = self.of(key, name), self.pooled[name]
        own.belief.fade_to(self.step)
        flags = evidence_of(report) if len(proposal) else ()
        is_surprise = is_try and flags[:1] == (True,)
        own.belief.add(flags, decay=SURPRISE if is_surprise else DECAY)
        pooled.add(flags, is_surprise=is_surprise)
        if proposal.scores is not None and len(proposal):
            for estimates, kept in sibling_groups(proposal, report):
                own.belief.compare(pooled.calibration.add(estimates, kept), kept >= 0)
        own.last_asked, own.num_asks, own.computed = self.step, own.num_asks + 1, -1

    def forget(self, key: int) -> None:
        """The request ended."""
        self._own.pop(key, None)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Rates by drafter."""
        return {
            name: {
                "offer_rate": round(pooled.offer_rate, 4),
                "keep_rates": [round(rate, 4) for rate in pooled.rates(self._most[name])],
            }
            for name, pooled in self.pooled.items()
        }
