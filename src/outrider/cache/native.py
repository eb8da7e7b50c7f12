"""Keys and values in the layout of the native kernels: one piece of memory a sequence.

``[layer][kv head][keys, values]``, each side in tiles of 1 KiB that are read as weights of a product:

- keys ``[S / 16][tiles of 16 dimension pairs][16 pairs][16 positions][2]``; pair p is dimensions p and p + C / 2,
- values ``[S / 32][tiles of 16 dimensions][16 position pairs][16 dimensions][2]``.

Memory starts as zeros: what no row may see still has to be a finite number.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.native.library import library
from outrider.native.memory import zeroed_bytes

__all__ = ["NativeCache"]

_CHUNK = 128
_SMALLEST = 256


class NativeCache:
    """A :class:`outrider.cache.base.Cache` in the native layout.

    Args:
        num_layers, num_kv_heads, head_width: L, G, C of the target.
    """

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_width: int) -> None:
        self._num_sides = num_layers * num_kv_heads
        self._shape = (num_layers, num_kv_heads, head_width)
        self._half_blocks = -(-head_width // 32)
        self._memory: dict[int, Tensor] = {}
        self._addresses: dict[int, tuple[int, int]] = {}
        self._lengths: dict[int, int] = {}
        self._free_slots: list[int] = []

    def allocate(self, num_tokens: int) -> int:
        """A new, empty slot with room for ``num_tokens`` (it grows by itself past that)."""
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._memory)
        self._hold(slot, max(num_tokens, 1))
        self._lengths[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        """Give the slot back, and its memory to the system."""
        del self._memory[slot], self._addresses[slot], self._lengths[slot]
        heapq.heappush(self._free_slots, slot)

    def length(self, slot: int) -> int:
        """Cached tokens of the slot."""
        return self._lengths[slot]

    def keep(self, slot: int, *, base: int, path: Sequence[int]) -> None:
        """Keep the first ``base`` cached tokens and, of the rows behind them, those in ``path`` (ascending), in order."""
        length = self._lengths[slot]
        assert 0 <= base <= length, (base, length)
        assert not path or (path[0] >= 0 and base + path[-1] < length), (path, base, length)
        if tuple(path) != tuple(range(len(path))):
            assert all(low < high for low, high in itertools.pairwise(path)), path
            rows = torch.tensor(path, dtype=torch.int32)
            address, capacity = self.address(slot)
            library().outrider_keep(
                address, capacity, self._num_sides, self._half_blocks, base, rows.data_ptr(), len(path)
            )
        self._lengths[slot] = base + len(path)

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Make ``target`` (an empty slot) hold the first ``num_tokens`` cached tokens of ``source``."""
        assert self._lengths[target] == 0 and num_tokens <= self._lengths[source]
        self.reserve(target, num_tokens)
        self._copy(self._memory[source], self._memory[target], num_tokens)
        self._lengths[target] = num_tokens

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens``; the slot's memory moves when it must grow, at least doubling."""
        _, capacity = self._addresses[slot]
        if num_tokens > capacity:
            self.ensure(slot, max(num_tokens, 2 * capacity))

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a slot with room for ``num_tokens`` takes."""
        return self._num_sides * 2 * self._capacity(num_tokens) * 32 * self._half_blocks * torch.bfloat16.itemsize

    def ensure(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` in all, and for no more than :meth:`bytes_for` counts."""
        if num_tokens > self._addresses[slot][1]:
            memory = self._memory[slot]
            self._copy(memory, self._hold(slot, num_tokens), self._lengths[slot])

    def address(self, slot: int) -> tuple[int, int]:
        """Where the slot's memory is, and for how many positions."""
        return self._addresses[slot]

    def advance(self, slot: int, num_tokens: int) -> None:
        """A pass has written so many rows behind the cached ones."""
        self._lengths[slot] += num_tokens

    def num_bytes(self) -> int:
        """Bytes held by all slots."""
        return sum(memory.numel() * memory.element_size() for memory in self._memory.values())

    def read(self, slot: int) -> Tensor:
        """What is cached for the slot, ``[L, 2, G, length, C]``: keys, then values. For tests and audits."""
        (num_layers, num_groups, head_width), tiles = self._shape, self._half_blocks
        sides = self._memory[slot].view(num_layers, num_groups, 2, -1)
        keys = sides[:, :, 0].view(num_layers, num_groups, -1, tiles, 16, 16, 2)
        keys = keys.permute(0, 1, 2, 5, 6, 3, 4).reshape(num_layers, num_groups, -1, 2, tiles * 16)
        keys = keys[..., : head_width // 2].flatten(3)
        values = sides[:, :, 1].view(num_layers, num_groups, -1, 2 * tiles, 16, 16, 2)
        values = values.permute(0, 1, 2, 4, 6, 3, 5).reshape(num_layers, num_groups, -1, 32 * tiles)
        both = torch.stack((keys, values[..., :head_width]), dim=1)
        return both[:, :, :, : self._lengths[slot]]

    def _hold(self, slot: int, num_tokens: int) -> Tensor:
        """Give the slot new memory; a pass asks for every slot's address, and asking a tensor takes its time."""
        self._memory[slot] = memory = self._new_memory(num_tokens)
        self._addresses[slot] = memory.data_ptr(), memory.shape[1] * 16
        return memory

    def _new_memory(self, num_tokens: int) -> Tensor:
        """``[sides x keys and values, S / 16, 16 x width]``, zeros."""
        shape = (self._num_sides * 2, self._capacity(num_tokens) // 16, 16 * 32 * self._half_blocks)
        return zeroed_bytes(math.prod(shape) * torch.bfloat16.itemsize).view(torch.bfloat16).view(shape)

    @staticmethod
    def _capacity(num_tokens: int) -> int:
        return max(_SMALLEST, -(-num_tokens // _CHUNK) * _CHUNK)

    @staticmethod
    def _copy(source: Tensor, target: Tensor, num_tokens: int) -> None:
        # Blocks of 32 positions are whole in either layout. What lies behind the last token is never seen.
        blocks = -(-num_tokens // 32) * 2
        target[:, :blocks] = source[:, :blocks]
