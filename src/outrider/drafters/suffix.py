"""Suffix decoding (arXiv 2411.04975): drafts from everything said before, in this request and in finished ones.

One index holds each active sequence (prompt and output), one holds the responses of finished sequences. Three rules turn
them into drafts:

``tree``   (default) the likeliest nodes, best first, wherever they are: see :mod:`outrider.drafters.suffix_tree`.
``chain``  the likeliest token after the likeliest token, by the same estimates.
``paper``  the paper's: look at every suffix of the text that the index knows, follow the most frequent continuation of
           each, and keep the path with the best score, the sum of the estimated probabilities that its tokens are right.
           A longer match earns the right to a longer path.

On greedy answers of SmolLM2-135M-Instruct to 120 Spec-Bench prompts, answered one after the other, with at most 8 draft
tokens, they commit 2.58, 2.44 and 2.12 tokens a pass; prompt lookup 2.25.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log

from outrider.drafters.base import DraftRequest
from outrider.drafters.suffix_index import RANK_UNIT, START, WIDEST, SuffixIndex
from outrider.drafters.suffix_tree import OWN_DOUBT, SHARED_DOUBT, Place, Source, grow_tree
from outrider.drafters.tree import ScoredTree
from outrider.errors import ConfigError, nearest
from outrider.types import NO_DRAFT, ROOT, Proposal

__all__ = ["ScoreRule", "SuffixDrafter", "speculate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How long a path may grow, and when it is given up.

    Attributes:
        factor: draft tokens allowed for each token of the match.
        offset: draft tokens allowed besides.
        min_prob: a path ends before its estimated probability falls below this.
    """

    factor: float = 1.0
    offset: float = 0.0
    min_prob: float = 0.1

    def most_tokens(self, matched: int, wanted: int) -> int:
        """Draft tokens that a match of ``matched`` tokens may propose."""
        return min(wanted, floor(matched * self.factor + self.offset))


RULES = ("tree", "chain", "paper")


@dataclass(slots=True)
class _Shared:
    """Responses of finished sequences of one scope; nodes known from an older version may have been split or removed."""

    index: SuffixIndex
    version: int = 0

    @property
    def num_nodes(self) -> int:
        """Without the one that every index has."""
        return self.index.num_nodes - 1


@dataclass(slots=True)
class _Active:
    """One running sequence and where the shared index last saw it: node, matched tokens, tokens read, version read.

    Its own index holds the first ``num_indexed`` tokens; the others are added when a draft is asked for.
    """

    index: SuffixIndex
    shared: _Shared
    tokens: Sequence[int]
    num_prompt: int
    num_indexed: int = 0
    node: int = START
    matched: int = 0
    num_read: int = 0
    version: int = -1
    predicted: _Predicted | None = None


