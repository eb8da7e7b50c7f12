"""Draft trees by expand and rerank (EAGLE-2, arXiv 2406.16858, section 4).

A node's score is the log-probability that the draft model gives to the path from the root to it: an estimate of how
likely the node is to be kept. Level by level the ``width`` best nodes are expanded into their ``width`` likeliest
children; of all candidates that were ever proposed, the ``num_nodes`` best make the tree. A child never scores more than
its parent, so a chosen node's parents are chosen too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp, inf

from torch import Tensor

from outrider.drafters.reader import DraftTree
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT, ROOT, Proposal

__all__ = ["ScoredTree", "TreeGrowth", "TreeShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """Limits of a draft tree.

    Attributes:
        depth: levels below the root.
        width: nodes expanded on a level, and children proposed by each.
        num_nodes: draft nodes of the finished tree; the root is not one.
        min_level: the nodes to be expanded must be kept with at least this probability, all together, or the tree ends
            there: a pass of the draft model for less is not worth its time. 0 reads all levels.

    Raises:
        ConfigError: a value out of range.
    """

    depth: int = 5
    width: int = 4
    num_nodes: int = 16
    min_level: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("depth", 128), ("width", 64), ("num_nodes", 1024)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"tree option {name} {value} is not possible; allowed: 1 to {most}")
        if not 0 <= self.min_level <= 1:
            raise ConfigError(f"tree option min_level {self.min_level} is not possible; allowed: 0 to 1")


@dataclass(frozen=True, slots=True)
class ScoredTree:
    """Nodes, parents before children, with the log-probability that each is kept, as far as its drafter can tell."""

    tokens: Sequence[int]
    parents: Sequence[int]
    scores: Sequence[float]

    def proposal(self, num_nodes: int, drafter: str) -> Proposal:
        """The likeliest nodes, of equally likely ones the first; a chosen node's parents are chosen too. ``NO_DRAFT`` if none."""
        nodes = sorted(_best(self.scores, range(len(self.scores)), num_nodes))
        if not nodes:
            return NO_DRAFT
        tree = _subtree(self, nodes)
        scores = tuple(self.scores[node] for node in nodes)
        return Proposal(tokens=tuple(tree.tokens), parents=tuple(tree.parents), drafter=drafter, scores=scores)


@dataclass(slots=True, kw_only=True)
class TreeGrowth:
    """One tree while it grows. All candidates so far, in the order in which they were proposed.

    Attributes:
        shape: limits of the tree.
        tokens, parents, scores: of each candidate; a parent comes before its children.
        frontier: candidates whose children are proposed next, best first.
        min_score: candidates that score less are left out.
    """

    shape: TreeShape
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    min_score: float = -inf

    def expand(self, logprobs_NV: Tensor) -> None:
        """Propose the likeliest children of each frontier node, and choose the next frontier among them.

        Args:
            logprobs_NV: draft law behind each frontier node, in its order; -inf forbids a token.
        """
        best = logprobs_NV.topk(min(self.shape.width, logprobs_NV.shape[1]), dim=-1)
        self.expand_into(best.indices.tolist(), best.values.tolist())

    def expand_into(self, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        """The same with each frontier node's likeliest children already found, best first; -inf is no child."""
        first = len(self.tokens)
        for parent, children, values in zip(self.frontier, tokens, logprobs, strict=True):
            base = 0.0 if parent == ROOT else self.scores[parent]
            for token, logprob in zip(children, values, strict=True):
                if logprob > -inf and base + logprob >= self.min_score:
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self.scores.append(base + logprob)
        self.frontier = _best(self.scores, range(first, len(self.tokens)), self.shape.width)
        if self.shape.min_level and sum(exp(self.scores[node]) for node in self.frontier) < self.shape.min_level:
            self.frontier = []

    def path(self, node: int) -> tuple[int, ...]:
        """Draft tokens from the root to a candidate, its own included; none for ``ROOT``."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def unread(self) -> DraftTree:
        """The frontier and its ancestors: what the draft model must read to expand the frontier, which comes last."""
        ancestors: set[int] = set()
        for node in self.frontier:
            while (node := self.parents[node]) != ROOT:
                ancestors.add(node)
        return _subtree(self, [*sorted(ancestors), *self.frontier])

    def candidates(self) -> ScoredTree:
        """Everything that was ever proposed."""
        return ScoredTree(self.tokens, self.parents, self.scores)

    def proposal(self, drafter: str) -> Proposal:
        """The finished tree as a proposal; ``NO_DRAFT`` if nothing was worth a node."""
        return self.candidates().proposal(self.shape.num_nodes, drafter)


def _best(scores: Sequence[float], nodes: Iterable[int], count: int) -> list[int]:
    """Best first."""
    return sorted(nodes, key=lambda node: (-scores[node], node))[:count]


def _subtree(tree: ScoredTree | TreeGrowth, nodes: Sequence[int]) -> DraftTree:
    index = {node: position for position, node in enumerate(nodes)} | {ROOT: ROOT}
    return DraftTree(
        tokens=[tree.tokens[node] for node in nodes],
        parents=[index[tree.parents[node]] for node in nodes],
    )
