"""Suffix continuations and a head's candidates in one tree of one node budget.

Where text repeats, the suffix index is hard to beat; where it does not, only the head helps. Both estimate how likely each
node is to be kept, so their nodes can compete for places in one tree. A path that both propose is one node, with the
larger of the two estimates: a node's parent then never counts less than the node, and the best nodes form a tree.

All candidates are deterministic (above temperature 0 the head's are ranked with the verifier's own noise) and verified by
draw-and-compare, so mixing and choosing among them cannot bias the output (law 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from outrider.drafters.base import DraftRequest
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.tree import ScoredTree, TreeShape
from outrider.types import NO_DRAFT, ROOT, Proposal

__all__ = ["MergedDrafter", "merge_trees"]


class MergedDrafter:
    """A :class:`outrider.drafters.base.TapDrafter` made of two drafters.

    Args:
        suffix: proposes continuations of text seen before, as deep as a request allows.
        head: proposes candidates inside ``shape``.
        shape: depth and width of the head's tree; ``num_nodes`` is the budget of the merged one.
        name: for reports.
    """

    def __init__(self, suffix: SuffixDrafter, head: EagleDrafter, *, shape: TreeShape, name: str = "merged") -> None:
        self.name = name
        self.taps = head.taps
        self.path = head.path
        self.cost_key = f"{head.cost_key} tree {shape}"
        self.nodes_per_level = shape.num_nodes / shape.depth
        self.levels = shape.depth
        self.deepest = 1 << 10  # copies go on where the head's tree ends
        self.card_rates = head.card_rates
        self.shape = shape
        self.suffix = suffix
        self.head = head
        self.parts = (suffix, head)

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """Tell both."""
        self.suffix.start(sequence, tokens)
        self.head.start(sequence, tokens)

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        """Hidden states, for the head."""
        self.head.absorb(sequence, start, taps_RD)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One tree for each request."""
        trees = self.head.grow(requests, self.shape)
        proposals = []
        for request, own in zip(requests, trees, strict=True):
            copied = self.suffix.candidates(request, self.shape.num_nodes)
            proposals.append(merge_trees([own, copied], self.shape.num_nodes, drafter=self.name))
        return proposals

    def backlog(self, sequence: int, num_tokens: int) -> int:
        """Of the head."""
        return self.head.backlog(sequence, num_tokens)

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Tell both."""
        self.suffix.observe(sequence, tokens, num_new)
        self.head.observe(sequence, tokens, num_new)

    def finish(self, sequence: int) -> None:
        """Tell both."""
        self.suffix.finish(sequence)
        self.head.finish(sequence)


def merge_trees(trees: Sequence[ScoredTree], num_nodes: int, *, drafter: str) -> Proposal:
    """The likeliest nodes of several trees, nodes with one path folded into one.

    Args:
        trees: in each, no node is likelier than its parent.
        num_nodes: most nodes; of equally likely ones, those of earlier trees and earlier nodes.
        drafter: name of the proposal.
    """
    nodes: dict[tuple[int, int], int] = {}
    scores: list[float] = []
    for tree in trees:
        places = {ROOT: ROOT}
        for node, (token, parent, score) in enumerate(zip(tree.tokens, tree.parents, tree.scores, strict=True)):
            place = nodes.setdefault((places[parent], token), len(scores))
            if place == len(scores):
                scores.append(-math.inf)
            scores[place] = max(scores[place], score)
            places[node] = place
    paths = list(nodes)
    chosen = sorted(sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:num_nodes])
    if not chosen:
        return NO_DRAFT
    index = {place: position for position, place in enumerate(chosen)} | {ROOT: ROOT}
    return Proposal(
        tokens=tuple(paths[place][1] for place in chosen),
        parents=tuple(index[paths[place][0]] for place in chosen),
        drafter=drafter,
        scores=tuple(scores[place] for place in chosen),
    )
