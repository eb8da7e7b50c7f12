"""Losses of a head against the target's law, eager (the definition) and lean (what training runs).

The head's law q lives on the draft vocabulary U and sums to 1. The target's law p is kept *sparse*: its K likeliest tokens
that the head can say, with their probabilities under the whole vocabulary. So ``mass = sum(p)`` is below 1, and a position
whose likely tokens the head cannot say counts less, without a threshold; and what is stored of a law is small.

======  =====================================================  =====================================================
name    loss of a row                                          gradient by the draft logits
======  =====================================================  =====================================================
``ce``  -sum p log q                                           mass q - p
``kl``  sum p (log p - log mass - log q)                       the same
``tv``  1 - sum min(p, q): how often a drawn draft is refused  s q - i q, with i = [q < p] and s = sum q i
``lk``  w kl + (1 - w) tv, w = exp(-3 (1 - tv)) held fixed     the same mixture
======  =====================================================  =====================================================

``lk`` is the hybrid of arXiv 2602.23881: far from the target it follows the divergence, near it the acceptance itself.

Every gradient has the form ``a q - b`` with b zero outside the K tokens, ``= a (q - b / a)``. The lean form therefore goes
over all logits once (the softmax, in their own place), corrects K entries a row, and scales by ``a`` the narrow sides of
the two products that follow. It never holds logits of more than one piece of rows and keeps none: gradients of hidden
states and LM head are formed at once, and the backward pass only hands them out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.native.training import LossKernels, training_kernels

__all__ = ["LOSSES", "LossName", "dense_laws", "lean_loss", "row_losses", "step_weights"]

LossName = Literal["ce", "kl", "tv", "lk"]
LOSSES: tuple[str, ...] = get_args(LossName)
ROW_PAD = 256
_SHARPNESS = 3.0
_TINY = 1e-30
_NATIVE_PIECE, _NATIVE_ROWS = 1024, 32
"""Rows whose exponentials are held at a time, and a panel of the native kernels."""


def dense_laws(law_ids_RK: Tensor, law_probs_RK: Tensor, size: int) -> Tensor:
    """Sparse laws written out, ``[R, U]``."""
    return law_probs_RK.new_zeros((law_ids_RK.shape[0], size)).scatter_add_(1, law_ids_RK, law_probs_RK)


def row_losses(logits_RU: Tensor, laws_RU: Tensor, name: LossName) -> Tensor:
    """Loss of each row, ``[R]``, by the table above. Differentiable by the logits; the eager reference.

    Args:
        logits_RU: of the head.
        laws_RU: the target's law on the draft vocabulary, not made to sum to 1.
        name: which loss.
    """
    draft_log_RU = logits_RU.log_softmax(dim=-1)
    if name == "ce":
        return -(laws_RU * draft_log_RU).sum(dim=-1)
    variation_R = 1 - torch.minimum(laws_RU, draft_log_RU.exp()).sum(dim=-1)
    if name == "tv":
        return variation_R
    own_R = torch.special.xlogy(laws_RU, laws_RU).sum(dim=-1) - _xlogx(laws_RU.sum(dim=-1))
    divergence_R: Tensor = own_R - (laws_RU * draft_log_RU).sum(dim=-1)
    if name == "kl":
        return divergence_R
    share_R = torch.exp(-_SHARPNESS * (1 - variation_R.detach()))
    mixed_R: Tensor = share_R * divergence_R + (1 - share_R) * variation_R
    return mixed_R


def lean_loss(
    hidden_RD: Tensor,
    head_UD: Tensor,
    laws: tuple[Tensor, Tensor],
    weights_R: Tensor,
    *,
    name: LossName,
    piece: int = 4096,
) -> tuple[Tensor, Tensor]:
    """``sum(weights * row_losses)``, without ever holding the logits of more than ``piece`` rows.

    Args:
        hidden_RD: normed outputs; their logits are ``hidden @ head.T``, multiplied in the dtype of ``hidden``.
        head_UD: LM head over the draft vocabulary, in the dtype that its gradient is wanted in.
        laws: the target's laws, int64 ids and float probabilities ``[R, K]``.
        weights_R: weight of each row's loss.
        name: which loss.
        piece: about how many rows are computed together.

    Returns:
        The weighted sum (differentiable by ``hidden_RD`` and ``head_UD``) and the rows' losses ``[R]``.
    """
    total, rows_R = _LeanLoss.apply(hidden_RD, head_UD, *laws, weights_R, name, piece)  # type: ignore[no-untyped-call]
    return total, rows_R


class _LeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_UD: Tensor,
        law_ids_RK: Tensor,
        law_probs_RK: Tensor,
        weights_R: Tensor,
        name: LossName,
        piece: int,
    ) -> tuple[Tensor, Tensor]:
        kernels = training_kernels() if _is_native(hidden_RD, head_UD) else None
        if kernels is None:
            losses_R, *gradients = _by_products(hidden_RD, head_UD, (law_ids_RK, law_probs_RK), weights_R, name, piece)
        else:
            loss = LossKernels(kernels, head_UD.contiguous())
            losses_R, *gradients = _by_kernels(loss, hidden_RD, head_UD, (law_ids_RK, law_probs_RK), weights_R, name)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(losses_R)
        return (losses_R * weights_R).sum(), losses_R

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad_RD, head_grad_UD = ctx.gradients
        ctx.gradients = None  # else they would be copied, since somebody else holds them
        if float(slopes[0]) != 1.0:
            hidden_grad_RD, head_grad_UD = hidden_grad_RD * slopes[0], head_grad_UD * slopes[0]
        return hidden_grad_RD, head_grad_UD, None, None, None, None, None


def _is_native(hidden_RD: Tensor, head_UD: Tensor) -> bool:
    """True if the native kernels can take it: bfloat16 rows and a float32 head, on the CPU."""
    on_cpu = hidden_RD.device.type == head_UD.device.type == "cpu"
    return on_cpu and hidden_RD.dtype == torch.bfloat16 and head_UD.dtype == torch.float32 and len(hidden_RD) > 0


def _by_products(
    hidden_RD: Tensor, head_UD: Tensor, laws: tuple[Tensor, Tensor], weights_R: Tensor, name: LossName, piece: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows' losses, and the gradients by hidden rows and head, in plain products: for any dtype and device."""
    num_rows = hidden_RD.shape[0]
    # Few different counts of rows: the products of a count that has not been seen must be prepared first.
    hidden_RD, law_ids_RK, law_probs_RK, weights_R = (
        F.pad(x, (0,) * (2 * x.dim() - 1) + (-num_rows % ROW_PAD,)) for x in (hidden_RD, *laws, weights_R)
    )
    losses_R, hidden_grad_RD = torch.empty_like(weights_R), torch.empty_like(hidden_RD)
    head_grad_UD, narrow_UD = torch.zeros_like(head_UD), head_UD.to(hidden_RD.dtype)
    for rows in _pieces(len(weights_R), piece, ROW_PAD):
        logits_RU = hidden_RD[rows] @ narrow_UD.T
        slopes_RU = torch.softmax(logits_RU, dim=-1)
        law_RK, ids_RK = law_probs_RK[rows], law_ids_RK[rows]
        picked_RK, said_RK = (x.gather(1, ids_RK).to(law_RK.dtype) for x in (logits_RU, slopes_RU))
        best_R1 = picked_RK.argmax(dim=-1, keepdim=True)
        log_sum_R = (picked_RK.gather(1, best_R1) - said_RK.gather(1, best_R1).clamp_min(_TINY).log()).squeeze(1)
        losses_R[rows], scales_R, pulls_RK = _row_slopes(picked_RK, said_RK, log_sum_R, law_RK, name)
        firsts_R1 = torch.arange(0, slopes_RU.numel(), slopes_RU.shape[1]).unsqueeze(1)
        # Flat, since adding at single places is several times as fast in one dimension.
        pulls = pulls_RK.to(slopes_RU.dtype).view(-1)
        slopes_RU.view(-1).index_add_(0, (ids_RK + firsts_R1).view(-1), pulls, alpha=-1)
        scales_R1 = (scales_R * weights_R[rows]).to(hidden_RD.dtype).unsqueeze(1)
        hidden_grad_RD[rows] = (slopes_RU @ narrow_UD).mul_(scales_R1)
        head_grad_UD += slopes_RU.T @ (hidden_RD[rows] * scales_R1)
    return losses_R[:num_rows].clone(), hidden_grad_RD[:num_rows], head_grad_UD