@dataclass(slots=True)
class _Predicted:
    """Where a sequence stands in the text that it may repeat."""

    index: SuffixIndex
    node: int = START
    matched: int = 0
    num_read: int = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Follow the committed tokens that were not read yet."""
        for token in tokens[max(self.num_read, len(tokens) - self.index.depth + 1) :]:
            self.node, self.matched = self.index.advance(self.node, self.matched, token)
        self.num_read = len(tokens)


class SuffixDrafter:
    """Drafts what followed any suffix of the text before.

    Of equally frequent continuations the one seen last is followed; of equally good drafts the one from the longer match
    wins, then the one from the sequence's own text.

    A request's ``prediction`` is one more text that its continuation is looked for in.

    A path that reaches the depth limit goes on from its longest suffix inside the limit, so that a long repetition is
    followed for as many tokens as are wanted (the tree of the paper ends there).

    Args:
        rule: ``tree``, ``chain`` or ``paper``, as above. Trees have at most as many nodes as draft tokens are wanted.
        max_depth: tokens of the longest counted substring: a match and what follows it.
        width: children of a node of a ``tree``, at most 8.
        min_prob: drafts less likely than this to be kept are left out; ``None`` is 0.1 for ``paper``, else 0.
        factor, offset: of the ``paper`` rule, see :class:`ScoreRule`.
        max_nodes: nodes that finished responses may take together (about 350 bytes each); past it the oldest responses
            are forgotten whole, those of scopes that were not heard of for longest first. 0 remembers none.

    Raises:
        ConfigError: a value out of range.
    """

    def __init__(
        self,
        *,
        rule: str = "tree",
        max_depth: int = 24,
        width: int = 4,
        min_prob: float | None = None,
        factor: float = 1.0,
        offset: float = 0.0,
        max_nodes: int = 200_000,
    ) -> None:
        _require(rule in RULES, "rule", rule, f"{', '.join(RULES)}{nearest(rule, RULES)}")
        _require(1 <= width <= WIDEST, "width", width, f"1 to {WIDEST}")
        _require(2 <= max_depth <= 256, "max_depth", max_depth, "2 to 256")
        _require(0 <= factor <= 128, "factor", factor, "0 to 128")
        _require(0 <= offset <= 128, "offset", offset, "0 to 128")
        _require(min_prob is None or 0 <= min_prob <= 1, "min_prob", min_prob, "0 to 1")
        _require(0 <= max_nodes <= 100_000_000, "max_nodes", max_nodes, "0 to 100000000")
        self.name = "suffix"
        self.reads_ahead = True
        self.rule = rule
        self.width = 1 if rule == "chain" else width
        self.min_prob = min_prob if min_prob is not None else 0.1 if rule == "paper" else 0.0
        self.score_rule = ScoreRule(factor=factor, offset=offset, min_prob=self.min_prob)
        self.max_depth = max_depth
        self.max_nodes = max_nodes
        self._shared: dict[str | None, _Shared] = {}
        self._preloaded: list[Sequence[int]] = []
        self._scopes: dict[int, str | None] = {}
        self._active: dict[int, _Active] = {}

    @property
    def num_shared_nodes(self) -> int:
        """Nodes that finished responses take."""
        return sum(shared.num_nodes for shared in self._shared.values())

    def preload(self, texts: Iterable[Sequence[int]]) -> None:
        """Remember these token sequences as if they were responses of finished requests, the last one most recent.

        Every scope begins with them.
        """
        for tokens in texts:
            self._preloaded.append(tokens)
            for scope in (None, *(scope for scope in self._shared if scope is not None)):
                self._remember(tokens, scope)

    def assign(self, sequence: int, scope: str | None) -> None:
        """Which scope's finished responses the sequence may be drafted from, and its own will be remembered for."""
        self._scopes[sequence] = scope

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence begins. Its text is indexed when the first draft is asked for."""
        assert sequence not in self._active, sequence
        shared = self._share(self._scopes.get(sequence))
        self._active[sequence] = _Active(SuffixIndex(self.max_depth), shared, tokens, len(tokens))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One chain, or ``NO_DRAFT``, for each request."""
        return [self._propose_one(request) for request in requests]

    def candidates(self, request: DraftRequest, num_nodes: int) -> ScoredTree:
        """The likeliest nodes, by the rule ``tree`` (or ``chain``), with their estimates."""
        active = self._caught_up(request)
        tokens, parents, probs = self._likeliest(active, request, num_nodes)
        return ScoredTree(tokens, parents, [log(prob) for prob in probs])

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Nothing yet: whoever drafts rarely indexes rarely."""
        self._active[sequence].tokens = tokens

    def finish(self, sequence: int) -> None:
        """Free the sequence's index and remember its response."""
        active = self._active.pop(sequence)
        self._remember(active.tokens[active.num_prompt :], self._scopes.pop(sequence, None))

    def _share(self, scope: str | None) -> _Shared:
        """What finished sequences of the scope have left."""
        if scope not in self._shared:
            self._shared[scope] = _Shared(SuffixIndex(self.max_depth))
            for tokens in self._preloaded if scope is not None else ():
                self._remember(tokens, scope)
        return self._shared[scope]

    def _remember(self, tokens: Sequence[int], scope: str | None) -> None:
        if not tokens or not self.max_nodes:
            return
        shared = self._share(scope)
        self._shared[scope] = self._shared.pop(scope)  # heard of last
        shared.index.append(tokens)
        shared.index.end_text(tokens)
        shared.version += 1
        while self.num_shared_nodes > self.max_nodes:
            oldest = next(shared for shared in self._shared.values() if shared.index.num_texts)
            oldest.index.remove_oldest()
            oldest.version += 1
        for name in [name for name, shared in self._shared.items() if not shared.index.num_texts and name != scope]:
            del self._shared[name]

    def _caught_up(self, request: DraftRequest) -> _Active:
        """The sequence, with all of its tokens read."""
        active = self._active[request.sequence]
        active.index.append(request.tokens[active.num_indexed :])
        active.num_indexed = len(request.tokens)
        self._read(active, request)
        return active

    def _propose_one(self, request: DraftRequest) -> Proposal:
        active = self._caught_up(request)
        if self.rule == "paper":
            path, parents = self._draft_path(active, request)
            return Proposal(tokens=tuple(path), parents=tuple(parents), drafter=self.name) if path else NO_DRAFT
        tokens, above, probs = self._likeliest(active, request, request.num_draft_tokens)
        if not tokens:
            return NO_DRAFT
        scores = tuple(log(prob) for prob in probs)
        return Proposal(tokens=tuple(tokens), parents=tuple(above), drafter=self.name, scores=scores)

    def _likeliest(
        self, active: _Active, request: DraftRequest, num_nodes: int
    ) -> tuple[list[int], list[int], list[float]]:
        sources, places = self._sources(active, request.ahead)
        depth = request.num_draft_tokens
        return grow_tree(sources, places, depth=depth, num_nodes=num_nodes, width=self.width, min_prob=self.min_prob)

    def _draft_path(self, active: _Active, request: DraftRequest) -> tuple[Sequence[int], Sequence[int]]:
        score = 0.0
        path: list[int] = []
        for source, place in zip(*self._sources(active, request.ahead), strict=True):
            better = speculate(
                source.index, *place, rule=self.score_rule, wanted=request.num_draft_tokens, score_to_beat=score
            )
            score, path = better if better[1] else (score, path)
        return path, range(ROOT, len(path) - 1)

    def _sources(self, active: _Active, ahead: Sequence[int]) -> tuple[list[Source], list[Place]]:
        """Who predicts for a sequence, and where it stands in each, behind the tokens ``ahead``."""
        sources, places = [Source(active.index, OWN_DOUBT)], [active.index.end]
        if active.predicted is not None:
            sources.append(Source(active.predicted.index, OWN_DOUBT))
            places.append((active.predicted.node, active.predicted.matched))
        if active.shared.index.num_texts:
            sources.append(Source(active.shared.index, SHARED_DOUBT))
            places.append((active.node, active.matched))
        for token in ahead:
            places = [source.index.advance(*place, token) for source, place in zip(sources, places, strict=True)]
        return sources, places

    def _read(self, active: _Active, request: DraftRequest) -> None:
        """Bring the sequence's places up to date."""
        if active.shared.index.num_texts:
            self._read_shared(active, request.tokens)
        if request.prediction and active.predicted is None:
            index = SuffixIndex(self.max_depth)
            # Behind the prompt's last tokens, so that its beginning is what follows the prompt.
            index.append(request.tokens[max(0, active.num_prompt - self.max_depth + 1) : active.num_prompt])
            index.append(request.prediction)
            active.predicted = _Predicted(index)
        if active.predicted is not None:
            active.predicted.read(request.tokens)

    def _read_shared(self, active: _Active, tokens: Sequence[int]) -> None:
        """Bring the sequence's place in the shared index up to date. Matches are shorter than ``max_depth``."""
        version = active.shared.version
        if active.version != version:
            active.node, active.matched, active.num_read, active.version = START, 0, 0, version
        for token in tokens[max(active.num_read, len(tokens) - self.max_depth + 1) :]:
            active.node, active.matched = active.shared.index.advance(active.node, active.matched, token)
        active.num_read = len(tokens)


