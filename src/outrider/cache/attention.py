"""Attention of one pass over dense slabs: planned once, used by every layer.

Heads are ordered group-last, ``[R, N, G, C]``: the N = H/G query heads that share a key/value head, then its key, then its
value. So one tensor holds everything a row brings, keys and values are written by one copy, and queries that share keys
become extra query rows of one attention call: keys and values are never expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Group", "PassAttention", "SegmentLike", "ancestors", "build_group"]

_KEY_MULTIPLE = 64
"""Batched attention reads keys up to a multiple of this, so that its arithmetic seldom changes shape."""


class SegmentLike(Protocol):
    """The rows one sequence brings to a pass (:class:`outrider.models.base.Segment`)."""

    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def parents(self) -> tuple[int, ...] | None: ...


class Group(Protocol):
    """Segments that one attention call per layer serves."""

    def attend(self, layer: int, qkv_RNGC: Tensor) -> Tensor:
        """Write the group's keys and values, then attend; ``[rows of the group, N * G * C]``."""
        ...

    def packed_rows(self) -> list[int]:
        """Which packed rows the result's rows are."""
        ...


class PassAttention:
    """All groups of a pass."""

    def __init__(self, groups: Sequence[Group], *, num_groups: int, num_rows: int) -> None:
        self._groups = groups
        self._num_groups = num_groups
        self._order_R: Tensor | None = None
        order = [row for group in groups for row in group.packed_rows()]
        assert len(order) == num_rows, "segments must cover the packed rows exactly"
        if order != list(range(num_rows)):
            self._order_R = torch.tensor(order).argsort()

    def attend(self, layer: int, qkv_RNGC: Tensor) -> Tensor:
        """Cache this layer's keys and values and attend to everything each row may see; ``[R, N * G * C]``.

        To be called inside ``torch.inference_mode``, for every layer once.
        """
        outputs = [group.attend(layer, qkv_RNGC) for group in self._groups]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self._order_R is None:
            return joined
        self._order_R = self._order_R.to(joined.device)
        return joined.index_select(0, self._order_R)


def build_group(
    slab: Tensor, rows: Sequence[int], segments: Sequence[SegmentLike], *, lengths: Sequence[int], num_groups: int
) -> Group:
    """Plan one attention call per layer for ``segments``, which live in ascending ``rows`` of ``slab``."""
    if len(segments) == 1:
        return _Single(slab, rows[0], segments[0], length=lengths[0], num_groups=num_groups)
    return _Batch(slab, rows, segments, lengths=lengths, num_groups=num_groups)


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """Which rows each row of a tree sees, itself included: bool ``[T, T]``."""
    seen = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen


def _additive(visible: Tensor, like: Tensor) -> Tensor:
    """0 where visible, -inf elsewhere, in the dtype of the keys."""
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(
        visible.logical_not().to(like.device), float("-inf")
    )


class _Single:
    """One sequence. Plain decoding of one stream takes the shortest way: no mask, no gather."""

    def __init__(self, slab: Tensor, row: int, segment: SegmentLike, *, length: int, num_groups: int) -> None:
        self._first, self._num_rows, self._num_groups = segment.start, segment.num_rows, num_groups
        self._is_causal = length == 0 and segment.parents is None and segment.num_rows > 1
        num_keys = length + segment.num_rows
        own = slab[row : row + 1]
        self._keys = own[:, :, 0, :, :num_keys].unbind(1)
        self._values = own[:, :, 1, :, :num_keys].unbind(1)
        self._targets = own[0, :, :, :, length:num_keys].unbind(0)
        self._mask = None if self._is_causal or segment.num_rows == 1 else self._build_mask(segment, length, slab)

    @staticmethod
    def _build_mask(segment: SegmentLike, length: int, like: Tensor) -> Tensor:
        num_rows = segment.num_rows
        visible = torch.ones(num_rows, length + num_rows, dtype=torch.bool)
        if segment.parents is None:
            visible = visible.tril_(length)
        else:
            visible[:, length:] = torch.from_numpy(ancestors(segment.parents))
        return _additive(visible, like)

    def packed_rows(self) -> list[int]:
        return list(range(self._first, self._first + self._num_rows))

    def attend(self, layer: int, qkv_RNGC: Tensor) -> Tensor:
        own = qkv_RNGC[self._first : self._first + self._num_rows]
        # [T, 2, G, C] -> [2, G, T, C]
        self._targets[layer].copy_(own[:, self._num_groups :].permute(1, 2, 0, 3))
        keys, values = self._keys[layer], self._values[layer]
        if self._num_rows == 1:
            queries = own[:, : self._num_groups].transpose(1, 2)
            out = F.scaled_dot_product_attention(queries, keys, values)
            return out.transpose(1, 2).reshape(1, -1)
        # The query heads of a group ride in the batch dimension, where keys and values repeat without a copy.
        queries = own[:, : self._num_groups].permute(1, 2, 0, 3)
        shape = (self._num_groups, -1, -1, -1)
        out = F.scaled_dot_product_attention(
            queries, keys.expand(shape), values.expand(shape), attn_mask=self._mask, is_causal=self._is_causal
        )
        return out.permute(2, 0, 1, 3).reshape(self._num_rows, -1)


