"""The matrix parts of a layer, by device and precision: the seam that faster kernels plug into.

A target is built of five kinds of part: the residual stream's embedding, and, each fused around its matrix, norm +
projection, projection + residual, feed-forward, and norm + LM head. Weights are converted and packed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement
from outrider.models.layers import gated, rms_norm

__all__ = [
    "DenseKernels",
    "DenseMatrix",
    "FeedForward",
    "Head",
    "Kernels",
    "Matrix",
    "Norm",
    "NormProjection",
    "PackedMatrix",
    "ResidualProjection",
    "Stream",
    "can_pack_bfloat16",
    "dense_matrix",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Weight ``[D]`` and epsilon of an RMS norm."""

    weight_D: Tensor
    eps: float


class Stream(Protocol):
    """The residual stream's ends: how rows enter it, and what it looks like from outside."""

    def embed(self, tokens_R: Tensor) -> Tensor:
        """The stream before the first layer, ``[R, D]``."""
        ...

    def tap(self, x_RD: Tensor) -> Tensor:
        """The model's hidden states: the stream without whatever form the parts keep it in."""
        ...


class NormProjection(Protocol):
    """Norm, then a matrix. ``num_bytes`` of any part is what one call streams from memory."""

    num_bytes: int

    def __call__(self, x_RD: Tensor) -> Tensor: ...


class ResidualProjection(Protocol):
    """The residual stream plus a matrix times ``y``."""

    num_bytes: int

    def __call__(self, x_RD: Tensor, y: Tensor) -> Tensor: ...


class FeedForward(Protocol):
    """The residual stream plus its feed-forward: x + down(silu(gate(norm(x))) * up(norm(x)))."""

    num_bytes: int

    def __call__(self, x_RD: Tensor) -> Tensor: ...


class Head(Protocol):
    """Final norm and LM head: float32 logits."""

    num_bytes: int

    def __call__(self, x_RD: Tensor) -> Tensor: ...


class Kernels(Protocol):
    """Builds the parts of a target. Weights are ``[out, in]`` of any floating dtype and are not kept.

    Attributes:
        row_multiple: passes are padded to a multiple of this many rows.
    """

    row_multiple: int

    def stream(self, embedding: Tensor) -> Stream: ...

    def norm_projection(self, weight: Tensor, norm: Norm) -> NormProjection: ...

    def residual_projection(self, weight: Tensor) -> ResidualProjection: ...

    def feed_forward(self, gate_up: Tensor, down: Tensor, norm: Norm) -> FeedForward: ...

    def head(self, weight: Tensor, norm: Norm) -> Head: ...


class Matrix(Protocol):
    """One floating-point matrix, times packed rows."""

    num_bytes: int

    def __call__(self, x_RD: Tensor) -> Tensor:
        """The product, in the dtype of ``x_RD``."""
        ...

    def add_to(self, residual_RD: Tensor, x_RD: Tensor) -> Tensor:
        """``residual_RD`` + product."""
        ...

    def logits(self, x_RD: Tensor) -> Tensor:
        """The product in float32."""
        ...


