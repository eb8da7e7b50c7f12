"""Losses of a head against the target's law, eager (the definition) and lean (what training runs).

The head's law q lives on the draft vocabulary U and sums to 1; the target's law p is cut to U and *keeps its mass*, so
that ``mass = sum(p)`` is at most 1: a position whose likely tokens the head cannot say counts less, without a threshold.

======  =====================================================  =====================================================
name    loss of a row                                          gradient by the draft logits
======  =====================================================  =====================================================
``ce``  -sum p log q                                           mass q - p
``kl``  sum p (log p - log mass - log q)                       the same
``tv``  1 - sum min(p, q): how often a drawn draft is refused  q (s - i), with i = [q < p] and s = sum q i
``lk``  w kl + (1 - w) tv, w = exp(-3 (1 - tv)) held fixed     the same mixture
======  =====================================================  =====================================================

``lk`` is the hybrid of arXiv 2602.23881: far from the target it follows the divergence, near it the acceptance itself.

The lean form never holds logits of more than one piece of rows, and keeps none: each piece's gradient is formed in place
of its logits and goes straight into the gradients of hidden states and LM head. So the backward pass only hands out what
the forward pass has computed already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

__all__ = ["LOSSES", "LossName", "lean_loss", "row_losses"]

LossName = Literal["ce", "kl", "tv", "lk"]
LOSSES: tuple[str, ...] = get_args(LossName)
_SHARPNESS = 3.0


def row_losses(logits_RU: Tensor, target_probs_RU: Tensor, name: LossName) -> Tensor:
    """Loss of each row, ``[R]``, by the table above. Differentiable by the logits; the eager reference.

    Args:
        logits_RU: of the head.
        target_probs_RU: the target's law on the draft vocabulary, not made to sum to 1.
        name: which loss.
    """
    draft_log_RU = logits_RU.log_softmax(dim=-1)
    if name == "ce":
        return -(target_probs_RU * draft_log_RU).sum(dim=-1)
    if name == "tv":
        return _total_variation(draft_log_RU, target_probs_RU)
    divergence_R = _divergence(draft_log_RU, target_probs_RU)
    if name == "kl":
        return divergence_R
    variation_R = _total_variation(draft_log_RU, target_probs_RU)
    share_R = torch.exp(-_SHARPNESS * (1 - variation_R.detach()))
    return share_R * divergence_R + (1 - share_R) * variation_R


def lean_loss(
    hidden_NRD: Tensor,
    head_UD: Tensor,
    target_probs_RU: Tensor,
    weights_NR: Tensor,
    *,
    name: LossName,
    piece: int = 1024,
) -> tuple[Tensor, Tensor]:
    """``sum(weights * row_losses)`` over unroll steps, without ever holding all logits.

    Args:
        hidden_NRD: normed outputs of N unroll steps; their logits are ``hidden @ head.T``.
        head_UD: LM head over the draft vocabulary.
        target_probs_RU: laws, ``R + N - 1`` rows or more; step n of row r is held against law ``r + n``.
        weights_NR: weight of each row's loss, in float32; rows of weight 0 cost nothing in the result.
        piece: rows computed together.

    Returns:
        The weighted sum (differentiable by ``hidden_NRD`` and ``head_UD``) and the losses of the rows ``[N, R]``.
    """
    total, rows_NR = _LeanLoss.apply(hidden_NRD, head_UD, target_probs_RU, weights_NR, name, piece)  # type: ignore[no-untyped-call]
    return total, rows_NR


class _LeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NRD: Tensor,
        head_UD: Tensor,
        target_probs_RU: Tensor,
        weights_NR: Tensor,
        name: LossName,
        piece: int,
    ) -> tuple[Tensor, Tensor]:
        num_steps, num_rows = weights_NR.shape
        rows_NR = torch.zeros_like(weights_NR)
        hidden_grad_NRD = torch.empty_like(hidden_NRD)
        head_grad_UD = torch.zeros(head_UD.shape, dtype=weights_NR.dtype)
        for step in range(num_steps):
            for start in range(0, num_rows, piece):
                rows = slice(start, min(start + piece, num_rows))
                hidden_RD, weights_R1 = hidden_NRD[step, rows], weights_NR[step, rows].unsqueeze(1)
                slopes_RU = hidden_RD @ head_UD.T
                laws_RU = target_probs_RU[rows.start + step : rows.stop + step]
                rows_NR[step, rows] = _to_gradient_(slopes_RU, laws_RU, name)
                # A row's weight scales the narrow sides of both products, never the wide gradient itself.
                hidden_grad_NRD[step, rows] = (slopes_RU @ head_UD) * weights_R1.to(hidden_RD.dtype)
                head_grad_UD += slopes_RU.T @ (hidden_RD * weights_R1.to(hidden_RD.dtype))
        ctx.gradients = (hidden_grad_NRD, head_grad_UD.to(head_UD.dtype))
        ctx.mark_non_differentiable(rows_NR)
        return (rows_NR * weights_NR).sum(), rows_NR

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_NRD, head_grad_UD = ctx.gradients
        ctx.gradients = None
        if float(slopes[0]) != 1.0:
            hidden_grad_NRD, head_grad_UD = hidden_grad_NRD * slopes[0], head_grad_UD * slopes[0]
        return hidden_grad_NRD.to(hidden_grad_NRD.dtype), head_grad_UD, None, None, None, None


def _to_gradient_(logits_RU: Tensor, laws_RU: Tensor, name: LossName) -> Tensor:
    """Turn logits into the gradient of the loss by them, in place; returns each row's loss in the wider dtype."""
    wide = torch.float64 if logits_RU.dtype == torch.float64 else torch.float32
    mass_R = laws_RU.sum(dim=-1, dtype=wide)
    score_R = torch.linalg.vecdot(laws_RU, logits_RU).to(wide)
    top_R = logits_RU.amax(dim=-1).to(wide)
    draft_RU = torch.softmax(logits_RU, dim=-1)
    log_sum_R = top_R - draft_RU.amax(dim=-1).to(wide).log()
    cross_R = mass_R * log_sum_R - score_R
    if name == "ce":
        _divergence_gradient_(logits_RU, draft_RU, laws_RU, mass_R)
        return cross_R
    divergence_R = cross_R + torch.special.xlogy(laws_RU, laws_RU).sum(dim=-1, dtype=wide) - _xlogx(mass_R)
    if name == "kl":
        _divergence_gradient_(logits_RU, draft_RU, laws_RU, mass_R)
        return divergence_R
    variation_R = 1 - torch.minimum(laws_RU, draft_RU).sum(dim=-1, dtype=wide)
    share_R = torch.exp(-_SHARPNESS * (1 - variation_R)) if name == "lk" else torch.zeros_like(variation_R)
    below_RU = (draft_RU < laws_RU).to(draft_RU.dtype)
    below_R1 = (draft_RU * below_RU).sum(dim=-1, keepdim=True)
    _divergence_gradient_(logits_RU, draft_RU, laws_RU, mass_R)
    share_R1 = share_R.to(draft_RU.dtype).unsqueeze(1)
    logits_RU.mul_(share_R1).add_((below_R1 - below_RU).mul_(draft_RU).mul_(1 - share_R1))
    return share_R * divergence_R + (1 - share_R) * variation_R


def _divergence_gradient_(out_RU: Tensor, draft_RU: Tensor, laws_RU: Tensor, mass_R: Tensor) -> None:
    torch.mul(draft_RU, mass_R.to(draft_RU.dtype).unsqueeze(1), out=out_RU).sub_(laws_RU)


def _divergence(draft_log_RU: Tensor, laws_RU: Tensor) -> Tensor:
    own_R = torch.special.xlogy(laws_RU, laws_RU).sum(dim=-1)
    return own_R - _xlogx(laws_RU.sum(dim=-1)) - (laws_RU * draft_log_RU).sum(dim=-1)


def _xlogx(x: Tensor) -> Tensor:
    return torch.special.xlogy(x, x)


def _total_variation(draft_log_RU: Tensor, laws_RU: Tensor) -> Tensor:
    return 1 - torch.minimum(laws_RU, draft_log_RU.exp()).sum(dim=-1)


def step_weights(num_steps: int, decay: float) -> Sequence[float]:
    """Weight of each unroll step: ``decay ** step``, made to sum to 1."""
    raw = [decay**step for step in range(num_steps)]
    return [weight / math.fsum(raw) for weight in raw]
