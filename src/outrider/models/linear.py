"""Linear layers by device and precision: the seam that faster kernels plug into.

Every implementation multiplies packed rows by one fused matrix. Weights are converted and packed once, at load.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement

__all__ = ["DenseLinear", "Int8Linear", "Linear", "PackedLinear", "make_linear"]


class Linear(Protocol):
    """``x_RD @ weight.T`` over packed rows.

    ``num_bytes`` is what one call streams from memory.
    """

    num_bytes: int

    def __call__(self, x_RD: Tensor) -> Tensor:
        """The product, in the dtype of ``x_RD``."""
        ...

    def add_to(self, residual_RD: Tensor, x_RD: Tensor) -> Tensor:
        """``residual_RD`` + product."""
        ...

    def logits(self, x_RD: Tensor) -> Tensor:
        """The product as float32 (LM head)."""
        ...


def make_linear(weight: Tensor, placement: Placement) -> Linear:
    """The implementation for a precision and device.

    Args:
        weight: ``[out, in]``, any floating dtype, on any device; not kept.
        placement: where and how the product runs.
    """
    if placement.precision == "int8":
        return Int8Linear(weight, placement.device)
    moved = weight.to(device=placement.device, dtype=placement.activation_dtype)
    is_packable = placement.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if placement.precision == "bfloat16" and is_packable:
        return PackedLinear(moved)
    return DenseLinear(moved)


class DenseLinear:
    """The library's own product; the weight is kept as it is."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x_RD: Tensor) -> Tensor:
        return F.linear(x_RD, self._weight)

    def add_to(self, residual_RD: Tensor, x_RD: Tensor) -> Tensor:
        return torch.addmm(residual_RD, x_RD, self._weight.t())

    def logits(self, x_RD: Tensor) -> Tensor:
        return F.linear(x_RD, self._weight).float()


class PackedLinear:
    """bfloat16 on a CPU with oneDNN: the weight is packed once into the layout its kernels read.

    Unpacked, the library would repack the matrix on every call, which costs as much as the product itself.
    """

    def __init__(self, weight: Tensor) -> None:
        self.num_bytes = weight.numel() * weight.element_size()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._call = torch.ops.mkldnn._linear_pointwise.default
        self._call_binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x_RD: Tensor) -> Tensor:
        product: Tensor = self._call(x_RD, self._packed, None, "none", [], "")
        return product

    def add_to(self, residual_RD: Tensor, x_RD: Tensor) -> Tensor:
        total: Tensor = self._call_binary(x_RD, residual_RD, self._packed, None, "add")
        return total

    def logits(self, x_RD: Tensor) -> Tensor:
        return self(x_RD).float()


class Int8Linear:
    """Symmetric int8: one scale per output channel, one per row.

    int32 sums are exact, and a row's scale depends on that row alone, so a row's result is the same bits whatever its
    companions are.
    """

    def __init__(self, weight: Tensor, device: torch.device) -> None:
        weight = weight.to(device=device, dtype=torch.float32)
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / 127
        # [in, out], as the integer product wants it.
        self._weight = (weight / scale).round_().to(torch.int8).t()
        self._scale = scale.view(1, -1)
        self._min_rows = 1 if device.type == "cpu" else 32
        self.num_bytes = self._weight.numel()

    def logits(self, x_RD: Tensor) -> Tensor:
        num_rows = x_RD.shape[0]
        x_RD = x_RD.float()
        row_scale = x_RD.abs().amax(dim=1, keepdim=True).clamp_(min=1e-12) / 127
        levels = (x_RD / row_scale).round_().to(torch.int8)
        if num_rows < self._min_rows:
            levels = F.pad(levels, (0, 0, 0, self._min_rows - num_rows))
        sums = torch._int_mm(levels, self._weight)[:num_rows]
        return sums * self._scale * row_scale

    def __call__(self, x_RD: Tensor) -> Tensor:
        return self.logits(x_RD).to(x_RD.dtype)

    def add_to(self, residual_RD: Tensor, x_RD: Tensor) -> Tensor:
        return residual_RD + self(x_RD)
