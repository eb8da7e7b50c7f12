"""int8 parts: symmetric weights with one scale per output channel, symmetric rows with one scale per row.

Integer sums are exact, and a row's scale depends on that row alone: a row's result is the same bits whatever its
companions and their number. Everything between the products is float32 and row by row; the residual stream too, so
that nothing is rounded between a product and the next quantisation.

A row's scale cancels in its own quantisation: a row and any multiple of it have the same levels. So the RMS norm is not
applied but multiplied into the scale, and the gate's scale is carried past the gated product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement
from outrider.models.linear import FeedForward, Head, Norm, NormProjection, ResidualProjection

__all__ = ["Int8Kernels", "Int8Matrix", "quantize_rows"]

_LEVELS = 127.0
_SMALLEST_PEAK = 1e-30


def quantize_rows(x_RD: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 levels ``[R, D]``, peaks ``[R, 1]``): x = levels * peak / 127, within half a level."""
    peaks_R1 = x_RD.abs().amax(dim=-1, keepdim=True).float().clamp_min_(_SMALLEST_PEAK)
    return (x_RD * (_LEVELS / peaks_R1)).round_().to(torch.int8), peaks_R1


class Int8Matrix:
    """An int8 matrix, packed once where oneDNN can.

    Args:
        weight: ``[out, in]``, any floating dtype.
        device: where products run.
        gain: constant folded into the channel scales, besides the 1/127 of the rows' levels.
    """

    def __init__(self, weight: Tensor, device: torch.device, *, gain: float = 1.0) -> None:
        weight = weight.to(device=device, dtype=torch.float32)
        peaks_N = weight.abs().amax(dim=1).clamp_min_(_SMALLEST_PEAK)
        levels = (weight * (_LEVELS / peaks_N).unsqueeze(1)).round_().to(torch.int8)
        self.num_bytes = levels.numel()
        self._scales_N = peaks_N * (gain / _LEVELS**2)
        self._is_packed = device.type == "cpu" and "onednn" in torch.backends.quantized.supported_engines
        if self._is_packed:
            self._weight = torch.ops.onednn.qlinear_prepack(levels, None)
            self._zeros_N = torch.zeros(levels.shape[0], dtype=torch.int32)
            self._product = torch.ops.onednn.qlinear_pointwise.default
        else:
            self._weight = levels.t()
            # The integer product of GPUs wants more than 16 rows.
            self._min_rows = 1 if device.type == "cpu" else 32

    def __call__(self, levels_RD: Tensor) -> Tensor:
        """float32 products of int8 rows, times channel scales; the caller multiplies by the rows' peaks."""
        if self._is_packed:
            product: Tensor = self._product(
                levels_RD,
                1.0,
                0,
                self._weight,
                self._scales_N,
                self._zeros_N,
                None,
                1.0,
                0,
                torch.float32,
                "none",
                [],
                "",
            )
            return product
        num_rows = levels_RD.shape[0]
        if num_rows < self._min_rows:
            levels_RD = F.pad(levels_RD, (0, 0, 0, self._min_rows - num_rows))
        return torch._int_mm(levels_RD, self._weight)[:num_rows] * self._scales_N


class _NormedMatrix:
    """RMS norm and matrix: norm weight inside the matrix, 1 / rms inside the rows' scale."""

    def __init__(self, weight: Tensor, norm: Norm, device: torch.device) -> None:
        width = weight.shape[1]
        folded = weight.float() * norm.weight_D.float().to(weight.device)
        self._matrix = Int8Matrix(folded, device, gain=width**0.5)
        self._root_eps = torch.tensor((width * norm.eps) ** 0.5, device=device)
        self.num_bytes = self._matrix.num_bytes

    def __call__(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """(product, its rows' scales ``[R, 1]``), to be multiplied."""
        norms_R1 = torch.linalg.vector_norm(x_RD, 2, -1, keepdim=True)
        levels_RD, peaks_R1 = quantize_rows(x_RD)
        return self._matrix(levels_RD), peaks_R1.div_(norms_R1.hypot_(self._root_eps))


class Int8Kernels:
    """Parts around int8 matrices."""

    stream_dtype = torch.float32
    row_multiple = 1

    def __init__(self, placement: Placement) -> None:
        self._device = placement.device
        self._attention_dtype = placement.activation_dtype

    def norm_projection(self, weight: Tensor, norm: Norm) -> NormProjection:
        return _Int8NormProjection(_NormedMatrix(weight, norm, self._device), self._attention_dtype)

    def residual_projection(self, weight: Tensor) -> ResidualProjection:
        return _Int8ResidualProjection(Int8Matrix(weight, self._device))

    def feed_forward(self, gate_up: Tensor, down: Tensor, norm: Norm) -> FeedForward:
        return _Int8FeedForward(_NormedMatrix(gate_up, norm, self._device), Int8Matrix(down, self._device))

    def head(self, weight: Tensor, norm: Norm) -> Head:
        return _Int8Head(_NormedMatrix(weight, norm, self._device))


class _Int8NormProjection:
    def __init__(self, matrix: _NormedMatrix, dtype: torch.dtype) -> None:
        self._matrix, self._dtype = matrix, dtype
        self.num_bytes = matrix.num_bytes

    def __call__(self, x_RD: Tensor) -> Tensor:
        product, scales_R1 = self._matrix(x_RD)
        return product.mul_(scales_R1).to(self._dtype)


class _Int8ResidualProjection:
    def __init__(self, matrix: Int8Matrix) -> None:
        self._matrix = matrix
        self.num_bytes = matrix.num_bytes

    def __call__(self, x_RD: Tensor, y: Tensor) -> Tensor:
        levels, peaks_R1 = quantize_rows(y)
        return torch.addcmul(x_RD, self._matrix(levels), peaks_R1)


class _Int8FeedForward:
    def __init__(self, gate_up: _NormedMatrix, down: Int8Matrix) -> None:
        self._gate_up, self._down = gate_up, down
        self.num_bytes = gate_up.num_bytes + down.num_bytes

    def __call__(self, x_RD: Tensor) -> Tensor:
        gate_up_RF, scales_R1 = self._gate_up(x_RD)
        gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
        levels, peaks_R1 = quantize_rows(F.silu(gate_RF * scales_R1).mul_(up_RF))
        return torch.addcmul(x_RD, self._down(levels), peaks_R1.mul_(scales_R1))


class _Int8Head:
    def __init__(self, matrix: _NormedMatrix) -> None:
        self._matrix = matrix
        self.num_bytes = matrix.num_bytes

    def __call__(self, x_RD: Tensor) -> Tensor:
        product, scales_R1 = self._matrix(x_RD)
        return product.mul_(scales_R1)
