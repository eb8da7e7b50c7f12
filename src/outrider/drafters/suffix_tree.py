"""Draft trees from suffix indexes: best first, by an estimate of the probability that a node is kept.

Each index predicts from the longest suffix of the text that it has seen continued. With ``total`` occurrences of that
suffix, ``distinct`` different successors and ``d`` the doubt about a match of that length, it gives its counts the share
``total / (total + distinct * d)`` of the probability and leaves the rest to the other index (prediction by partial
matching; the more certain index speaks first). A single node is spent wherever it is most likely to be kept: far down a
long copy, or on a second guess where the text is ambiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from outrider.drafters.suffix_index import START, SuffixIndex
from outrider.types import ROOT

__all__ = ["OWN_DOUBT", "SHARED_DOUBT", "Place", "Source", "grow_tree", "predict"]

Place: TypeAlias = tuple[int, int]
"""Where a text stands in an index: the node of its longest known suffix, and how many tokens of it match."""

_LONGEST = 256

# Measured on greedy answers of SmolLM2-135M-Instruct (docs/log.md): how often the next token is none of the successors
# that the longest match has, by its length. Own text is much more telling than other requests' answers.
OWN_DOUBT = tuple(2.1 * max(1, matched) ** -1.3 for matched in range(_LONGEST))
SHARED_DOUBT = tuple(7.0 / max(1, matched) for matched in range(_LONGEST))


@dataclass(frozen=True, slots=True)
class Source:
    """An index and how far it is mistrusted, by length of the match."""

    index: SuffixIndex
    doubt: Sequence[float]


def grow_tree(
    sources: Sequence[Source], places: Sequence[Place], *, depth: int, num_nodes: int, width: int, min_prob: float
) -> tuple[list[int], list[int], list[float]]:
    """The ``num_nodes`` likeliest nodes.

    Args:
        sources: who predicts; the first wins ties.
        places: where the text stands in each.
        depth: most levels.
        num_nodes: most nodes.
        width: most children of a node; 1 makes a chain of the likeliest tokens.
        min_prob: nodes less likely than this are left out.

    Returns:
        Tokens, parents and probabilities; parents before children, siblings by falling probability.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    waiting: list[tuple[float, int, int, int, int, Sequence[Place]]] = []
    serial, probability, parent, level = 0, 1.0, ROOT, 0
    while len(tokens) < num_nodes:
        if level < depth:
            places, candidates = predict(sources, places, width)
            for token, share in candidates:
                serial += 1  # of equally likely nodes the one proposed first
                heappush(waiting, (-probability * share, serial, token, parent, level + 1, places))
        if not waiting or -waiting[0][0] < min_prob:
            break
        negative, _, token, above, level, places = heappop(waiting)
        probability, parent = -negative, len(tokens)
        tokens.append(token)
        parents.append(above)
        probabilities.append(probability)
        if len(tokens) < num_nodes:
            places = [source.index.advance(*place, token) for source, place in zip(sources, places, strict=True)]
    return tokens, parents, probabilities


def predict(
    sources: Sequence[Source], places: Sequence[Place], width: int
) -> tuple[list[Place], list[tuple[int, float]]]:
    """What comes next?

    Returns:
        The places of the suffixes that were used, and up to ``width`` tokens with probabilities, likeliest first.
    """
    used: list[Place] = []
    opinions: list[tuple[float, int, float, list[tuple[int, int]]]] = []
    for source, place in zip(sources, places, strict=True):
        node, matched = source.index.back_off(*place)
        used.append((node, matched))
        if node != START:
            total, successors = source.index.successors(node)
            doubt = len(source.index.next[node]) * source.doubt[matched]
            opinions.append((doubt / total, total, doubt, successors))
    if len(opinions) == 1:  # nobody else has a say: successors come by falling count
        [(_, total, doubt, successors)] = opinions
        each = 1.0 / (total + doubt)
        return used, [(token, each * count) for token, count in successors[:width]]
    opinions.sort(key=lambda opinion: opinion[0])
    shares: dict[int, float] = {}
    rest = 1.0
    for _, total, doubt, successors in opinions:
        each = rest / (total + doubt)
        for token, count in successors:
            shares[token] = shares.get(token, 0.0) + each * count
        rest = each * doubt
    return used, sorted(shares.items(), key=lambda item: -item[1])[:width]
