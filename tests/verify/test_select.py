"""Mixed batches: each proposal goes to its verifier, verdicts come back in order."""

from __future__ import annotations

import torch

from outrider.types import NO_DRAFT, ROOT, Proposal
from outrider.verify import verify

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
