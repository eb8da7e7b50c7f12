"""Which tokens may be the largest of logits + Gumbel noise: a handful, found without the noise of all the others.

The rest of a draw, and the reference of all of it, is :mod:`outrider.sampling.draw`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outrider.native.library import loaded_library, requested_kernels

__all__ = ["draw_candidates"]

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
    lib = loaded_library() if logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32 else None
    kernels = None if lib is None else _kernels(requested_kernels())
    if lib is None or not kernels or logits_BV.stride(1) != 1:
        return None
    num_rows, vocab_size = logits_BV.shape
    words = (ctypes.c_uint64 * num_rows)(*(key & _MASK for key in keys))
    ids, counts = (c_int32 * (_MOST * num_rows))(), (c_int32 * num_rows)()
    lib.outrider_draw(kernels, logits_BV.data_ptr(), logits_BV.stride(0), num_rows, vocab_size, words, ids, counts)
    starts = range(0, _MOST * num_rows, _MOST)
    return [
        sorted(ids[start : start + count]) if count > 0 else None for start, count in zip(starts, counts, strict=True)
    ]


@functools.lru_cache(maxsize=8)
def _kernels(name: str) -> int | None:
    """Address of an instruction set's kernels; ``None`` if they are forbidden or cannot run here."""
    lib = loaded_library()
    if lib is None:
        return None
    lib.outrider_find.argtypes, lib.outrider_find.restype = [c_char_p], c_void_p
    lib.outrider_draw.argtypes = [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_void_p]
    lib.outrider_draw.restype = None
    address: int | None = lib.outrider_find(name.encode())
    return address
