"""Differentiable pieces of a layer with hand-written backward passes: fewer trips over memory than autograd would make.

On a processor that multiplies matrices as fast as this one, everything that is not a matrix product is what training
waits for. Each function here is tested against its plain form, values and gradients; bfloat16 rows on the CPU go through
native kernels where there are any (:func:`outrider.native.training.training_kernels`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.native.training_rows import RowKernels, row_kernels

__all__ = ["SharedWeight", "gated", "linear", "rotate", "take_rows", "unit_norm"]


def unit_norm(x_RD: Tensor, eps: float, weight_D: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` row by row, times a float32 weight if there is one (one may be folded elsewhere)."""
    kernels = row_kernels(x_RD, x_RD.shape[-1])
    if kernels is not None and (weight_D is None or weight_D.dtype == torch.float32):
        flat = _dense(x_RD.flatten(0, -2))
        normed: Tensor = _NativeNorm.apply(kernels, flat, weight_D, eps)  # type: ignore[no-untyped-call]
        return normed.view(x_RD.shape)
    out: Tensor = _UnitNorm.apply(x_RD, eps)  # type: ignore[no-untyped-call]
    return out if weight_D is None else out * weight_D.to(out.dtype)


def rotate(x_RHC: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half form; the sign of the first half is folded into ``signed_sin``."""
    kernels = row_kernels(x_RHC, x_RHC.shape[-1] // 2)
    form, first = (_Rotate, ()) if kernels is None else (_NativeRotate, (kernels,))
    out: Tensor = form.apply(*first, x_RHC, cos, signed_sin)  # type: ignore[no-untyped-call]
    return out


def take_rows(x: Tensor, rows_Q: Tensor) -> Tensor:
    """``x[rows]``, each row taken at most once, so that its gradient is a copy and not a sum."""
    out: Tensor = _TakeRows.apply(x, rows_Q)  # type: ignore[no-untyped-call]
    return out


def gated(gate_up_RI: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold both, one behind the other."""
    kernels = row_kernels(gate_up_RI, gate_up_RI.shape[-1] // 2)
    if kernels is None:
        gate, up = gate_up_RI.chunk(2, dim=-1)
        return F.silu(gate) * up
    out: Tensor = _NativeGate.apply(kernels, gate_up_RI)  # type: ignore[no-untyped-call]
    return out


class SharedWeight:
    """A matrix that a batch multiplies by several times; its gradient is summed over all uses before it is rounded.

    Every use must take part in the backward pass: the last of them to come up hands the gradient out.
    """

    def __init__(self, weight_OD: Tensor) -> None:
        self.weight_OD = weight_OD
        self.num_uses = 0
        self.sums: Tensor | None = None


def linear(x_RD: Tensor, weight_OD: Tensor | SharedWeight) -> Tensor:
    """``x @ weight.T``; the weight's gradient, for which PyTorch turns a whole matrix, comes from a native kernel."""
    shared = weight_OD if isinstance(weight_OD, SharedWeight) else SharedWeight(weight_OD)
    kernels = row_kernels(x_RD, _ANY_WIDTH)
    if kernels is None:
        return F.linear(x_RD, shared.weight_OD)
    out: Tensor = _Linear.apply(kernels, x_RD, shared.weight_OD, shared)  # type: ignore[no-untyped-call]
    return out


_ANY_WIDTH = 0


def _dense(x: Tensor) -> Tensor:
    """Itself if each row lies in one piece, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _NativeNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: RowKernels, x_RD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
        out_RD, scales_R = kernels.norm(x_RD, weight_D, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(x_RD, scales_R, weight_D)
        return out_RD

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, scales_R, weight_D = ctx.saved_tensors
        grad_RD, weight_grad_D = ctx.kernels.norm_back(_dense(slopes[0]), x_RD, scales_R, weight_D)
        return None, grad_RD, weight_grad_D, None


class _NativeRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: RowKernels, x_RHC: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.kernels, ctx.tables = kernels, (cos.contiguous(), signed_sin.contiguous())
        return kernels.rotate(_dense_heads(x_RHC), *ctx.tables, back=False)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.kernels.rotate(_dense_heads(slopes[0]), *ctx.tables, back=True), None, None


def _dense_heads(x_RHC: Tensor) -> Tensor:
    return x_RHC if x_RHC.stride()[1:] == (x_RHC.shape[2], 1) else x_RHC.contiguous()


class _NativeGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: RowKernels, gate_up_RI: Tensor) -> Tensor:
        ctx.kernels, gate_up_RI = kernels, _dense(gate_up_RI)
        ctx.save_for_backward(gate_up_RI)
        return kernels.gated(gate_up_RI)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.kernels.gated_back(_dense(slopes[0]), *ctx.saved_tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: RowKernels, x_RD: Tensor, weight_OD: Tensor, shared: SharedWeight) -> Tensor:
        ctx.kernels, ctx.shared = kernels, shared
        ctx.save_for_backward(x_RD, weight_OD)
        shared.num_uses += 1
        return F.linear(x_RD, weight_OD)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_OD = ctx.saved_tensors
        shared: SharedWeight = ctx.shared
        x_grad_RD = slopes[0] @ weight_OD if ctx.needs_input_grad[1] else None
        shared.num_uses -= 1
        shared.sums, weight_grad_OD = ctx.kernels.weight_gradient(
            _dense(slopes[0]), _dense(x_RD), shared.sums, is_last=not shared.num_uses
        )
        return None, x_grad_RD, weight_grad_OD, None


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
        out_RD: Tensor = x_RD * scale_R1
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
