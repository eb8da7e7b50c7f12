"""Differentiable pieces of a layer with hand-written backward passes: fewer trips over memory than autograd would make.

On a processor that multiplies matrices as fast as this one, everything that is not a matrix product is what training
waits for. Each function here is tested against its plain form, values and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttentionPlan", "PlanSegment", "rotate", "take_rows", "unit_norm", "unrolled_attention"]


def unit_norm(x_RD: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` row by row: an RMS norm whose weight the caller folds into the next matrix."""
    out: Tensor = _UnitNorm.apply(x_RD, eps)  # type: ignore[no-untyped-call]
    return out


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half form; the sign of the first half is folded into ``signed_sin``."""
    out: Tensor = _Rotate.apply(x, cos, signed_sin)  # type: ignore[no-untyped-call]
    return out


def take_rows(x: Tensor, rows_Q: Tensor) -> Tensor:
    """``x[rows]``, each row taken at most once, so that its gradient is a copy and not a sum."""
    out: Tensor = _TakeRows.apply(x, rows_Q)  # type: ignore[no-untyped-call]
    return out


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows_Q: Tensor) -> Tensor:
        ctx.save_for_backward(rows_Q)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, rows_Q)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (rows_Q,) = ctx.saved_tensors
        grad = slopes[0].new_zeros((ctx.num_rows, *slopes[0].shape[1:]))
        return grad.index_copy_(0, rows_Q, slopes[0]), None


class _UnitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, eps: float) -> Tensor:
        wide = torch.float64 if x_RD.dtype == torch.float64 else torch.float32
        squares_R1 = torch.linalg.vector_norm(x_RD, dim=-1, keepdim=True, dtype=wide).square_()
        scale_R1 = squares_R1.div_(x_RD.shape[-1]).add_(eps).rsqrt_().to(x_RD.dtype)
        out_RD = x_RD * scale_R1
        ctx.save_for_backward(out_RD, scale_R1)
        return out_RD

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        out_RD, scale_R1 = ctx.saved_tensors
        mean_R1 = (slopes[0] * out_RD).mean(dim=-1, keepdim=True)
        return torch.addcmul(slopes[0], out_RD, mean_R1, value=-1).mul_(scale_R1), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        cos, signed_sin = ctx.saved_tensors
        # Turning back is turning by the opposite angle.
        return torch.addcmul(slopes[0] * cos, slopes[0].roll(cos.shape[-1] // 2, -1), signed_sin, value=-1), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSegment:
    """One packed text: its keys ``[first_key, past_key)``, its queries, and the additive mask ``[queries, keys]``."""

    first_key: int
    past_key: int
    first_query: int
    past_query: int
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Which query sees which step-0 key, text by text. Made once a batch, used by every layer and unroll step."""

    segments: tuple[PlanSegment, ...]

    @staticmethod
    def build(
        texts: Sequence[tuple[int, Sequence[int]]], *, num_members: int, dtype: torch.dtype = torch.bfloat16
    ) -> AttentionPlan:
        """For texts of so many keys, with queries at these indexes; ``num_members`` query heads share a key head."""
        segments: list[PlanSegment] = []
        first_key = first_query = 0
        for num_keys, indexes in texts:
            at = torch.tensor(indexes, dtype=torch.int64).unsqueeze(1)
            mask = torch.zeros(len(indexes), num_keys, dtype=dtype)
            mask.masked_fill_(torch.arange(num_keys) > at, -torch.inf)
            segments.append(
                PlanSegment(
                    first_key=first_key,
                    past_key=first_key + num_keys,
                    first_query=first_query,
                    past_query=first_query + len(indexes),
                    mask=mask.repeat(num_members, 1),
                )
            )
            first_key += num_keys
            first_query += len(indexes)
        return AttentionPlan(segments=tuple(segments))


