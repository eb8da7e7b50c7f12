"""Attention of the unroll steps: the plan of a batch, the native form of it, and the plain one that it is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.native.training import AttentionKernels, fits_attention, training_kernels

__all__ = ["AttentionPlan", "PlanSegment", "padded", "unrolled_attention"]

QUERY_PAD, KEY_PAD, OWN_PAD = 32, 64, 8
"""Sizes of a text's products, and its queries' own later keys, are multiples of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSegment:
    """One packed text: its keys ``[first_key, past_key)``, its queries, and the additive mask of both padded.

    Products run over the padded ranges (``mask.shape``), which reach into the next text: its keys are masked, its queries'
    shares are set to zero, and what comes out for either is dropped.
    """

    first_key: int
    past_key: int
    first_query: int
    past_query: int
    mask: Tensor

    @property
    def keys(self) -> slice:
        """Its rows among all keys."""
        return slice(self.first_key, self.past_key)

    @property
    def queries(self) -> slice:
        """Its rows among all queries."""
        return slice(self.first_query, self.past_query)

    @property
    def wide_keys(self) -> slice:
        """The padded range."""
        return slice(self.first_key, self.first_key + self.mask.shape[1])

    @property
    def wide_queries(self) -> slice:
        """The padded range."""
        return slice(self.first_query, self.first_query + self.mask.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Which query sees which step-0 key, text by text. Made once a batch, used by every layer and unroll step.

    ``kernels`` are the native form of it, None where there is none.

    Texts are padded to few different sizes. The library behind matrix products prepares each shape that it has not seen,
    which takes several times as long as the product itself.
    """

    segments: tuple[PlanSegment, ...]
    kernels: AttentionKernels | None

    @staticmethod
    def build(texts: Sequence[tuple[int, Sequence[int]]], *, dtype: torch.dtype = torch.bfloat16) -> AttentionPlan:
        """For texts of so many keys, with queries at these indexes."""
        segments: list[PlanSegment] = []
        first_key = first_query = 0
        for num_keys, indexes in texts:
            at = torch.tensor(indexes, dtype=torch.int64).unsqueeze(1)
            mask = torch.zeros(padded(len(indexes), QUERY_PAD), padded(num_keys, KEY_PAD), dtype=dtype)
            mask[: len(indexes)].masked_fill_(torch.arange(mask.shape[1]) > at, -torch.inf)
            segments.append(
                PlanSegment(
                    first_key=first_key,
                    past_key=first_key + num_keys,
                    first_query=first_query,
                    past_query=first_query + len(indexes),
                    mask=mask,
                )
            )
            first_key += num_keys
            first_query += len(indexes)
        context = training_kernels() if dtype == torch.bfloat16 else None
        if context is None:
            return AttentionPlan(segments=tuple(segments), kernels=None)
        sizes = torch.tensor(
            [(x.first_key, x.past_key - x.first_key, x.first_query, x.past_query - x.first_query) for x in segments],
            dtype=torch.int32,
        )
        at = torch.tensor([index for _, indexes in texts for index in indexes], dtype=torch.int32)
        return AttentionPlan(segments=tuple(segments), kernels=AttentionKernels(context, sizes, at))


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
    kernels = plan.kernels if fits_attention(queries_QHC, step0[0].shape[1], len(own)) else None
    form, arguments = (_UnrolledAttention, plan) if kernels is None else (_NativeAttention, kernels)
    out: Tensor = form.apply(arguments, queries_QHC, *step0, *flat)  # type: ignore[no-untyped-call]
    return out


class _NativeAttention(torch.autograd.Function):
    """The same in native kernels, which keep a logarithm of each query and head, and make the shares anew."""

    @staticmethod
    def forward(ctx: Any, kernels: AttentionKernels, *inputs: Tensor) -> Tensor:
        queries_QHC, keys_RGC, values_RGC, *own = (_dense_rows(x) for x in inputs)
        out_QHC, log_sums_HQ = kernels.forward(queries_QHC, keys_RGC, values_RGC, own)
        ctx.kernels = kernels
        ctx.save_for_backward(out_QHC, log_sums_HQ, queries_QHC, keys_RGC, values_RGC, *own)
        return out_QHC

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        out_QHC, log_sums_HQ, queries_QHC, keys_RGC, values_RGC, *own = ctx.saved_tensors
        kernels: AttentionKernels = ctx.kernels
        inputs = queries_QHC, keys_RGC, values_RGC
        return None, *kernels.backward(_dense_rows(slopes[0]), (out_QHC, log_sums_HQ), inputs, own)


def _dense_rows(x: Tensor) -> Tensor:
    """Itself if each row lies in one piece, else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


class _UnrolledAttention(torch.autograd.Function):
    """Scores of step-0 keys by matrix products text by text; a query's own keys are single columns behind them.

    Inside, everything lies head by head, ``[H, Q, C]``, so that a text's part is a view; keys and values are repeated for
    the query heads that share them.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: AttentionPlan, queries_QHC: Tensor, keys_RGC: Tensor, values_RGC: Tensor, *own: Tensor
    ) -> Tensor:
        members, num_queries = queries_QHC.shape[1] // keys_RGC.shape[1], queries_QHC.shape[0]
        queries_HQC = _by_head(queries_QHC).mul_(queries_QHC.shape[-1] ** -0.5)
        keys_HRC, values_HRC = _repeated(keys_RGC, members), _repeated(values_RGC, members)
        own_keys, own_values = own[0::2], own[1::2]
        columns_HQJ = queries_HQC.new_full((*queries_HQC.shape[:2], padded(len(own_keys), OWN_PAD)), -torch.inf)
        for index, keys in enumerate(own_keys):
            columns_HQJ[:, :num_queries, index] = _own_products(queries_HQC[:, :num_queries], keys)
        out_HQC = queries_HQC.new_zeros((queries_HQC.shape[0], num_queries, queries_HQC.shape[2]))
        own_shares_HQJ = queries_HQC.new_zeros((queries_HQC.shape[0], num_queries, len(own_keys)))
        shares: list[Tensor] = []
        for each in plan.segments:
            at, seen = each.wide_queries, each.wide_keys
            count, width = each.past_query - each.first_query, each.mask.shape[1]
            scores = torch.baddbmm(each.mask, queries_HQC[:, at], keys_HRC[:, seen].transpose(1, 2))
            share = torch.softmax(torch.cat((scores, columns_HQJ[:, at]), dim=-1), dim=-1)
            share[:, count:] = 0
            out_HQC[:, each.queries] = torch.bmm(share[..., :width], values_HRC[:, seen])[:, :count]
            own_shares_HQJ[:, each.queries] = share[:, :count, width : width + len(own_keys)]
            shares.append(share)
        for index, values in enumerate(own_values):
            _grouped(out_HQC, values).addcmul_(_column(own_shares_HQJ, index, values), _one_of_group(values))
        ctx.plan, ctx.shares, ctx.members = plan, shares, members
        ctx.save_for_backward(queries_HQC, keys_HRC, values_HRC, out_HQC, own_shares_HQJ, *own)
        return out_HQC.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        queries_HQC, keys_HRC, values_HRC, out_HQC, own_shares_HQJ, *own = ctx.saved_tensors
        num_queries, num_keys = out_HQC.shape[1], keys_HRC.shape[1] - KEY_PAD
        slope_HQC = _by_head(slopes[0])
        common_HQ1 = F.pad((slope_HQC[:, :num_queries] * out_HQC).sum(dim=-1, keepdim=True), (0, 0, 0, QUERY_PAD))
        query_grad_HQC = torch.zeros_like(out_HQC)
        key_grad_HRC, value_grad_HRC = (x.new_zeros((x.shape[0], num_keys, x.shape[2])) for x in (keys_HRC, values_HRC))
        for each, share in zip(ctx.plan.segments, ctx.shares, strict=True):
            at, seen = each.wide_queries, each.wide_keys
            count, length = each.past_query - each.first_query, each.past_key - each.first_key
            share0 = share[..., : each.mask.shape[1]]
            value_grad_HRC[:, each.keys] = torch.bmm(share0.transpose(1, 2), slope_HQC[:, at])[:, :length]
            pull = torch.bmm(slope_HQC[:, at], values_HRC[:, seen].transpose(1, 2))
            pull.sub_(common_HQ1[:, at]).mul_(share0)
            query_grad_HQC[:, each.queries] = torch.bmm(pull, keys_HRC[:, seen])[:, :count]
            key_grad_HRC[:, each.keys] = torch.bmm(pull.transpose(1, 2), queries_HQC[:, at])[:, :length]
        slope_HQC, queries_HQC = slope_HQC[:, :num_queries], queries_HQC[:, :num_queries]
        common_HQ1 = common_HQ1[:, :num_queries]
        own_grads: list[Tensor] = []
        for index, (keys, values) in enumerate(zip(own[0::2], own[1::2], strict=True)):
            share_GMQ1 = _column(own_shares_HQJ, index, values)
            pull_HQ = _own_products(slope_HQC, values).sub_(common_HQ1.squeeze(-1)).mul_(own_shares_HQJ[..., index])
            pull_GMQ1 = _grouped(pull_HQ.unsqueeze(-1), keys)
            _grouped(query_grad_HQC, keys).addcmul_(pull_GMQ1, _one_of_group(keys))
            own_grads.append((pull_GMQ1 * _grouped(queries_HQC, keys)).sum(dim=1).transpose(0, 1))
            own_grads.append((share_GMQ1 * _grouped(slope_HQC, values)).sum(dim=1).transpose(0, 1))
        query_grad_HQC.mul_(slopes[0].shape[-1] ** -0.5)
        key_grad, value_grad = (_summed(grad, ctx.members) for grad in (key_grad_HRC, value_grad_HRC))
        return None, query_grad_HQC.transpose(0, 1), key_grad, value_grad, *own_grads


def padded(count: int, multiple: int) -> int:
    """``count``, rounded up."""
    return -(-count // multiple) * multiple


def _by_head(x_QHC: Tensor) -> Tensor:
    """``[H, Q + QUERY_PAD, C]``, a copy with zeros behind it."""
    return F.pad(x_QHC.transpose(0, 1), (0, 0, 0, QUERY_PAD))


def _repeated(x_RGC: Tensor, members: int) -> Tensor:
    """``[H, R + KEY_PAD, C]``: each key head once for every query head that reads it, zeros behind."""
    return F.pad(x_RGC.transpose(0, 1), (0, 0, 0, KEY_PAD)).repeat_interleave(members, dim=0)


def _summed(x_HRC: Tensor, members: int) -> Tensor:
    """``[R, G, C]``: what all query heads of a group leave at their key head."""
    return x_HRC.view(-1, members, *x_HRC.shape[1:]).sum(dim=1).transpose(0, 1)


def _grouped(x: Tensor, like_QGC: Tensor) -> Tensor:
    """``[H, Q, ..]`` seen as ``[G, M, Q, ..]``."""
    return x.view(like_QGC.shape[1], -1, *x.shape[1:])


def _one_of_group(x_QGC: Tensor) -> Tensor:
    """``[G, 1, Q, C]``."""
    return x_QGC.transpose(0, 1).unsqueeze(1)


def _column(shares_HQJ: Tensor, index: int, like_QGC: Tensor) -> Tensor:
    """``[G, M, Q, 1]``."""
    return _grouped(shares_HQJ[..., index : index + 1], like_QGC)


def _own_products(x_HQC: Tensor, keys_QGC: Tensor) -> Tensor:
    """Product of each row with its own key, ``[H, Q]``."""
    return (_grouped(x_HQC, keys_QGC) * _one_of_group(keys_QGC)).sum(dim=-1).flatten(0, 1)