class DenseMatrix:
    """The library's own product; the weight is kept as it is."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x_RD: Tensor) -> Tensor:
        return F.linear(x_RD, self._weight)

    def add_to(self, residual_RD: Tensor, x_RD: Tensor) -> Tensor:
        return torch.addmm(residual_RD, x_RD, self._weight.t())

    def logits(self, x_RD: Tensor) -> Tensor:
        if x_RD.dtype == torch.float32 or x_RD.device.type == "cpu":
            return F.linear(x_RD, self._weight).float()
        return torch.mm(x_RD, self._weight.t(), out_dtype=torch.float32)


class PackedMatrix:
    """bfloat16 on a CPU with oneDNN: the weight is packed once into the layout that its kernels read.

    Unpacked, the library would repack the matrix on every call, which costs as much as the product itself.
    """

    def __init__(self, weight: Tensor) -> None:
        self.num_bytes = weight.numel() * weight.element_size()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._combined = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x_RD: Tensor) -> Tensor:
        product: Tensor = self._product(x_RD, self._packed, None, "none", [], "")
        return product

    def add_to(self, residual_RD: Tensor, x_RD: Tensor) -> Tensor:
        total: Tensor = self._combined(x_RD, residual_RD, self._packed, None, "add")
        return total

    def logits(self, x_RD: Tensor) -> Tensor:
        """Sums are float32 inside, but the kernel can only hand out bfloat16, which makes ties of near-equal logits.

        A second product, less the first one's rounded result, yields what the rounding took away.
        """
        rounded = self(x_RD)
        rest: Tensor = self._combined(x_RD, rounded, self._packed, None, "sub")
        return rounded.float().add_(rest)


def can_pack_bfloat16(device: torch.device) -> bool:
    """True if oneDNN multiplies bfloat16 on this device."""
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def dense_matrix(weight: Tensor, placement: Placement) -> Matrix:
    """A floating-point matrix ``[out, in]`` at a placement, packed where that helps."""
    moved = weight.detach().to(device=placement.device, dtype=placement.activation_dtype)
    is_packable = moved.dtype == torch.bfloat16 and can_pack_bfloat16(placement.device)
    return PackedMatrix(moved) if is_packable else DenseMatrix(moved)


class DenseKernels:
    """Parts around floating-point matrices: float32 and bfloat16."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._dtype = placement.activation_dtype
        is_cpu_float32 = placement.device.type == "cpu" and placement.precision == "float32"
        # float32 products on a CPU depend on the number of rows, unless that is a multiple of 16; 16 rows cost what 8 do.
        self.row_multiple = 16 if is_cpu_float32 else 1

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self._placement.device, dtype=self._dtype)

    def _matrix(self, weight: Tensor) -> Matrix:
        return dense_matrix(weight, self._placement)

    def _norm(self, norm: Norm) -> Norm:
        return Norm(weight_D=self._moved(norm.weight_D), eps=norm.eps)

    def stream(self, embedding: Tensor) -> Stream:
        return _DenseStream(self._moved(embedding))

    def norm_projection(self, weight: Tensor, norm: Norm) -> NormProjection:
        return _DenseNormProjection(self._matrix(weight), self._norm(norm))

    def residual_projection(self, weight: Tensor) -> ResidualProjection:
        return _DenseResidualProjection(self._matrix(weight))

    def feed_forward(self, gate_up: Tensor, down: Tensor, norm: Norm) -> FeedForward:
        return _DenseFeedForward(self._matrix(gate_up), self._matrix(down), self._norm(norm))

    def head(self, weight: Tensor, norm: Norm) -> Head:
        return _DenseHead(self._matrix(weight), self._norm(norm))


class _DenseStream:
    def __init__(self, table_VD: Tensor) -> None:
        self._table_VD = table_VD

    def embed(self, tokens_R: Tensor) -> Tensor:
        return F.embedding(tokens_R, self._table_VD)

    def tap(self, x_RD: Tensor) -> Tensor:
        return x_RD


class _DenseNormProjection:
    def __init__(self, matrix: Matrix, norm: Norm) -> None:
        self._matrix, self._norm = matrix, norm
        self.num_bytes = matrix.num_bytes

    def __call__(self, x_RD: Tensor) -> Tensor:
        return self._matrix(rms_norm(x_RD, self._norm.weight_D, self._norm.eps))


class _DenseResidualProjection:
    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self.num_bytes = matrix.num_bytes

    def __call__(self, x_RD: Tensor, y: Tensor) -> Tensor:
        return self._matrix.add_to(x_RD, y)


class _DenseFeedForward:
    def __init__(self, gate_up: Matrix, down: Matrix, norm: Norm) -> None:
        self._gate_up, self._down, self._norm = gate_up, down, norm
        self.num_bytes = gate_up.num_bytes + down.num_bytes

    def __call__(self, x_RD: Tensor) -> Tensor:
        normed = rms_norm(x_RD, self._norm.weight_D, self._norm.eps)
        return self._down.add_to(x_RD, gated(self._gate_up(normed)))


class _DenseHead:
    def __init__(self, matrix: Matrix, norm: Norm) -> None:
        self._matrix, self._norm = matrix, norm
        self.num_bytes = matrix.num_bytes

    def __call__(self, x_RD: Tensor) -> Tensor:
        return self._matrix.logits(rms_norm(x_RD, self._norm.weight_D, self._norm.eps))