def speculate(
    index: SuffixIndex, node: int, matched: int, *, rule: ScoreRule, wanted: int, score_to_beat: float = 0.0
) -> tuple[float, list[int]]:
    """The best-scored path behind any suffix of a text whose longest known suffix has this node and length.

    All suffixes that share a node share their continuations, so only the longest of them can be the best.

    Returns:
        Score and tokens; no tokens unless the score is more than ``score_to_beat``.
    """
    best_score, best_path = score_to_beat, []
    while node != START:
        limit = rule.most_tokens(min(matched, index.length[node]), wanted)
        if limit > best_score:  # probabilities are at most 1: a path cannot score more than its tokens
            score, path = _follow(index, node, min(matched, index.length[node]), limit, rule.min_prob)
            if score > best_score:
                best_score, best_path = score, path
        node = index.link[node]
    return best_score, best_path


def _follow(index: SuffixIndex, node: int, matched: int, limit: int, min_prob: float) -> tuple[float, list[int]]:
    """Most frequent continuation of a node's substring of ``matched`` tokens, and its score."""
    rank = index.rank
    probability, score = 1.0, 0.0
    path: list[int] = []
    while len(path) < limit:
        children = index.next[node].values()
        if not children:
            break
        child = max(children, key=rank.__getitem__)
        probability *= (rank[child] // RANK_UNIT) / (rank[node] // RANK_UNIT)
        if probability < min_prob:
            break
        path.append(index.token[child])
        score += probability
        matched = min(matched + 1, index.depth - 1)
        node = index.shorten(child, matched)
    return score, path


def _require(holds: bool, name: str, given: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"suffix drafter option {name} {given!r} is not possible; allowed: {allowed}")
