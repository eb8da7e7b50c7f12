"""The paged target against the one over slabs: ragged passes, trees, chunks, taps, forgetting and sharing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider import Engine, EngineConfig, SamplingParams, make_drafter
from outrider.cache.paged import PAGE
from outrider.errors import PromptError
from outrider.models.base import PackedRows
from outrider.models.paged import PagedTarget
from tests.models._tiny import CPU, tiny_target

TREE = (-1, 0, 0, 1, 2, 2)


class Both:
    """The same passes over pages and over slabs."""

    def __init__(self, **changes: int) -> None:
        self.dense = tiny_target(**changes)
        self.paged = PagedTarget(self.dense)
        self.targets = (self.paged, self.dense)
        self.caches = tuple(target.new_cache() for target in self.targets)

    def allocate(self) -> int:
        first, second = (cache.allocate(8) for cache in self.caches)
        assert first == second
        return first

    def run(
        self,
        tokens: Sequence[Sequence[int]],
        slots: Sequence[int],
        *,
        parents: Sequence[tuple[int, ...] | None] | None = None,
        logit_rows: tuple[int, ...] | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        starts = [self.caches[0].length(slot) for slot in slots]
        rows = PackedRows.pack(tokens, slots=slots, starts=starts, parents=parents, device=CPU, logit_rows=logit_rows)
        paged, dense = (t.forward(rows, c, taps=taps) for t, c in zip(self.targets, self.caches, strict=True))
        assert paged.logits_RV.shape == dense.logits_RV.shape
        torch.testing.assert_close(paged.logits_RV, dense.logits_RV, rtol=1e-4, atol=1e-4)
        assert paged.taps.keys() == dense.taps.keys()
        for layer in taps:
            torch.testing.assert_close(paged.taps[layer], dense.taps[layer], rtol=1e-4, atol=1e-4)
        self.compare(slots)

    def compare(self, slots: Sequence[int]) -> None:
        for slot in slots:
            torch.testing.assert_close(self.caches[0].read(slot), self.caches[1].read(slot), rtol=1e-4, atol=1e-4)


def test_ragged_passes_trees_and_forgetting() -> None:
    both = Both()
    one, two = both.allocate(), both.allocate()
    both.run([[5, 6, 7]], [one], logit_rows=(2,), taps=(1, 3))
    both.run([[8] * 200], [two], logit_rows=())
    both.run([[9, 10, 11, 12, 13, 14], [15]], [one, two], parents=[TREE, None], taps=(0,))
    for cache in both.caches:
        cache.keep(one, base=3, path=(0, 2, 5))
        cache.keep(two, base=130, path=())
    both.compare([one, two])
    both.run([[20, 21], [22, 23, 24]], [one, two])
    both.run([[25], [26]], [two, one])


def test_a_prefix_is_shared_until_somebody_writes() -> None:
    both = Both()
    first = both.allocate()
    both.run([[1 + i % 90 for i in range(PAGE + 39)]], [first], logit_rows=(0,))
    second, third = both.allocate(), both.allocate()
    for cache in both.caches:
        cache.copy_prefix(first, second, PAGE + 20)
        cache.copy_prefix(first, third, PAGE)
    pages = both.caches[0]._pages  # type: ignore[attr-defined]
    assert pages[first][0] == pages[second][0] == pages[third][0] and pages[first][1] == pages[second][1]
    both.run([[50], [51, 52], [53]], [first, second, third])
    assert pages[first][0] == pages[second][0] and len({pages[slot][1] for slot in (first, second, third)}) == 3
    for cache in both.caches:
        cache.free(first)
    both.run([[60], [61]], [second, third])


def test_the_pool_grows_and_freed_pages_come_back() -> None:
    both = Both(max_positions=8192)
    slots = [both.allocate() for _ in range(3)]
    for slot in slots:
        both.run([[3 + slot] * (6 * PAGE)], [slot], logit_rows=(0,))
    paged = both.caches[0]
    assert paged.num_pages > 16
    before = paged.num_pages
    for cache in both.caches:
        cache.free(slots[0])
    slot = both.allocate()
    both.run([[7] * (6 * PAGE)], [slot], logit_rows=(0,))
    assert paged.num_pages == before
    both.run([[1], [2], [3]], [slot, slots[1], slots[2]])


def test_greedy_tokens_and_the_window() -> None:
    both = Both(max_positions=32)
    slot = both.allocate()
    rows = PackedRows.pack([[4, 5, 6]], slots=[slot], starts=[0], device=CPU)
    tokens = [t.forward_greedy(rows, c).tokens_R for t, c in zip(both.targets, both.caches, strict=True)]
    assert torch.equal(tokens[0], tokens[1])
    late = PackedRows.pack([[1] * 30], slots=[slot], starts=[3], device=CPU)
    with pytest.raises(PromptError, match="window of 32"):
        both.paged.forward(late, both.caches[0])


@pytest.mark.parametrize("drafter", ["ngram", "slice:2:depth=2,width=2,num_nodes=5"])
def test_the_engine_decodes_over_pages(drafter: str) -> None:
    dense = tiny_target()
    paged = PagedTarget(dense)
    config = EngineConfig(num_draft_tokens=3, schedule="fixed")
    prompts = [[5, 6, 7, 5, 6], [8, 9], [11] * 140]
    for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.9, seed=3)):
        expected = [r.token_ids for r in Engine(dense).generate(prompts, params)]
        engine = Engine(paged, drafter=make_drafter(drafter, paged), config=config)
        assert [r.token_ids for r in engine.generate(prompts, params)] == expected
