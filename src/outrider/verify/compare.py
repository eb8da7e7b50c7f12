"""Draw-and-compare: draw the next token from the target's own law; if a child carries it, keep the child and go on there.

What is committed is at every position a draw from the target's processed law, so nothing about the proposal can change
the output's law, and with keyed noise not even the output (laws 1, 6 and 7). Serves chains and trees, greedy and sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

from outrider.types import ROOT, Proposal, Verdict
from outrider.verify.base import Chooses, GreedyTokens, Place

__all__ = ["verify_compare", "verify_greedy"]


def verify_compare(proposals: Sequence[Proposal], laws: Chooses, sequences: Sequence[int]) -> list[Verdict]:
    """Verdicts by draw-and-compare, walked level by level over the batch.

    Siblings that carry the same token: the first is kept (their laws are equal, their subtrees may differ).
    """
    children = [_children_by_token(proposal) for proposal in proposals]
    paths: list[list[int]] = [[] for _ in proposals]
    next_tokens = [-1] * len(proposals)
    walking = list(range(len(proposals)))
    while walking:
        chosen = laws.choose([_place(proposals[walk], paths[walk], sequences[walk]) for walk in walking])
        still: list[int] = []
        for walk, token in zip(walking, chosen, strict=True):
            child = children[walk].get((_last(paths[walk]), token))
            if child is None:
                next_tokens[walk] = token
            else:
                paths[walk].append(child)
                still.append(walk)
        walking = still
    return [Verdict(path=tuple(path), next_token=token) for path, token in zip(paths, next_tokens, strict=True)]


def verify_greedy(proposals: Sequence[Proposal], greedy: GreedyTokens, sequences: Sequence[int]) -> list[Verdict]:
    """The same verdicts where the token behind every node is known: each proposal is walked by itself."""
    verdicts = []
    for proposal, sequence in zip(proposals, sequences, strict=True):
        behind = greedy.behind(sequence, len(proposal))
        path = _greedy_path(proposal, behind) if len(proposal) else ()
        verdicts.append(Verdict(path=path, next_token=behind[_last(path) + 1]))
    return verdicts


def _greedy_path(proposal: Proposal, behind: Sequence[int]) -> tuple[int, ...]:
    if proposal.is_chain:
        agreeing = map(eq, proposal.tokens, behind)
        return tuple(range(next((node for node, agrees in enumerate(agreeing) if not agrees), len(proposal))))
    children = _children_by_token(proposal)
    path: list[int] = []
    child = children.get((ROOT, behind[0]))
    while child is not None:
        path.append(child)
        child = children.get((child, behind[child + 1]))
    return tuple(path)


def _children_by_token(proposal: Proposal) -> dict[tuple[int, int], int]:
    """First child by (parent, token)."""
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True)):
        children.setdefault((parent, token), node)
    return children


def _last(path: Sequence[int]) -> int:
    return path[-1] if path else ROOT


def _place(proposal: Proposal, path: Sequence[int], sequence: int) -> Place:
    return Place(sequence=sequence, node=_last(path), path=tuple(proposal.tokens[node] for node in path))
