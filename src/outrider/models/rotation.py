"""A fixed rotation of the residual stream that spreads outlier channels over all of them.

A trained Llama's stream has a few channels that are a hundred times larger than the rest; int8 levels of a row are then
spent on those. RMS norm (its weight folded into the next matrix) commutes with any rotation, so the stream can be rotated
for free: once, at load, in the embedding and in every matrix that reads or writes the stream (QuaRot, arXiv 2404.00456).

The rotation is signs, then a Hadamard transform over the largest power of two that divides the width, crossed with a
cosine transform over the rest: orthogonal for any width, and applied without ever building the matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["StreamRotation"]


class StreamRotation:
    """An orthogonal map of vectors of one width.

    Attributes:
        power: size of the Hadamard transform.
        scaled_signs_D, cosines: what :meth:`unrotate` multiplies by, in native code too, behind one that is not scaled.
    """

    def __init__(self, width: int) -> None:
        power = width & -width
        self._hadamard = _hadamard(power)
        self._cosine = _cosine(width // power)
        signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(0))
        self._signs_D = signs.to(torch.float32) * 2 - 1
        self.power, self.cosines = power, self._cosine.contiguous()
        self.scaled_signs_D = self._signs_D / math.sqrt(power)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the last dimension; float32."""
        return _transform(x.float() * self._signs_D.to(x.device), self._hadamard, self._cosine)

    def rotate_outputs(self, weight: Tensor) -> Tensor:
        """A matrix ``[D, in]`` whose products come out rotated."""
        return self.rotate(weight.t()).t()

    def unrotate(self, x: Tensor) -> Tensor:
        """Undo :meth:`rotate`; float32."""
        return _transform(x.float(), self._hadamard.t(), self._cosine.t()) * self._signs_D.to(x.device)


def _transform(x: Tensor, hadamard: Tensor, cosine: Tensor) -> Tensor:
    if cosine.shape[0] == 1:  # a width that is a power of two: one product, where the general one goes row by row
        return (x.reshape(-1, hadamard.shape[0]) @ hadamard.to(x.device)).reshape(x.shape)
    split = x.reshape(-1, hadamard.shape[0], cosine.shape[0]) @ cosine.to(x.device)
    return (hadamard.t().to(x.device) @ split).reshape(x.shape)


def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix, scaled to be orthogonal."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _cosine(size: int) -> Tensor:
    """The orthogonal discrete cosine transform (type II)."""
    frequency = torch.arange(size, dtype=torch.float64).unsqueeze(1)
    place = torch.arange(size, dtype=torch.float64) + 0.5
    matrix = torch.cos(math.pi * place * frequency / size) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()
