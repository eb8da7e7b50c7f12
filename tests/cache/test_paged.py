"""The paged cache under the dense one's random passes, and its own bookkeeping of pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis.stateful import invariant

from outrider.cache.paged import PAGE, PagedCache
from outrider.cache.paged_attention import PagedInputs
from tests.cache.test_dense import C, CacheMachine, G, L, N, Rows, Writer, _content


@dataclass
class PagedWriter(Writer):
    """Writes rows where a pass's inputs say they lie, which are padded and then read back from their buffers."""

    cache: PagedCache  # type: ignore[assignment]

    @torch.inference_mode()
    def append(self, counts: dict[int, int]) -> None:
        segments, tokens = [], []
        for slot, count in counts.items():
            segments.append(Rows(slot=slot, start=len(tokens), num_rows=count))
            new = list(range(self.written, self.written + count))
            self.written += count
            tokens += new
            self.expected[slot] += new
        places = self.cache.begin(segments)
        inputs = PagedInputs(places.shape, page_size=PAGE, device=torch.device("cpu"))
        inputs.load(places)
        assert not inputs.places_R[len(tokens) :].any(), "padding writes to the page that belongs to nobody"
        for layer in range(L):
            values = _content(layer, tokens)[:, N:].permute(1, 2, 0, 3)
            self.cache.pool[layer].index_copy_(2, inputs.places_R[: len(tokens)], values)
        self.cache.advance(segments)


def new_cache() -> PagedCache:
    return PagedCache(num_layers=L, num_kv_heads=G, head_width=C, dtype=torch.float32, device=torch.device("cpu"))


class PagedMachine(CacheMachine):
    def __init__(self) -> None:
        super().__init__()
        self.writer = PagedWriter(new_cache())

    @invariant()
    def pages_are_counted(self) -> None:
        cache = self.writer.cache
        held = [page for pages in cache._pages.values() for page in pages]
        assert 0 not in held
        for page in range(1, cache.num_pages):
            assert cache._num_users[page] == held.count(page)
            assert (page in cache._free_pages) == (page not in held)
        for slot, pages in cache._pages.items():
            assert len(pages) >= -(-cache.length(slot) // PAGE)


TestPagedMachine = PagedMachine.TestCase
TestPagedMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None, derandomize=True)