def _by_kernels(
    loss: LossKernels,
    hidden_RD: Tensor,
    head_UD: Tensor,
    laws: tuple[Tensor, Tensor],
    weights_R: Tensor,
    name: LossName,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by native kernels, which keep of a row its exponentials and touch them once between both products."""
    num_rows = hidden_RD.shape[0]
    hidden_RD, ids_RK, law_RK = hidden_RD.contiguous(), laws[0].contiguous(), laws[1].float()
    losses_R, hidden_grad_RD = torch.empty_like(weights_R), torch.empty_like(hidden_RD)
    head_grad_UD = torch.empty_like(head_UD)
    for rows in _pieces(num_rows, _NATIVE_PIECE, _NATIVE_ROWS):
        picked_RK, log_sum_R = loss.logits(hidden_RD[rows], ids_RK[rows])
        said_RK = (picked_RK - log_sum_R.unsqueeze(1)).exp()
        losses_R[rows], scales_R, pulls_RK = _row_slopes(picked_RK, said_RK, log_sum_R, law_RK[rows], name)
        is_last = rows.stop >= num_rows
        factors_R = (scales_R * weights_R[rows]).float()
        loss.gradients(pulls_RK, factors_R, hidden_grad_RD[rows], head_grad_UD if is_last else None)
    return losses_R, hidden_grad_RD, head_grad_UD


def _pieces(num_rows: int, piece: int, multiple: int) -> list[slice]:
    """Pieces of about one size: products with a few rows left over would cost nearly as much as whole ones."""
    blocks = -(-num_rows // multiple)
    count = max(1, min(blocks, round(num_rows / piece)))
    ends = [blocks * index // count * multiple for index in range(count + 1)]
    return [slice(first, min(end, num_rows)) for first, end in itertools.pairwise(ends)]


def _row_slopes(
    picked_RK: Tensor, said_RK: Tensor, log_sum_R: Tensor, law_RK: Tensor, name: LossName
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's loss, ``a``, and ``b / a`` at the law's tokens.

    Args:
        picked_RK, said_RK: logits and probabilities that the head gives to the law's tokens.
        log_sum_R: logarithm of the sum of all the row's exponentials.
        law_RK: the law itself.
        name: which loss.
    """
    mass_R = law_RK.sum(dim=-1)
    cross_R = mass_R * log_sum_R - (law_RK * picked_RK).sum(dim=-1)
    loss_R, scale_R, pull_RK = cross_R, mass_R, law_RK
    if name != "ce":
        loss_R = cross_R + torch.special.xlogy(law_RK, law_RK).sum(dim=-1) - _xlogx(mass_R)
    if name in ("tv", "lk"):
        below_RK = said_RK * (said_RK < law_RK)
        variation_R = 1 - torch.minimum(law_RK, said_RK).sum(dim=-1)
        share_R = torch.exp(-_SHARPNESS * (1 - variation_R)) if name == "lk" else torch.zeros_like(mass_R)
        loss_R = share_R * loss_R + (1 - share_R) * variation_R
        scale_R = share_R * mass_R + (1 - share_R) * below_RK.sum(dim=-1)
        pull_RK = share_R.unsqueeze(1) * law_RK + (1 - share_R).unsqueeze(1) * below_RK
    return loss_R, scale_R, pull_RK / scale_R.clamp_min(_TINY).unsqueeze(1)


def _xlogx(x: Tensor) -> Tensor:
    product: Tensor = torch.special.xlogy(x, x)
    return product


def step_weights(num_steps: int, decay: float) -> Sequence[float]:
    """Weight of each unroll step: ``decay ** step``, made to sum to 1."""
    raw = [decay**step for step in range(num_steps)]
    return [weight / math.fsum(raw) for weight in raw]
