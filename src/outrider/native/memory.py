"""Large pieces of memory for the native pass, on huge pages where the system grants them.

A pass streams hundreds of megabytes. With pages of 4 KiB the processor translates an address every 4 KiB, which on a virtual
machine costs two walks through tables, and its own prefetching stops at each border.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

__all__ = ["HUGE_PAGE", "zeroed_bytes"]

HUGE_PAGE = 2 * 1024 * 1024


def zeroed_bytes(num_bytes: int) -> Tensor:
    """``[num_bytes]`` zeros, from the border of a huge page on unless they are few; freed with the last view of them.

    The mapping is private: shared ones (Python's default) get no huge pages on most systems.
    """
    if num_bytes < HUGE_PAGE // 2:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    if hasattr(mmap, "MAP_PRIVATE"):
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes]
