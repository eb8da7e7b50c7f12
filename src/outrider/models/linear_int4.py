"""4-bit parts in PyTorch: the arithmetic of the native path, written down plainly, and not faster than float32.

Weights are on their grid (:mod:`outrider.models.grid`) and held in float32. Rows are quantised to int8 with one scale for
each group of inputs, which is also what keeps a 4-bit file's own grid usable: outliers of the stream spoil one group of
32 and not the row, so the stream need not be rotated, and rotating it would take the weights off their grid. The LM head
is int8, one scale an output, on rows of two int8 levels (:func:`outrider.models.linear_int8.split_rows`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement
from outrider.models.grid import GROUP_WIDTHS
from outrider.models.layers import gated, rms_norm
from outrider.models.linear import FeedForward, Head, Norm, NormProjection, ResidualProjection, Stream
from outrider.models.linear_int8 import quantize_rows, split_rows
from outrider.sampling.draw import argmax_B

__all__ = ["Int4Kernels", "round_groups"]

_LEVELS = 127.0


def round_groups(x_RD: Tensor, group: int) -> Tensor:
    """Rows as int8 levels with one scale for each group of inputs hold them; float32."""
    width = x_RD.shape[-1]
    parts = F.pad(x_RD.float(), (0, -width % group)).reshape(*x_RD.shape[:-1], -1, group)
    levels, peaks = quantize_rows(parts)
    return (levels * (peaks / _LEVELS)).flatten(-2)[..., :width]


def _round_twice(x_RD: Tensor) -> Tensor:
    levels, peaks_R1 = split_rows(x_RD)
    coarse, fine = levels.float().chunk(2)
    return (coarse + fine / (2 * _LEVELS)) * (peaks_R1 / _LEVELS)


def _round_outputs(weight: Tensor) -> Tensor:
    levels, peaks = quantize_rows(weight.float())
    return levels * (peaks / _LEVELS)


class _GroupedMatrix:
    def __init__(self, weight: Tensor, group: int, device: torch.device) -> None:
        self._weight, self._group = weight.float().to(device), group
        self.num_bytes = self._weight.numel() * self._weight.element_size()

    def __call__(self, x_RD: Tensor) -> Tensor:
        return F.linear(round_groups(x_RD, self._group), self._weight)


class Int4Kernels:
    """Parts around matrices whose weights are on a 4-bit grid already."""

    def __init__(self, placement: Placement) -> None:
        self._device = placement.device
        self._outer_dtype = placement.activation_dtype
        self._group = GROUP_WIDTHS[placement.precision]
        # As in float32, whose products these are: a row must not depend on the number of rows.
        self.row_multiple = 16 if placement.device.type == "cpu" else 1

    def _matrix(self, weight: Tensor) -> _GroupedMatrix:
        return _GroupedMatrix(weight, self._group, self._device)

    def _norm(self, norm: Norm) -> Norm:
        return Norm(weight_D=norm.weight_D.float().to(self._device), eps=norm.eps)

    def stream(self, embedding: Tensor) -> Stream:
        return _WideStream(embedding.to(self._device, self._outer_dtype))

    def norm_projection(self, weight: Tensor, norm: Norm) -> NormProjection:
        return _Int4NormProjection(self._matrix(weight), self._norm(norm), self._outer_dtype)

    def residual_projection(self, weight: Tensor) -> ResidualProjection:
        return _Int4ResidualProjection(self._matrix(weight))

    def feed_forward(self, gate_up: Tensor, down: Tensor, norm: Norm) -> FeedForward:
        return _Int4FeedForward(self._matrix(gate_up), self._matrix(down), self._norm(norm))

    def head(self, weight: Tensor, norm: Norm) -> Head:
        return _Int4Head(_round_outputs(weight).to(self._device), self._norm(norm))


class _WideStream:
    """float32 inside; what leaves it is not."""

    def __init__(self, table_VD: Tensor) -> None:
        self._table_VD = table_VD

    def embed(self, tokens_R: Tensor) -> Tensor:
        return F.embedding(tokens_R, self._table_VD).float()

    def tap(self, x_RD: Tensor) -> Tensor:
        return x_RD.to(self._table_VD.dtype)


class _Int4NormProjection:
    def __init__(self, matrix: _GroupedMatrix, norm: Norm, dtype: torch.dtype) -> None:
        self._matrix, self._norm, self._dtype = matrix, norm, dtype
        self.num_bytes = matrix.num_bytes

    def __call__(self, x_RD: Tensor) -> Tensor:
        return self._matrix(rms_norm(x_RD, self._norm.weight_D, self._norm.eps)).to(self._dtype)


class _Int4ResidualProjection:
    def __init__(self, matrix: _GroupedMatrix) -> None:
        self._matrix = matrix
        self.num_bytes = matrix.num_bytes

    def __call__(self, x_RD: Tensor, y: Tensor) -> Tensor:
        return x_RD + self._matrix(y)


class _Int4FeedForward:
    def __init__(self, gate_up: _GroupedMatrix, down: _GroupedMatrix, norm: Norm) -> None:
        self._gate_up, self._down, self._norm = gate_up, down, norm
        self.num_bytes = gate_up.num_bytes + down.num_bytes

    def __call__(self, x_RD: Tensor) -> Tensor:
        normed = rms_norm(x_RD, self._norm.weight_D, self._norm.eps)
        return x_RD + self._down(gated(self._gate_up(normed)))


class _Int4Head:
    def __init__(self, weight: Tensor, norm: Norm) -> None:
        self._weight, self._norm = weight, norm
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x_RD: Tensor) -> Tensor:
        return F.linear(_round_twice(rms_norm(x_RD, self._norm.weight_D, self._norm.eps)), self._weight)

    def argmax(self, x_RD: Tensor) -> Tensor:
        return argmax_B(self(x_RD))
