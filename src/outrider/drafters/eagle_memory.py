"""Keys and values of a head's entries, for many sequences, and attention over them.

One slab ``[L, 2, B, G, S, C]``: layers, keys and values, sequences, groups, positions. A sequence's entries made from target
taps stand at the front of its row; entries of draft tokens are written behind them and are never counted, so the next
entries simply overwrite them: nothing that the head made of its own outputs outlives a proposal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.eagle_config import EagleConfig

__all__ = ["HeadMemory", "attend_padded"]

_SMALLEST = 128


class HeadMemory:
    """The slab. Rows are handed out lowest first, so that running sequences mostly are one slice of it."""

    def __init__(self, config: EagleConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (config.num_layers, config.num_kv_heads, config.head_width)
        self._free: list[int] = []
        self._num_rows = 0
        self.slab = self._allocate(0, _SMALLEST, torch.empty(0, dtype=dtype, device=device))

    def take_row(self) -> int:
        """A row for a new sequence."""
        if self._free:
            return heapq.heappop(self._free)
        row = self._num_rows
        self._num_rows += 1
        if row >= self.slab.shape[2]:
            self._resize(max(1, 2 * row), self.slab.shape[4])
        return row

    def give_row(self, row: int) -> None:
        """The sequence ended. With the last one all memory is given back."""
        heapq.heappush(self._free, row)
        if len(self._free) == self._num_rows:
            self._free, self._num_rows = [], 0
            self.slab = self._allocate(0, _SMALLEST, self.slab)

    def reserve(self, num_positions: int) -> None:
        """Make room for that many entries in every row."""
        if num_positions > self.slab.shape[4]:
            self._resize(self.slab.shape[2], 1 << (num_positions - 1).bit_length())

    def row_bytes(self, num_positions: int) -> int:
        """Most bytes that a row takes with that many positions: both lengths of the slab grow by doubling."""
        layers, groups, width = self._shape
        positions = max(_SMALLEST, 1 << (num_positions - 1).bit_length())
        return 2 * layers * 2 * groups * positions * width * self.slab.element_size()

    def keep_last(self, row: int, count: int, num_kept: int) -> None:
        """Move the last ``num_kept`` of a row's ``count`` entries to its front."""
        self.slab[:, :, row, :, :num_kept] = self.slab[:, :, row, :, count - num_kept : count].clone()

    def rows(self, rows: Sequence[int], num_positions: int) -> Tensor:
        """The first positions of these rows: a view where they are neighbours in order, else a copy."""
        first = rows[0]
        if list(rows) == list(range(first, first + len(rows))):
            return self.slab[:, :, first : first + len(rows), :, :num_positions]
        return self.slab[:, :, list(rows), :, :num_positions]

    def _allocate(self, num_rows: int, num_positions: int, like: Tensor) -> Tensor:
        # Zeros, not garbage: a masked position weighs 0, but 0 * NaN would still be NaN.
        layers, groups, width = self._shape
        shape = (layers, 2, num_rows, groups, num_positions, width)
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _resize(self, num_rows: int, num_positions: int) -> None:
        old = self.slab
        self.slab = self._allocate(num_rows, num_positions, old)
        self.slab[:, :, : old.shape[2], :, : old.shape[4]] = old


def attend_padded(queries: Tensor, keys: Tensor, values: Tensor, seen_BTS: Tensor) -> Tensor:
    """Attention of every sequence's queries over its own row.

    Args:
        queries: ``[B, T, H, C]``, head h belongs to key/value group h // (H / G).
        keys, values: ``[B, G, S, C]``.
        seen_BTS: which positions each query sees; at least one.

    Returns:
        ``[B, T, H * C]``.
    """
    batch, size, num_heads, width = queries.shape
    groups = keys.shape[1]
    members = num_heads // groups
    # Members of a group share their keys: as rows of one product, so that keys need not be repeated.
    q = queries.view(batch, size, groups, members, width).permute(0, 2, 3, 1, 4).reshape(batch, groups, -1, width)
    mask = seen_BTS.repeat(1, members, 1).unsqueeze(1)
    found = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return found.view(batch, groups, members, size, width).permute(0, 3, 1, 2, 4).reshape(batch, size, -1)