def unrolled_attention(
    plan: AttentionPlan, queries_QHC: Tensor, step0: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of an unroll step: step-0 keys of the same text up to the query's index, and the index's own later keys.

    Args:
        plan: who sees whom.
        queries_QHC: rotated queries of all texts' query indexes.
        step0: keys and values ``[R, G, C]`` of all indexes.
        own: keys and values ``[Q, G, C]`` of steps 1, 2, .. at the query indexes.

    Returns:
        ``[Q, H, C]``.
    """
    flat = [tensor for pair in own for tensor in pair]
    out: Tensor = _UnrolledAttention.apply(plan, queries_QHC, *step0, *flat)  # type: ignore[no-untyped-call]
    return out


class _UnrolledAttention(torch.autograd.Function):
    """Scores of step-0 keys by matrix products text by text; a query's own keys are single columns behind them.

    Inside, rows of a text are ``[G, member * query, C]``, so that the query heads of a group share one product.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: AttentionPlan, queries_QHC: Tensor, keys_RGC: Tensor, values_RGC: Tensor, *own: Tensor
    ) -> Tensor:
        groups, scale = keys_RGC.shape[1], queries_QHC.shape[-1] ** -0.5
        queries_QGMC = _grouped(queries_QHC, groups) * scale
        own_keys, own_values = own[0::2], own[1::2]
        columns = [(queries_QGMC * keys.unsqueeze(2)).sum(dim=-1) for keys in own_keys]
        out_QGMC = torch.empty_like(queries_QGMC)
        own_shares = [torch.empty_like(column) for column in columns]
        shares: list[Tensor] = []
        for each in plan.segments:
            at, seen = slice(each.first_query, each.past_query), slice(each.first_key, each.past_key)
            scores = torch.empty(
                groups, each.mask.shape[0], each.past_key - each.first_key + len(columns), dtype=queries_QHC.dtype
            )
            num_keys = each.past_key - each.first_key
            scores[..., :num_keys] = torch.baddbmm(each.mask, _rows(queries_QGMC[at]), keys_RGC[seen].permute(1, 2, 0))
            for offset, column in enumerate(columns):
                scores[..., num_keys + offset] = column[at].permute(1, 2, 0).flatten(1)
            share = torch.softmax(scores, dim=-1)
            mixed = torch.bmm(share[..., :num_keys], values_RGC[seen].transpose(0, 1))
            out_QGMC[at] = _unrows(mixed, queries_QGMC.shape[2])
            for offset, own_share in enumerate(own_shares):
                own_share[at] = share[..., num_keys + offset].view(groups, queries_QGMC.shape[2], -1).permute(2, 0, 1)
            shares.append(share)
        for own_share, values in zip(own_shares, own_values, strict=True):
            out_QGMC.addcmul_(own_share.unsqueeze(-1), values.unsqueeze(2))
        ctx.plan, ctx.scale = plan, scale
        ctx.shares, ctx.own_shares = shares, own_shares
        ctx.save_for_backward(queries_QGMC, keys_RGC, values_RGC, out_QGMC, *own)
        return out_QGMC.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        queries_QGMC, keys_RGC, values_RGC, out_QGMC, *own = ctx.saved_tensors
        members = queries_QGMC.shape[2]
        slope_QGMC = _grouped(slopes[0], keys_RGC.shape[1])
        common_QGM = (slope_QGMC * out_QGMC).sum(dim=-1)
        query_grad_QGMC = torch.empty_like(queries_QGMC)
        key_grad_RGC, value_grad_RGC = torch.empty_like(keys_RGC), torch.empty_like(values_RGC)
        for each, share in zip(ctx.plan.segments, ctx.shares, strict=True):
            at, seen = slice(each.first_query, each.past_query), slice(each.first_key, each.past_key)
            rows, slope_rows = _rows(queries_QGMC[at]), _rows(slope_QGMC[at])
            share0 = share[..., : each.past_key - each.first_key]
            value_grad_RGC[seen] = torch.bmm(share0.transpose(1, 2), slope_rows).transpose(0, 1)
            pull = torch.bmm(slope_rows, values_RGC[seen].permute(1, 2, 0))
            pull.sub_(common_QGM[at].permute(1, 2, 0).flatten(1).unsqueeze(-1)).mul_(share0)
            query_grad_QGMC[at] = _unrows(torch.bmm(pull, keys_RGC[seen].transpose(0, 1)), members)
            key_grad_RGC[seen] = torch.bmm(pull.transpose(1, 2), rows).transpose(0, 1)
        own_grads: list[Tensor] = []
        for own_share, keys, values in zip(ctx.own_shares, own[0::2], own[1::2], strict=True):
            pull_QGM1 = (slope_QGMC * values.unsqueeze(2)).sum(dim=-1).sub_(common_QGM).mul_(own_share).unsqueeze(-1)
            query_grad_QGMC.addcmul_(pull_QGM1, keys.unsqueeze(2))
            own_grads.append((pull_QGM1 * queries_QGMC).sum(dim=2))
            own_grads.append((own_share.unsqueeze(-1) * slope_QGMC).sum(dim=2))
        ctx.shares = ctx.own_shares = None
        query_grad_QHC = query_grad_QGMC.mul_(ctx.scale).flatten(1, 2)
        return None, query_grad_QHC, key_grad_RGC, value_grad_RGC, *own_grads


def _grouped(x_QHC: Tensor, groups: int) -> Tensor:
    return x_QHC.reshape(x_QHC.shape[0], groups, -1, x_QHC.shape[-1])


def _rows(x_QGMC: Tensor) -> Tensor:
    """``[G, M * Q, C]``."""
    return x_QGMC.permute(1, 2, 0, 3).flatten(1, 2)


def _unrows(x: Tensor, members: int) -> Tensor:
    """``[Q, G, M, C]``."""
    return x.view(x.shape[0], members, -1, x.shape[-1]).permute(2, 0, 1, 3)
