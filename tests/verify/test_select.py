"""Mixed batches: each proposal goes to its verifier, verdicts come back in order."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.types import NO_DRAFT, ROOT, Proposal
from outrider.verify import GreedyTokens, verify

from .support import ScriptedLaws, verdict

DRAWN = Proposal.chain([0], draft_probs_NV=torch.tensor([[1.0, 0.0]], dtype=torch.float64))
TREE = Proposal(tokens=(0, 1), parents=(ROOT, ROOT))


def test_mixed_batch_keeps_its_order() -> None:
    laws = ScriptedLaws(
        choices={(1, ()): 1, (1, (1,)): 0, (2, ()): 1, (3, (0,)): 1},
        laws={(0, ()): [0.25, 0.75], (3, ()): [0.25, 0.75]},
        uniforms={(0, ()): 0.26, (3, ()): 0.24},
    )
    got = verify([DRAWN, TREE, NO_DRAFT, DRAWN], laws, [0, 1, 2, 3])
    assert got == [verdict((), 1), verdict((1,), 0), verdict((), 1), verdict((0,), 1)]


def test_drawn_chains_are_never_compared_and_candidates_never_rejected() -> None:
    laws = ScriptedLaws(choices={(0, ()): 0, (0, (0,)): 0}, laws={(1, ()): [0.0, 1.0]}, uniforms={(1, ()): 0.5})
    verify([TREE, DRAWN], laws)
    assert [(kind, places[0].sequence) for kind, places in laws.asked] == [
        ("choose", 0),
        ("choose", 0),
        ("probs", 1),
        ("draw", 1),
    ]


def test_empty_batch() -> None:
    assert verify([], ScriptedLaws()) == []


def random_proposal(rng: random.Random) -> Proposal:
    """None, a chain, or a tree with siblings of one token, over three tokens."""
    size = rng.randrange(8)
    parents = range(ROOT, size - 1) if rng.random() < 0.4 else [rng.randint(ROOT, node - 1) for node in range(size)]
    return Proposal(tokens=tuple(rng.randrange(3) for _ in range(size)), parents=tuple(parents))


def test_known_greedy_tokens_give_the_verdicts_of_a_walk_that_asks() -> None:
    rng = random.Random(5)
    for _ in range(400):
        proposals = [random_proposal(rng) for _ in range(3)]
        first_rows = [0, 1 + len(proposals[0]), 2 + len(proposals[0]) + len(proposals[1])]
        tokens = [0] * (3 + sum(map(len, proposals)))
        choices: dict[tuple[int, tuple[int, ...]], int] = {}
        for index, (proposal, first) in enumerate(zip(proposals, first_rows, strict=True)):
            paths: list[tuple[int, ...]] = []
            for node, parent in enumerate(proposal.parents):
                paths.append((*(() if parent == ROOT else paths[parent]), proposal.tokens[node]))
            for row, path in enumerate([(), *paths]):  # siblings that carry one token have one law
                tokens[first + row] = choices.setdefault((index, path), rng.randrange(3))
        assert verify(proposals, GreedyTokens(tokens, first_rows)) == verify(proposals, ScriptedLaws(choices=choices))


def test_a_drawn_chain_needs_laws() -> None:
    with pytest.raises(AssertionError, match="against laws"):
        verify([DRAWN], GreedyTokens([0, 0], [0]))