class _Batch:
    """Neighbouring rows of one slab, each with its own length and its own number of new rows, padded to the longest.

    Idle slab rows in between are computed and thrown away.
    """

    def __init__(
        self,
        slab: Tensor,
        rows: Sequence[int],
        segments: Sequence[SegmentLike],
        *,
        lengths: Sequence[int],
        num_groups: int,
    ) -> None:
        device = slab.device
        low, high = rows[0], rows[-1] + 1
        self._num_groups, self._span = num_groups, high - low
        self._padded_rows = max(segment.num_rows for segment in segments)
        self._index_rows(segments, [row - low for row in rows], device)
        num_keys = max(length + segment.num_rows for length, segment in zip(lengths, segments, strict=True))
        num_keys = min(slab.shape[4], -(-num_keys // _KEY_MULTIPLE) * _KEY_MULTIPLE)
        self._keys = slab[low:high, :, 0, :, :num_keys].unbind(1)
        self._values = slab[low:high, :, 1, :, :num_keys].unbind(1)
        self._targets = slab.permute(1, 0, 4, 2, 3, 5).unbind(0)
        self._target_index = self._index_targets(segments, rows, lengths, device)
        self._mask = self._build_mask(segments, [row - low for row in rows], lengths, slab, num_keys)

    def _index_rows(self, segments: Sequence[SegmentLike], places: Sequence[int], device: torch.device) -> None:
        """Packed row <-> (slab row, row of the segment); no index where the order is the same."""
        self._packed = [row for s in segments for row in range(s.start, s.start + s.num_rows)]
        padded = [p * self._padded_rows + t for p, s in zip(places, segments, strict=True) for t in range(s.num_rows)]
        self._gather_R: Tensor | None = None
        self._scatter_R: Tensor | None = None
        first, size = self._packed[0], len(self._packed)
        is_run = self._packed == list(range(first, first + size))
        self._own: slice | Tensor = slice(first, first + size) if is_run else torch.tensor(self._packed, device=device)
        if is_run and padded == list(range(self._span * self._padded_rows)):
            return
        gather = np.zeros(self._span * self._padded_rows, dtype=np.int64)
        gather[padded] = self._packed
        self._gather_R = torch.from_numpy(gather).to(device)
        self._scatter_R = torch.tensor(padded, device=device)

    def _index_targets(
        self, segments: Sequence[SegmentLike], rows: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Slab row and position of every packed row of the group, in the group's order."""
        slab_rows = [row for row, s in zip(rows, segments, strict=True) for _ in range(s.num_rows)]
        positions = [length + t for length, s in zip(lengths, segments, strict=True) for t in range(s.num_rows)]
        return torch.tensor(slab_rows, device=device), torch.tensor(positions, device=device)

    def _build_mask(
        self,
        segments: Sequence[SegmentLike],
        places: Sequence[int],
        lengths: Sequence[int],
        like: Tensor,
        num_keys: int,
    ) -> Tensor:
        """``[span, 1, T * N, keys]``; padding rows and idle slab rows see position 0, so that no softmax is empty."""
        starts = torch.zeros(self._span, 1, 1, dtype=torch.int64)
        starts[list(places), 0, 0] = torch.tensor(list(lengths))
        steps = torch.arange(self._padded_rows).view(1, -1, 1)
        visible = torch.arange(num_keys).view(1, 1, -1) <= starts + steps
        for place, segment, length in zip(places, segments, lengths, strict=True):
            if segment.parents is not None:
                end = length + segment.num_rows
                visible[place, : segment.num_rows, length:end] = torch.from_numpy(ancestors(segment.parents))
        return _additive(visible.repeat_interleave(self._num_groups, dim=1).unsqueeze(1), like)

    def packed_rows(self) -> list[int]:
        return self._packed

    def attend(self, layer: int, qkv_RNGC: Tensor) -> Tensor:
        N, G, C = self._num_groups, qkv_RNGC.shape[2], qkv_RNGC.shape[3]
        rows_BN = self._span, self._padded_rows * N
        own = qkv_RNGC[self._own]
        if self._gather_R is None:
            queries = own[:, :N].reshape(*rows_BN, G, C)
        else:
            queries = qkv_RNGC[:, :N].index_select(0, self._gather_R).view(*rows_BN, G, C)
        self._targets[layer].index_put_(self._target_index, own[:, N:])
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2), self._keys[layer], self._values[layer], attn_mask=self._mask
        )
        flat = out.transpose(1, 2).reshape(-1, N * G * C)
        return flat if self._scatter_R is None else flat.index_select(0, self._scatter_R)
