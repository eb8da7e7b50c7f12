"""Tokens that a grammar leaves no choice about, drafted for nothing.

Where a schema says that ``{"name": "`` comes next, no model need be asked. Such tokens are put in front of another drafter's
proposals, between them and behind them, or stand alone (``--draft forced``). They are deterministic candidates, verified
like any others; the masked law is all on them, so they are always kept, and plain decoding commits the same ones.

Proposals of drafters that choose without a law (prompt lookup, suffix decoding, trees) are cut where the grammar forbids a
token. Drawn chains are never cut (law 5): their drafter masked its law before it drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.drafters.base import AheadDrafter, Drafter, DraftRequest
from outrider.sampling.matcher import GrammarMatcher, Path
from outrider.types import NO_DRAFT, ROOT, Proposal

__all__ = ["FORCED", "MOST_FORCED", "ForcedDrafter"]

FORCED = "forced"
"""Name of proposals that hold nothing but forced tokens: they say nothing about any drafter."""
MOST_FORCED = 32
"""Forced tokens a step and sequence: certain to be kept, but each is a row of the pass."""
_ROUNDS = 3
"""How often a drafter that reads ahead is asked again behind what the grammar forced."""


class ForcedDrafter:
    """Adds forced tokens to a drafter's proposals; requests without a grammar pass through unchanged.

    Args:
        inner: who else proposes; ``None`` for forced tokens alone.
    """

    def __init__(self, inner: Drafter | None = None) -> None:
        self.name = FORCED if inner is None else inner.name
        self.inner = inner
        self.parts = () if inner is None else (inner,)
        self._reads_ahead = _reads_ahead(inner)

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """Tell the other drafter."""
        if self.inner is not None:
            self.inner.start(sequence, tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request; at most ``most_depth`` deep where a grammar forces tokens."""
        proposals = [NO_DRAFT] * len(requests)
        growths = {
            index: _Growth(request, request.grammar)
            for index, request in enumerate(requests)
            if request.grammar is not None
        }
        for growth in growths.values():
            growth.force()
        asked = {index: request for index, request in enumerate(requests) if index not in growths}
        asked |= {index: growth.wish(self._reads_ahead) for index, growth in growths.items() if self._may_ask(growth)}
        for round_ in range(_ROUNDS):
            going: list[int] = []
            for index, proposal in self._ask(asked):
                if index not in growths:
                    proposals[index] = proposal
                elif growths[index].take(proposal, reads_ahead=self._reads_ahead):
                    going.append(index)
            if not self._reads_ahead or round_ == _ROUNDS - 1:
                break
            asked = {index: growths[index].wish(True) for index in going if self._may_ask(growths[index])}
        for index, growth in growths.items():
            proposals[index] = growth.proposal(self.name)
        return proposals

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Tell the other drafter."""
        if self.inner is not None:
            self.inner.observe(sequence, tokens, num_new)

    def finish(self, sequence: int) -> None:
        """Tell the other drafter."""
        if self.inner is not None:
            self.inner.finish(sequence)

    def _may_ask(self, growth: _Growth) -> bool:
        """A drafter that cannot read ahead drafts the forced tokens once more, so it is asked only if it may get further.

        Decided by the number of forced tokens, which depends on committed tokens alone (law 5).
        """
        if not growth.is_open or growth.num_left < 1:
            return False
        return self._reads_ahead or len(growth.path) < growth.num_left

    def _ask(self, asked: dict[int, DraftRequest]) -> list[tuple[int, Proposal]]:
        wishes = {index: request for index, request in asked.items() if request.num_draft_tokens > 0}
        if self.inner is None or not wishes:
            return []
        return list(zip(wishes, self.inner.propose(list(wishes.values())), strict=True))


@dataclass(slots=True)
class _Growth:
    """A proposal while it grows.

    Attributes:
        request, grammar: whose it is.
        tokens, parents, paths: of each node; a path ends with the node's own token.
        laws: of a drawn chain, the law of each node.
        tip, path: where the next tokens go on, and the draft tokens up to there.
        num_drafted, num_forced: nodes of either kind.
    """

    request: DraftRequest
    grammar: GrammarMatcher
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    laws: list[Tensor] | None = None
    tip: int = ROOT
    path: Path = ()
    num_drafted: int = 0
    num_forced: int = 0

    @property
    def num_left(self) -> int:
        """Draft tokens that the other drafter may still propose."""
        return min(self.request.num_draft_tokens - self.num_drafted, self.request.most_depth - len(self.path))

    @property
    def is_open(self) -> bool:
        """True unless the output ends at the tip."""
        return self.grammar.is_open(self.path)

    def wish(self, reads_ahead: bool) -> DraftRequest:
        """What the other drafter is asked for."""
        ahead = self.path if reads_ahead else ()
        return replace(self.request, num_draft_tokens=self.num_left, ahead=ahead)

    def force(self) -> None:
        """Go on from the tip with what must follow."""
        most = min(MOST_FORCED - self.num_forced, self.request.most_depth - len(self.path))
        for token in self.grammar.forced_run(self.path, most):
            self._add(self.tip, token)
            if self.laws is not None:
                self.laws.append(_all_on(token, self.laws[0]))
            self._move(len(self.tokens) - 1)
            self.num_forced += 1

    def take(self, proposal: Proposal, *, reads_ahead: bool) -> bool:
        """Add another drafter's proposal and what must follow it; False if nothing came of it."""
        before = self.num_drafted
        if proposal.draft_probs_NV is not None:
            self._take_drawn(proposal)
        else:
            self._graft(proposal, self.tip if reads_ahead else ROOT)
        if self.num_drafted > before:
            self.force()
        return self.num_drafted > before

    def proposal(self, drafter: str) -> Proposal:
        """What has grown; named after the other drafter if any node is its."""
        if not self.tokens:
            return NO_DRAFT
        return Proposal(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            draft_probs_NV=None if self.laws is None else torch.stack(self.laws),
            drafter=drafter if self.num_drafted else FORCED,
        )

    def _take_drawn(self, proposal: Proposal) -> None:
        """A drawn chain stays whole and stands alone: forced tokens before it would be tokens it did not read."""
        assert proposal.draft_probs_NV is not None
        self.tokens, self.parents, self.paths = [], [], []
        self.num_forced, self.num_drafted = 0, len(proposal)
        self.laws = list(proposal.draft_probs_NV.unbind(0))
        self._move(ROOT)
        for token in proposal.tokens:
            self._add(self.tip, token)
            self._move(len(self.tokens) - 1)

    def _graft(self, proposal: Proposal, base: int) -> None:
        """Fold a proposal of deterministic candidates in below ``base``, cut where the grammar forbids a token.

        The tip moves down along first children: the likeliest way on.
        """
        places = {ROOT: base}
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            above = places.get(parent)
            if above is None or len(self._path(above)) >= self.request.most_depth:
                continue
            child = self._child(above, token)
            if child is None and self.grammar.allows(self._path(above), token):
                child = self._add(above, token)
                self.num_drafted += 1
            if child is not None:
                places[node] = child
        tip = base
        while (first := self._first_child(tip)) is not None:
            tip = first
        self._move(tip)

    def _add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.paths.append((*self._path(parent), token))
        return len(self.tokens) - 1

    def _move(self, node: int) -> None:
        self.tip, self.path = node, self._path(node)

    def _path(self, node: int) -> Path:
        return () if node == ROOT else self.paths[node]

    def _child(self, parent: int, token: int) -> int | None:
        pairs = zip(self.parents, self.tokens, strict=True)
        return next((node for node, pair in enumerate(pairs) if pair == (parent, token)), None)

    def _first_child(self, parent: int) -> int | None:
        return next((node for node, above in enumerate(self.parents) if above == parent), None)


def _reads_ahead(drafter: object) -> bool:
    return isinstance(drafter, AheadDrafter) and drafter.reads_ahead


def _all_on(token: int, like_V: Tensor) -> Tensor:
    """The law of a token that must come."""
    law_V = torch.zeros_like(like_V)
    law_V[token] = 1
    return law_V
