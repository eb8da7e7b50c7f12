"""Weights in the order in which the native kernels read them.

A matrix ``[out, in]`` becomes ``[block of 32 outputs][step][2 tiles][16 words][16 outputs][4 bytes]``; a word is two
bfloat16 or four int8 neighbours along the inputs, a step 16 words. Inputs and outputs are padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.native.memory import zeroed_bytes

__all__ = [
    "BLOCK",
    "Arena",
    "head_rows",
    "int4_tile_bytes",
    "pack",
    "pack_int4",
    "padded",
    "quantise",
    "take_rows",
    "unpack",
]

BLOCK = 32
"""Outputs of a block."""

_LANES = 16
_PART = 32


def padded(size: int, multiple: int = 64) -> int:
    """``size`` rounded up to a multiple (64: what every inner dimension is padded to)."""
    return -(-size // multiple) * multiple


def pack(weight: Tensor) -> Tensor:
    """Pack ``[out, in]`` bfloat16 or int8, both already padded (to 32 and 64)."""
    word = 4 // weight.element_size()
    num_out, num_in = weight.shape
    assert num_out % BLOCK == 0 and num_in % (_LANES * word) == 0, weight.shape
    split = weight.view(num_out // BLOCK, 2, _LANES, num_in // (_LANES * word), _LANES, word)
    return split.permute(0, 3, 1, 4, 2, 5).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """The matrix that was packed, padding included."""
    blocks, steps, _, _, _, word = packed.shape
    return packed.permute(0, 2, 4, 1, 3, 5).reshape(blocks * BLOCK, steps * _LANES * word)


def int4_tile_bytes(num_in: int, group: int) -> int:
    """Bytes of 16 outputs in 4 bits: scales, padded to 64, then levels; ``num_in`` is padded to 64."""
    return _scale_bytes(num_in, group) + num_in * _LANES // 2


def _scale_bytes(num_in: int, group: int) -> int:
    return padded(-(-num_in // group) * _LANES * (4 if group == _PART else 2))


def pack_int4(levels: Tensor, scales: Tensor, minimums: Tensor | None) -> Tensor:
    """Pack 4-bit levels ``[out, in]`` (padded to 32 and 64) and their float16 scales ``[out, groups]``.

    Returns:
        uint8 ``[blocks, bytes]`` as ``product_int4.h`` describes it. ``minimums`` go with groups of 32 inputs, ``None``
        with groups of 128.
    """
    (num_out, num_in), num_groups = levels.shape, scales.shape[1]
    assert num_out % BLOCK == 0 and num_in % 64 == 0, levels.shape
    words = levels.view(num_out // BLOCK, 2, _LANES, num_in // _PART, 2, 4, 4).permute(4, 0, 1, 3, 5, 2, 6)
    packed = (words[0] | words[1] << 4).reshape(num_out // BLOCK, 2, -1)
    parts = (scales,) if minimums is None else (scales, minimums)
    by_group = (
        torch.stack(parts, dim=2).view(num_out // BLOCK, 2, _LANES, num_groups, len(parts)).permute(0, 1, 3, 4, 2)
    )
    halves = by_group.contiguous().view(torch.uint8).reshape(num_out // BLOCK, 2, -1)
    halves = F.pad(halves, (0, -halves.shape[2] % 64))
    return torch.cat((halves, packed), dim=2).flatten(1)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 levels and one float32 scale per output; an output of zeros has scale 0."""
    weight = weight.float()
    largest = weight.abs().amax(dim=1)
    scale = largest.clamp(min=1e-12) / 127
    levels = (weight / scale.unsqueeze(1)).round_().to(torch.int8)
    return levels, torch.where(largest > 0, scale, 0.0)


def take_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """Rows by index; index -1 is a row of zeros."""
    return F.pad(weight, (0, 0, 0, 1)).index_select(0, torch.where(rows < 0, weight.shape[0], rows))


def head_rows(head_width: int, *, paired: bool) -> Tensor:
    """Dimension of a head that each output of its blocks holds, -1 for padding.

    Args:
        head_width: C.
        paired: a block holds 16 dimensions and their rotary partners (queries, keys), else 32 neighbours (values).
    """
    half = head_width // 2
    num_blocks = -(-half // _LANES)
    if not paired:
        rows = torch.arange(num_blocks * BLOCK)
        return torch.where(rows < head_width, rows, -1)
    low = torch.arange(num_blocks * _LANES)
    pairs = torch.stack((low, low + half))
    return torch.where(low < half, pairs, -1).view(2, num_blocks, _LANES).transpose(0, 1).flatten()


class Arena:
    """One piece of memory for all weights, which lie in the order in which a pass streams them."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = zeroed_bytes(padded(num_bytes))
        self._used = 0
        self._end = padded(num_bytes)

    def reserve(self, shape: Sequence[int], dtype: torch.dtype, *, is_last: bool = False) -> Tensor:
        """A tensor in the arena, 64-byte aligned, not filled yet; ``is_last``: behind all others, whenever it is asked for."""
        size = math.prod(shape) * dtype.itemsize
        assert self._used + padded(size) <= self._end, "the arena was made too small"
        if is_last:
            self._end -= padded(size)
            start = self._end
        else:
            start = self._used
            self._used += padded(size)
        return self._bytes[start : start + size].view(dtype).view(*shape)
