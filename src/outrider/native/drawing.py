"""What a draw needs of a row of logits: what ``top_k`` and ``top_p`` leave of it, and which tokens may be the largest of logits +
Gumbel noise.

The rest of a draw, and the reference of all of it, is :mod:`outrider.sampling.draw` and :mod:`outrider.sampling.warp`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import Structure, c_char_p, c_double, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.native.library import loaded_library, requested_kernels

__all__ = ["MISSING", "OPEN", "CutHead", "cut_heads", "draw_candidates", "draw_from_heads"]

OPEN, MISSING = -1, -2
"""``HEAD_OPEN`` and ``HEAD_MISSING`` of the library."""
_MOST = 32
"""``MOST_DRAWN``."""
_MASK = (1 << 64) - 1

Candidates = list[list[int] | None]
"""Of each row ids among which is the token, ascending, mostly one; ``None`` where the kernel has no answer."""


class CHeadCut(Structure):
    """``HeadCut``."""

    _fields_ = [("count", c_int32), ("is_whole", c_int32), ("top_p", c_double)]


class CutHead(NamedTuple):
    """What is left of some rows.

    Attributes:
        values_BK, ids_BK: one more than asked for of the largest logits, the largest first, of equals the lowest id.
        counts: how many of them are kept; ``OPEN`` where they do not reach ``top_p``, ``MISSING`` where the kernel has no
            answer (a small vocabulary, thousands of equals, values that are no numbers) and the row's values are garbage.
    """

    values_BK: Tensor
    ids_BK: Tensor
    counts: list[int]


def draw_candidates(logits_BV: Tensor, keys: Sequence[int]) -> Candidates | None:
    """Ids of each row among which is the largest of logits + noise.

    Args:
        logits_BV: float32 on the CPU.
        keys: one a row (:func:`outrider.rng.noise_key`).

    Returns:
        ``None`` where the library is not in use.
    """
    lib, kernels = _in_use(logits_BV)
    if lib is None:
        return None
    ids, counts = _room(len(keys))
    lib.outrider_draw(kernels, *_rows(logits_BV), _words(keys), ids, counts)
    return _candidates(ids, counts)


def draw_from_heads(
    logits_BV: Tensor, keys: Sequence[int], size: int, top_ps: Sequence[float], *, is_whole: bool
) -> Candidates | None:
    """The same among what :func:`cut_heads` leaves."""
    lib, kernels = _in_use(logits_BV)
    if lib is None:
        return None
    ids, counts = _room(len(keys))
    lib.outrider_draw_heads(kernels, *_rows(logits_BV), _cuts(size, top_ps, is_whole), _words(keys), ids, counts)
    return _candidates(ids, counts)


def cut_heads(logits_BV: Tensor, size: int, top_ps: Sequence[float], *, is_whole: bool) -> CutHead | None:
    """What ``top_k`` and ``top_p`` leave of each row; it does not depend on the row's companions.

    Args:
        logits_BV: float32 on the CPU.
        size: most tokens that are kept; much fewer than there are (an eighth at most).
        top_ps: mass of each row that is kept, of its largest tokens.
        is_whole: of ``size`` tokens' mass (``top_k`` comes first), else of the row's.

    Returns:
        ``None`` where the library is not in use.
    """
    lib, kernels = _in_use(logits_BV)
    if lib is None:
        return None
    num_rows = len(logits_BV)
    values_BK, ids_BK = torch.empty(num_rows, size + 1), torch.zeros(num_rows, size + 1, dtype=torch.int32)
    counts = (c_int32 * num_rows)()
    cuts = _cuts(size, top_ps, is_whole)
    lib.outrider_cut(kernels, *_rows(logits_BV), cuts, values_BK.data_ptr(), ids_BK.data_ptr(), counts)
    return CutHead(values_BK, ids_BK.long(), list(counts))


def _rows(logits_BV: Tensor) -> tuple[int, int, int, int]:
    return logits_BV.data_ptr(), logits_BV.stride(0), *logits_BV.shape


def _words(keys: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(keys))(*(key & _MASK for key in keys))


def _cuts(size: int, top_ps: Sequence[float], is_whole: bool) -> ctypes.Array[CHeadCut]:
    return (CHeadCut * len(top_ps))(*(CHeadCut(size, is_whole, top_p) for top_p in top_ps))


def _room(num_rows: int) -> tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]:
    return (c_int32 * (_MOST * num_rows))(), (c_int32 * num_rows)()


def _candidates(ids: ctypes.Array[c_int32], counts: ctypes.Array[c_int32]) -> Candidates:
    starts = range(0, len(ids), _MOST)
    return [
        sorted(ids[start : start + count]) if count > 0 else None for start, count in zip(starts, counts, strict=True)
    ]


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
    rows: tuple[Any, ...] = (c_void_p, c_void_p, c_int64, c_int32, c_int32)
    lib.outrider_find.argtypes, lib.outrider_find.restype = [c_char_p], c_void_p
    lib.outrider_draw.argtypes, lib.outrider_draw.restype = [*rows, c_void_p, c_void_p, c_void_p], None
    for function in (lib.outrider_cut, lib.outrider_draw_heads):
        function.argtypes, function.restype = [*rows, c_void_p, c_void_p, c_void_p, c_void_p], None
    address: int | None = lib.outrider_find(name.encode())
    return address
