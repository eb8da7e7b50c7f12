"""Quantised GGUF blocks to float32.

The ``gguf`` library can read every type; the most common ones are written out here as few whole-tensor operations, which
give the same bits about eight times as fast (a model is read on every start). All in numpy: its one thread is not slowed
down by others that are busy, as torch's pool is. Block layouts: llama.cpp's ``ggml-common.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

__all__ = ["Blocks", "dequantise", "four_bit_blocks"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Halves = np.ndarray[Any, np.dtype[np.float16]]


def dequantise(raw: Bytes, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Floats:
    """Values of a stored tensor.

    Args:
        raw: its bytes, flat.
        kind: how they are stored.
        shape: rows first.

    Returns:
        A float32 array of ``shape`` with memory of its own.

    Raises:
        NotImplementedError: a type that the gguf library cannot dequantise.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]
    # A hostile scale may overflow here; the finite check of Checkpoint.tensor names it, numpy need not warn.
    with np.errstate(all="ignore"):
        fast = _FAST.get(kind)
        if fast is not None:
            return fast(raw.reshape(-1, block_bytes)).reshape(shape)
        values = gguf.dequantize(raw.reshape(*shape[:-1], shape[-1] // block * block_bytes), kind)
    return np.array(values, dtype=np.float32, copy=np.may_share_memory(values, raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A 4-bit tensor as it is stored: uint8 levels of ``[out, in]``, float16 scales and minimums of ``[out, in / 32]``."""

    levels: Bytes
    scales: Halves
    minimums: Halves


def four_bit_blocks(raw: Bytes, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Blocks | None:
    """Levels, scales and minimums of a matrix in Q4_1 or Q4_0 (whose minimum is -8 scales); ``None`` for other types."""
    if kind not in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_0) or len(shape) != 2:
        return None
    has_minimum = kind == GGMLQuantizationType.Q4_1
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    start = 4 if has_minimum else 2
    halves = blocks[:, :start].copy().view(np.float16)
    groups = (shape[0], shape[1] // 32)
    with np.errstate(all="ignore"):
        minimums = halves[:, 1] if has_minimum else halves[:, 0] * np.float16(-8)
    packed = blocks[:, start:]
    return Blocks(
        levels=np.concatenate((packed & 15, packed >> 4), axis=1).reshape(shape),
        scales=halves[:, 0].reshape(groups),
        minimums=minimums.reshape(groups),
    )


def _scales(blocks: Bytes, num_scales: int) -> Floats:
    return blocks[:, : 2 * num_scales].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """Low halves of all bytes of a block, then their high halves: ``[blocks, 2 x bytes]``."""
    values = np.empty((packed.shape[0], 2, packed.shape[1]), dtype=np.float32)
    values[:, 0] = packed & 15
    values[:, 1] = packed >> 4
    return values.reshape(packed.shape[0], -1)


def _q4_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _scales(blocks, 1)
    return values


def _q4_1(blocks: Bytes) -> Floats:
    scales, values = _scales(blocks, 2), _nibbles(blocks[:, 4:])
    values *= scales[:, :1]
    values += scales[:, 1:]
    return values


def _q8_0(blocks: Bytes) -> Floats:
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _scales(blocks, 1)
    return values


_FAST: Mapping[GGMLQuantizationType, Callable[[Bytes], Floats]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
