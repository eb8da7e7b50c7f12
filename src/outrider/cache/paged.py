"""Keys and values in pages: sequences grow without moving, and a common prefix is held once.

Pool ``[L, 2, G, P * PAGE, C]``; place i of page k is position ``k * PAGE + i`` of the pool. Page 0 belongs to nobody: rows that
only pad a pass write there. A page that several sequences hold is never written to: whoever wants to takes a copy first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.attention import SegmentLike
from outrider.cache.paged_attention import PagedPass
from outrider.device import to_device

__all__ = ["PAGE", "PagedCache"]

PAGE = 128
"""Positions of a page; also the keys that fused attention reads at a time."""

_FIRST_PAGES = 16


class PagedCache:
    """A :class:`outrider.cache.base.Cache` of pages.

    Args:
        num_layers, num_kv_heads, head_width: L, G, C of the target.
        dtype, device: of keys and values.

    Attributes:
        pool: all pages; another tensor after it has grown.
    """

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_layers, 2, num_kv_heads, _FIRST_PAGES * PAGE, head_width)
        # Zeros, not garbage: a masked position weighs 0, but 0 * NaN would still be NaN.
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self._free_pages = list(range(1, _FIRST_PAGES))
        self._num_users = [1] + [0] * (_FIRST_PAGES - 1)
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._free_slots: list[int] = []

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the one that belongs to nobody included."""
        return len(self._num_users)

    def allocate(self, num_tokens: int) -> int:
        """A new, empty slot; pages come as tokens do."""
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._pages)
        self._pages[slot], self._lengths[slot] = [], 0
        return slot

    def free(self, slot: int) -> None:
        """Give the slot back, and the pages that nobody else holds."""
        self._drop(self._pages.pop(slot))
        del self._lengths[slot]
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
        moves = [(base + row, base + index) for index, row in enumerate(path) if index != row]
        if moves:
            for index in {there // PAGE for _, there in moves}:
                self._make_own(slot, index)
            self._move([self._place(slot, a) for a, _ in moves], [self._place(slot, b) for _, b in moves])
        self._lengths[slot] = base + len(path)
        pages = self._pages[slot]
        num_kept = -(-self._lengths[slot] // PAGE)
        self._drop(pages[num_kept:])
        del pages[num_kept:]

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Make ``target`` (an empty slot) hold the first ``num_tokens`` cached tokens of ``source``, whose pages it shares."""
        assert self._lengths[target] == 0 and num_tokens <= self._lengths[source]
        shared = self._pages[source][: -(-num_tokens // PAGE)]
        for page in shared:
            self._num_users[page] += 1
        self._pages[target] = list(shared)
        self._lengths[target] = num_tokens

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a slot with room for ``num_tokens`` takes, if it shares no page."""
        return -(-num_tokens // PAGE) * self._page_bytes

    @torch.inference_mode()
    def ensure(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` in all, and for no more than :meth:`bytes_for` counts."""
        self._reserve(slot, num_tokens)

    def num_bytes(self) -> int:
        """Bytes of the pages that slots hold; the pool may have idle ones besides."""
        return sum(1 for users in self._num_users[1:] if users) * self._page_bytes

    @property
    def _page_bytes(self) -> int:
        return self.pool.numel() * self.pool.element_size() // self.num_pages

    def read(self, slot: int) -> Tensor:
        """What is cached for the slot, ``[L, 2, G, length, C]``: keys, then values. For tests and audits."""
        places = [self._place(slot, position) for position in range(self._lengths[slot])]
        return self.pool.index_select(3, to_device(places, torch.int64, self.pool.device))

    @torch.inference_mode()
    def begin(self, segments: Sequence[SegmentLike]) -> PagedPass:
        """Make room for the rows of one pass and say where everything lies.

        Args:
            segments: the pass, in packed order; a slot appears at most once.
        """
        assert len({segment.slot for segment in segments}) == len(segments), "a slot may come once a pass"
        for segment in segments:
            self._reserve(segment.slot, self._lengths[segment.slot] + segment.num_rows)
        return PagedPass(
            segments=tuple(segments),
            lengths=[self._lengths[segment.slot] for segment in segments],
            tables=[list(self._pages[segment.slot]) for segment in segments],
            num_pages=self.num_pages,
            page_size=PAGE,
        )

    def advance(self, segments: Sequence[SegmentLike]) -> None:
        """The pass is complete: its rows count as cached."""
        for segment in segments:
            self._lengths[segment.slot] += segment.num_rows

    def _place(self, slot: int, position: int) -> int:
        """Position of the pool where a position of the slot lies."""
        return self._pages[slot][position // PAGE] * PAGE + position % PAGE

    def _reserve(self, slot: int, num_tokens: int) -> None:
        """Pages for so many tokens; the one that is half full must be the slot's own before it is written to."""
        pages, length = self._pages[slot], self._lengths[slot]
        if length % PAGE:
            self._make_own(slot, length // PAGE)
        while len(pages) * PAGE < num_tokens:
            pages.append(self._take())

    def _make_own(self, slot: int, index: int) -> None:
        """Copy the slot's page of this index, if others hold it too."""
        pages = self._pages[slot]
        shared = pages[index]
        if self._num_users[shared] > 1:
            pages[index] = self._take()
            here, there = shared * PAGE, pages[index] * PAGE
            self.pool[:, :, :, there : there + PAGE] = self.pool[:, :, :, here : here + PAGE]
            self._drop([shared])

    def _take(self) -> int:
        if not self._free_pages:
            self._grow()
        page = heapq.heappop(self._free_pages)
        self._num_users[page] = 1
        return page

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                heapq.heappush(self._free_pages, page)

    def _grow(self) -> None:
        """Twice the pages."""
        before, num_pages = self.pool, self.num_pages
        shape = list(before.shape)
        shape[3] *= 2
        self.pool = before.new_zeros(shape)
        self.pool[:, :, :, : before.shape[3]] = before
        self._free_pages = list(range(num_pages, 2 * num_pages))
        self._num_users += [0] * num_pages

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = self.pool.device
        moved = self.pool.index_select(3, to_device(sources, torch.int64, device))
        self.pool.index_copy_(3, to_device(targets, torch.int64, device), moved)
