"""Keys and values in one contiguous slab per length bucket.

A bucket holds every sequence whose cache fits into S positions, one row each, rows compact: the last row moves into a
freed one. So "all running sequences" is a leading slice of the slab, and attention reads it without copying. A sequence
that outgrows its bucket moves to the next one, once per doubling. Slots are stable; rows are not.

Slab layout ``[B, L, 2, G, S, C]``: sequence first, so that a row is one piece of memory and moves in one copy.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.attention import Group, PassAttention, SegmentLike, build_group

__all__ = ["SMALLEST_BUCKET", "DenseCache"]

SMALLEST_BUCKET = 256
"""Positions of the smallest bucket; the others double."""

_ALONE_ROWS = 32
"""A segment with more rows than this (a prefill) is attended to alone, so that nobody is padded to its size."""


class _Bucket:
    """Rows of equal capacity."""

    def __init__(self, shape: tuple[int, int, int], num_positions: int, like: Tensor) -> None:
        self.num_layers, self.num_kv_heads, self.head_width = shape
        self.num_positions = num_positions
        self.slots: list[int] = []
        self.slab = self._allocate(0, like)

    def _allocate(self, num_rows: int, like: Tensor) -> Tensor:
        # Zeros, not garbage: a masked position weighs 0, but 0 * NaN would still be NaN.
        shape = (num_rows, self.num_layers, 2, self.num_kv_heads, self.num_positions, self.head_width)
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def append(self, slot: int) -> int:
        """A row for ``slot``; capacity grows by a quarter when full, so that few rows are idle."""
        row = len(self.slots)
        if row == self.slab.shape[0]:
            self._resize(row + max(1, row // 4))
        self.slots.append(slot)
        return row

    def remove(self, row: int) -> int | None:
        """Take a row out; the slot that moved into it, if any. Memory shrinks when half of it is idle."""
        last = len(self.slots) - 1
        moved = None
        if row != last:
            self.slab[row].copy_(self.slab[last])
            self.slots[row] = moved = self.slots[last]
        self.slots.pop()
        if 2 * last <= self.slab.shape[0]:
            self._resize(last)
        return moved

    def _resize(self, num_rows: int) -> None:
        old = self.slab
        self.slab = self._allocate(num_rows, old)
        used = min(len(self.slots), num_rows)
        self.slab[:used].copy_(old[:used])


class DenseCache:
    """A :class:`outrider.cache.base.Cache` of contiguous rows.

    Args:
        num_layers, num_kv_heads, head_width: L, G, C of the target.
        dtype, device: of keys and values.
    """

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (num_layers, num_kv_heads, head_width)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._buckets: dict[int, _Bucket] = {}
        self._places: dict[int, tuple[_Bucket, int]] = {}
        self._lengths: dict[int, int] = {}
        self._free_slots: list[int] = []

    @torch.inference_mode()
    def allocate(self, num_tokens: int) -> int:
        """A new, empty slot with room for ``num_tokens`` (it grows by itself past that)."""
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._places)
        self._lengths[slot] = 0
        self._place(slot, num_tokens)
        return slot

    @torch.inference_mode()
    def free(self, slot: int) -> None:
        """Give the slot back; its row's memory goes to the next sequence or to the system."""
        self._vacate(slot)
        del self._places[slot], self._lengths[slot]
        heapq.heappush(self._free_slots, slot)

    def length(self, slot: int) -> int:
        """Cached tokens of the slot."""
        return self._lengths[slot]

    @torch.inference_mode()
    def keep(self, slot: int, *, base: int, path: Sequence[int]) -> None:
        """Keep the first ``base`` cached tokens and, of the rows behind them, those in ``path`` (ascending), in order."""
        length = self._lengths[slot]
        assert 0 <= base <= length, (base, length)
        assert all(low < high for low, high in itertools.pairwise(path)), path
        assert not path or (path[0] >= 0 and base + path[-1] < length), (path, base, length)
        stay = next((index for index, row in enumerate(path) if index != row), len(path))
        if stay < len(path):
            bucket, row = self._places[slot]
            sources = torch.tensor([base + index for index in path[stay:]], device=self._like.device)
            moved = bucket.slab[row].index_select(3, sources)
            bucket.slab[row, :, :, :, base + stay : base + len(path)] = moved
        self._lengths[slot] = base + len(path)

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Make ``target`` (an empty slot) hold the first ``num_tokens`` cached tokens of ``source``."""
        assert self._lengths[target] == 0 and num_tokens <= self._lengths[source]
        self._reserve(target, num_tokens)
        from_bucket, from_row = self._places[source]
        to_bucket, to_row = self._places[target]
        to_bucket.slab[to_row, ..., :num_tokens, :] = from_bucket.slab[from_row, ..., :num_tokens, :]
        self._lengths[target] = num_tokens

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of a row with room for ``num_tokens``. Slabs hold idle rows besides, at most as many as there are others."""
        num_layers, num_kv_heads, head_width = self._shape
        return num_layers * 2 * num_kv_heads * _bucket_size(num_tokens) * head_width * self._like.element_size()

    @torch.inference_mode()
    def ensure(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` in all, and for no more than :meth:`bytes_for` counts."""
        self._reserve(slot, num_tokens)

    def num_bytes(self) -> int:
        """Bytes held by all slabs."""
        return sum(bucket.slab.numel() * bucket.slab.element_size() for bucket in self._buckets.values())

    def read(self, slot: int) -> Tensor:
        """What is cached for the slot, ``[L, 2, G, length, C]``: keys, then values. For tests and audits."""
        bucket, row = self._places[slot]
        return bucket.slab[row, ..., : self._lengths[slot], :]

    @torch.inference_mode()
    def begin(self, segments: Sequence[SegmentLike], *, num_groups: int) -> PassAttention:
        """Make room for the rows of one pass and plan its attention.

        Args:
            segments: the pass, in packed order; a slot appears at most once.
            num_groups: query heads per key/value head.
        """
        assert len({segment.slot for segment in segments}) == len(segments), "a slot may come once a pass"
        for segment in segments:
            self._reserve(segment.slot, self._lengths[segment.slot] + segment.num_rows)
        groups = [self._plan(members, num_groups) for members in self._runs(segments)]
        return PassAttention(groups, num_groups=num_groups, num_rows=sum(s.num_rows for s in segments))

    def advance(self, segments: Sequence[SegmentLike]) -> None:
        """The pass is complete: its rows count as cached."""
        for segment in segments:
            self._lengths[segment.slot] += segment.num_rows

    def _runs(self, segments: Sequence[SegmentLike]) -> list[list[SegmentLike]]:
        """Segments that one attention call serves: same bucket, neighbouring rows, alike in size."""
        ordered = sorted(segments, key=lambda s: (self._places[s.slot][0].num_positions, self._places[s.slot][1]))
        runs: list[list[SegmentLike]] = []
        alone: list[list[SegmentLike]] = []
        for segment in ordered:
            if segment.num_rows > _ALONE_ROWS:
                alone.append([segment])
            elif runs and self._is_near(runs[-1], segment):
                runs[-1].append(segment)
            else:
                runs.append([segment])
        return runs + alone

    def _is_near(self, run: list[SegmentLike], segment: SegmentLike) -> bool:
        """True if the idle rows between run and segment are fewer than the run's members."""
        bucket, row = self._places[segment.slot]
        last_bucket, last_row = self._places[run[-1].slot]
        return bucket is last_bucket and row - last_row - 1 <= len(run)

    def _plan(self, members: list[SegmentLike], num_groups: int) -> Group:
        bucket, _ = self._places[members[0].slot]
        rows = [self._places[segment.slot][1] for segment in members]
        lengths = [self._lengths[segment.slot] for segment in members]
        return build_group(bucket.slab, rows, members, lengths=lengths, num_groups=num_groups)

    def _reserve(self, slot: int, num_tokens: int) -> None:
        """Move the slot to a bucket that has room for ``num_tokens``, unless its own has."""
        bucket, row = self._places[slot]
        if num_tokens <= bucket.num_positions:
            return
        length = self._lengths[slot]
        content = bucket.slab[row, ..., :length, :]
        self._place(slot, num_tokens)
        new_bucket, new_row = self._places[slot]
        new_bucket.slab[new_row, ..., :length, :] = content
        self._remove(bucket, row)

    def _place(self, slot: int, num_tokens: int) -> None:
        num_positions = _bucket_size(num_tokens)
        bucket = self._buckets.get(num_positions)
        if bucket is None:
            bucket = self._buckets[num_positions] = _Bucket(self._shape, num_positions, self._like)
        self._places[slot] = (bucket, bucket.append(slot))

    def _vacate(self, slot: int) -> None:
        self._remove(*self._places[slot])

    def _remove(self, bucket: _Bucket, row: int) -> None:
        moved = bucket.remove(row)
        if moved is not None:
            self._places[moved] = (bucket, row)


def _bucket_size(num_tokens: int) -> int:
    """Positions of the smallest bucket that has room for ``num_tokens``."""
    return max(SMALLEST_BUCKET, 1 << (num_tokens - 1).bit_length())
