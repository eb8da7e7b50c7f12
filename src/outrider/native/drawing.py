"""What a draw needs of a row of logits: the largest, and which tokens may be the largest of logits + Gumbel noise.

The rest of a draw, and the reference of all of it, is :mod:`outrider.sampling.draw` and :mod:`outrider.sampling.warp`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.native.library import loaded_library, requested_kernels

__all__ = ["Largest", "draw_candidates", "largest_logits"]

_MOST = 32
"""``MOST_DRAWN`` of the library."""
_MASK = (1 << 64) - 1


def draw_candidates(logits_BV: Tensor, keys: Sequence[int]) -> list[list[int] | None] | None:
    """Ids of each row among which is the largest of logits + noise, ascending; mostly there is one.

    Args:
        logits_BV: float32 on the CPU.
        keys: one a row (:func:`outrider.rng.noise_key`).

    Returns:
        ``None`` in the place of a row with too many, and altogether where the library is not in use.
    """
    lib, kernels = _in_use(logits_BV)
    if lib is None:
        return None
    num_rows, vocab_size = logits_BV.shape
    words = (ctypes.c_uint64 * num_rows)(*(key & _MASK for key in keys))
    ids, counts = (c_int32 * (_MOST * num_rows))(), (c_int32 * num_rows)()
    lib.outrider_draw(kernels, logits_BV.data_ptr(), logits_BV.stride(0), num_rows, vocab_size, words, ids, counts)
    starts = range(0, _MOST * num_rows, _MOST)
    return [
        sorted(ids[start : start + count]) if count > 0 else None for start, count in zip(starts, counts, strict=True)
    ]


class Largest(NamedTuple):
    """The largest logits of some rows.

    Attributes:
        values_BK, ids_BK: the largest first, of equals the lowest id; garbage in rows of ``missing``.
        log_sums_B: logarithm of the sum of the whole row's exponentials, float64.
        missing: rows that are beyond the kernel: thousands of equals, or values that are no numbers.
    """

    values_BK: Tensor
    ids_BK: Tensor
    log_sums_B: Tensor
    missing: list[int]


def largest_logits(logits_BV: Tensor, count: int) -> Largest | None:
    """The ``count`` largest of each row; what a row gives does not depend on its companions.

    Args:
        logits_BV: float32 on the CPU.
        count: how many; much fewer than there are (an eighth at most).

    Returns:
        ``None`` where the library is not in use.
    """
    lib, kernels = _in_use(logits_BV)
    if lib is None:
        return None
    num_rows, vocab_size = logits_BV.shape
    values_BK, ids_BK = torch.empty(num_rows, count), torch.zeros(num_rows, count, dtype=torch.int32)
    sums_B = torch.empty(num_rows, dtype=torch.float64)
    places = (values_BK.data_ptr(), ids_BK.data_ptr(), sums_B.data_ptr())
    lib.outrider_largest(kernels, logits_BV.data_ptr(), logits_BV.stride(0), num_rows, vocab_size, count, *places)
    missing = [row for row, value in enumerate(sums_B.tolist()) if math.isnan(value)]
    return Largest(values_BK, ids_BK.long(), sums_B, missing)


def _in_use(logits_BV: Tensor) -> tuple[ctypes.CDLL, int] | tuple[None, None]:
    """The library and its kernels, if they can take such rows."""
    if logits_BV.device.type != "cpu" or logits_BV.dtype != torch.float32 or logits_BV.stride(1) != 1:
        return None, None
    lib = loaded_library()
    kernels = None if lib is None else _kernels(requested_kernels())
    return (lib, kernels) if lib is not None and kernels else (None, None)


@functools.lru_cache(maxsize=8)
def _kernels(name: str) -> int | None:
    """Address of an instruction set's kernels; ``None`` if they are forbidden or cannot run here."""
    lib = loaded_library()
    if lib is None:
        return None
    lib.outrider_find.argtypes, lib.outrider_find.restype = [c_char_p], c_void_p
    lib.outrider_draw.argtypes = [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p]
    lib.outrider_draw.restype = None
    lib.outrider_largest.argtypes = [
        c_void_p,
        c_void_p,
        c_int64,
        c_int32,
        c_int32,
        c_int32,
        c_void_p,
        c_void_p,
        c_void_p,
    ]
    lib.outrider_largest.restype = None
    address: int | None = lib.outrider_find(name.encode())
    return address
