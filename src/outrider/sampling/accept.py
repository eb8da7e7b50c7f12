"""The acceptance rule of rejection sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318) as pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accepts_B", "residual_BV"]


def accepts_B(target_probs_B: Tensor, draft_probs_B: Tensor, uniforms_B: Tensor) -> Tensor:
    """True where a drawn draft token is kept: with probability min(1, target / draft).

    Args:
        target_probs_B, draft_probs_B: probability of the drawn token under the target's and the drafter's law.
        uniforms_B: float64, in the open interval (0, 1).

    The test is ``u * draft < target``, without a division. A token that its own drafter calls impossible was not drawn
    from that law, so nothing can be promised for it: it is refused.
    """
    target_B, draft_B = target_probs_B.double(), draft_probs_B.double()
    return (uniforms_B * draft_B < target_B) & (draft_B > 0)


def residual_BV(target_probs_BV: Tensor, draft_probs_BV: Tensor) -> Tensor:
    """Unnormalised law of the correction token after a refusal: max(target - draft, 0).

    Where nothing is left numerically (the laws are equal up to rounding, so a refusal had probability about 0) it is the
    target's law itself.
    """
    rest_BV = (target_probs_BV - draft_probs_BV).clamp_min(0)
    is_empty_B1 = rest_BV.amax(dim=-1, keepdim=True) <= 0
    return torch.where(is_empty_B1, target_probs_BV, rest_BV)
