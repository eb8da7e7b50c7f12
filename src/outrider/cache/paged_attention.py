"""Fused attention over pages, with inputs of fixed shape and place, so that a whole pass can be recorded and replayed.

All rows of a pass are one batch of queries, the whole pool is one row of keys; a mask says which keys a row sees. Pages that
no row of a block of queries sees are never read (:mod:`torch.nn.attention.flex_attention`'s block mask), so the cost is that
of what is seen.

The key at place i of page k belongs, for a row of sequence s, to position ``table[s, k] * PAGE + i`` of s, if s holds that
page at all. It is seen if it was cached before the pass, or if it is the row itself or one of its ancestors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.cache.attention import SegmentLike, ancestors
from outrider.device import compiled, to_device

__all__ = ["PagedAttention", "PagedInputs", "PagedPass", "PassShape"]

_MOST_QUERIES = 128
"""Rows of a block of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPass:
    """Where the rows of a pass and their keys lie, on the host and in their exact sizes.

    Attributes:
        segments: the pass, in packed order. lengths: tokens cached before it, by segment.
        tables: pages of each segment's slot, in the order of its positions.
        num_pages, page_size: of the pool.
    """

    segments: tuple[SegmentLike, ...]
    lengths: Sequence[int]
    tables: Sequence[Sequence[int]]
    num_pages: int
    page_size: int

    @property
    def num_rows(self) -> int:
        """Packed rows."""
        return sum(segment.num_rows for segment in self.segments)

    @property
    def shape(self) -> PassShape:
        """The smallest shape that this pass fits into."""
        return PassShape(
            rows=_bucket(self.num_rows, 8),
            sequences=_bucket(len(self.segments) + 1, 2),
            width=_bucket(max(segment.num_rows for segment in self.segments), 1),
            pages=self.num_pages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """Sizes that passes are padded to: powers of two, so that few of them occur.

    Attributes:
        rows: packed rows. sequences: one more than the segments at least; the last is nobody's. width: rows of a segment.
        pages: of the pool.
    """

    rows: int
    sequences: int
    width: int
    pages: int


def _bucket(size: int, least: int) -> int:
    while least < size:
        least *= 2
    return least


class PagedInputs:
    """What attention of one shape reads, on the device; :meth:`load` puts another pass into the same memory."""

    def __init__(self, shape: PassShape, *, page_size: int, device: torch.device) -> None:
        self.shape = shape
        self._page_size = page_size
        self._block = min(shape.rows, _MOST_QUERIES)
        num_blocks = -(-shape.rows // self._block)

        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.places_R = zeros(shape.rows, dtype=torch.int64)
        self.sequences_R = zeros(shape.rows)
        self.seen_RT = zeros(shape.rows, shape.width, dtype=torch.bool)
        self.lengths_B = zeros(shape.sequences)
        self.table_BP = zeros(shape.sequences, shape.pages)
        self.num_blocks_Q = zeros(1, 1, num_blocks)
        self.blocks_QP = zeros(1, 1, num_blocks, shape.pages)

    def load(self, rows: PagedPass) -> None:
        """Put a pass in; nothing waits for the device."""
        shape, device = self.shape, self.places_R.device
        places = np.zeros(shape.rows, dtype=np.int64)
        sequences = np.full(shape.rows, shape.sequences - 1, dtype=np.int32)
        seen = np.zeros((shape.rows, shape.width), dtype=bool)
        lengths = np.zeros(shape.sequences, dtype=np.int32)
        table = np.full((shape.sequences, shape.pages), -1, dtype=np.int32)
        for index, segment in enumerate(rows.segments):
            own = slice(segment.start, segment.start + segment.num_rows)
            length, pages = rows.lengths[index], np.asarray(rows.tables[index], dtype=np.int64)
            positions = np.arange(length, length + segment.num_rows)
            places[own] = pages[positions // self._page_size] * self._page_size + positions % self._page_size
            sequences[own] = index
            seen[own, : segment.num_rows] = _seen(segment)
            lengths[index] = length
            table[index, pages] = np.arange(len(pages))
        # Padding rows see the first key of the page that belongs to nobody: no softmax is empty.
        lengths[-1], table[-1, 0] = 1, 0
        counts, blocks = self._blocks(sequences, table)
        for buffer, values in (
            (self.places_R, places),
            (self.sequences_R, sequences),
            (self.seen_RT, seen),
            (self.lengths_B, lengths),
            (self.table_BP, table),
            (self.num_blocks_Q, counts),
            (self.blocks_QP, blocks),
        ):
            buffer.copy_(to_device(values, buffer.dtype, device).view(buffer.shape), non_blocking=True)

    def _blocks(self, sequences: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many pages each block of queries sees, and which."""
        num_blocks = self.num_blocks_Q.shape[-1]
        counts = np.zeros(num_blocks, dtype=np.int32)
        blocks = np.zeros((num_blocks, self.shape.pages), dtype=np.int32)
        for block in range(num_blocks):
            members = np.unique(sequences[block * self._block : (block + 1) * self._block])
            pages = np.flatnonzero((table[members] >= 0).any(axis=0))
            counts[block] = len(pages)
            blocks[block, : len(pages)] = pages
        return counts, blocks

    def block_mask(self) -> Any:
        """The mask, reading these buffers whenever it is applied."""
        from torch.nn.attention.flex_attention import BlockMask

        page_size, width = self._page_size, self.shape.width

        def is_seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            sequence = self.sequences_R[row]
            page = self.table_BP[sequence, key // page_size]
            ahead = page * page_size + key % page_size - self.lengths_B[sequence]
            in_pass = self.seen_RT[row, ahead.clamp(0, width - 1)] & (ahead < width)
            return (page >= 0) & ((ahead < 0) | in_pass)

        return BlockMask.from_kv_blocks(
            self.num_blocks_Q,
            self.blocks_QP,
            BLOCK_SIZE=(self._block, page_size),
            mask_mod=is_seen,
            seq_lengths=(self.shape.rows, self.shape.pages * page_size),
            compute_q_blocks=False,
        )


def _seen(segment: SegmentLike) -> np.ndarray:
    if segment.parents is None:
        return np.tri(segment.num_rows, dtype=bool)
    return ancestors(segment.parents)


class PagedAttention:
    """Attention of one pass; see :class:`outrider.cache.attention.PassAttention` for the order of heads.

    Args:
        pool: the cache's pages.
        inputs: where the pass lies.
        num_groups: query heads per key/value head.
    """

    def __init__(self, pool: Tensor, inputs: PagedInputs, *, num_groups: int) -> None:
        self._layers = pool.unbind(0)
        self._inputs = inputs
        self._num_groups = num_groups
        self._mask = inputs.block_mask()
        self._attend = _flex_attention(pool.device.type)

    def attend(self, layer: int, qkv_RNGC: Tensor) -> Tensor:
        """Cache this layer's keys and values and attend to everything each row may see; ``[R, N * G * C]``."""
        num_rows, _, groups, width = qkv_RNGC.shape
        N, pages = self._num_groups, self._layers[layer]
        # [R, 2, G, C] -> [2, G, R, C]
        pages.index_copy_(2, self._inputs.places_R, qkv_RNGC[:, N:].permute(1, 2, 0, 3))
        queries = qkv_RNGC[:, :N].permute(2, 1, 0, 3).reshape(1, groups * N, num_rows, width)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            out = self._attend(queries, pages[0:1], pages[1:2], block_mask=self._mask, enable_gqa=True)
        return out.view(groups, N, num_rows, width).permute(2, 1, 0, 3).reshape(num_rows, -1)


@functools.lru_cache(maxsize=2)
def _flex_attention(device_type: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(flex_attention, device_type)
