"""Rejection sampling of drawn chains (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

A draft token drawn from the drafter's law is kept with probability min(1, target / draft); the first refused one is
replaced by a draw from the residual, max(target - draft, 0) normalised; if all are kept, the bonus token is a draw from
the target's law behind the last. The noise of drafting and of verification must be independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.sampling.accept import accepts_B, residual_BV
from outrider.types import Proposal, Verdict
from outrider.verify.base import Place, StepLaws

__all__ = ["verify_chain"]


def verify_chain(proposals: Sequence[Proposal], laws: StepLaws, sequences: Sequence[int]) -> list[Verdict]:
    """Verdicts by rejection sampling, one level of all chains at a time; an empty chain just draws its next token."""
    num_kept = [0] * len(proposals)
    next_tokens = [-1] * len(proposals)
    walking = [walk for walk, proposal in enumerate(proposals) if len(proposal)]
    level = 0
    while walking:
        chains = [proposals[walk] for walk in walking]
        places = [_place(proposals[walk], level, sequences[walk]) for walk in walking]
        corrections = _corrections(chains, level, laws, places)
        still: list[int] = []
        for walk, correction in zip(walking, corrections, strict=True):
            if correction is not None:
                next_tokens[walk] = correction
                continue
            num_kept[walk] += 1
            if num_kept[walk] < len(proposals[walk]):
                still.append(walk)
        walking, level = still, level + 1
    _choose_bonus(proposals, laws, sequences, num_kept, next_tokens)
    return [
        Verdict(path=tuple(range(kept)), next_token=token) for kept, token in zip(num_kept, next_tokens, strict=True)
    ]


def _corrections(chains: Sequence[Proposal], level: int, laws: StepLaws, places: Sequence[Place]) -> list[int | None]:
    """Test every chain's draft token at ``level``: ``None`` where it is kept, else the token that replaces it."""
    target_probs_BV = laws.probs_BV(places)
    draft_probs_BV = _draft_probs_BV(chains, level, target_probs_BV)
    tokens_B1 = torch.tensor([[chain.tokens[level]] for chain in chains], device=target_probs_BV.device)
    uniforms_B = torch.tensor(laws.uniforms(places), dtype=torch.float64, device=target_probs_BV.device)
    is_kept = accepts_B(
        target_probs_BV.gather(1, tokens_B1).squeeze(1), draft_probs_BV.gather(1, tokens_B1).squeeze(1), uniforms_B
    ).tolist()
    corrections: list[int | None] = [None] * len(chains)
    refused = [row for row, kept in enumerate(is_kept) if not kept]
    if refused:
        rest_BV = residual_BV(target_probs_BV[refused], draft_probs_BV[refused])
        for row, token in zip(refused, laws.draw_from(rest_BV, [places[row] for row in refused]), strict=True):
            corrections[row] = token
    return corrections


def _draft_probs_BV(chains: Sequence[Proposal], level: int, like: Tensor) -> Tensor:
    """Laws that the level's draft tokens were drawn from, in the wider of the two precisions."""
    rows: list[Tensor] = []
    for chain in chains:
        assert chain.draft_probs_NV is not None, "rejection needs the law that the draft was drawn from"
        rows.append(chain.draft_probs_NV[level])
    draft_probs_BV = torch.stack(rows).to(like.device)
    return draft_probs_BV.to(torch.promote_types(draft_probs_BV.dtype, like.dtype))


def _choose_bonus(
    proposals: Sequence[Proposal],
    laws: StepLaws,
    sequences: Sequence[int],
    num_kept: Sequence[int],
    next_tokens: list[int],
) -> None:
    """Fill in the next token of every chain that was kept whole."""
    whole = [walk for walk, token in enumerate(next_tokens) if token < 0]
    places = [_place(proposals[walk], num_kept[walk], sequences[walk]) for walk in whole]
    for walk, token in zip(whole, laws.choose(places) if whole else (), strict=True):
        next_tokens[walk] = token


def _place(proposal: Proposal, num_kept: int, sequence: int) -> Place:
    """Where a walk stands behind its first ``num_kept`` draft tokens."""
    return Place(sequence=sequence, node=num_kept - 1, path=proposal.tokens[:num_kept])
