"""Planned attention against a loop over rows that is plain to see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.cache.attention import ancestors
from outrider.cache.dense import DenseCache

from .test_dense import C, G, L, N, Rows, new_cache


def noise(num_rows: int, seed: int) -> Tensor:
    return torch.randn(num_rows, N + 2, G, C, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def one_pass(cache: DenseCache, segments: list[Rows], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """(inputs, outputs) of each layer."""
    attention = cache.begin(segments, num_groups=N)
    inputs = [noise(sum(s.num_rows for s in segments), seed + layer) for layer in range(L)]
    outputs = [attention.attend(layer, inputs[layer]) for layer in range(L)]
    cache.advance(segments)
    return inputs, outputs


def attend_by_hand(queries_NGC: Tensor, keys_GSC: Tensor, values_GSC: Tensor) -> Tensor:
    scores = torch.einsum("ngc,gsc->ngs", queries_NGC, keys_GSC) / C**0.5
    return torch.einsum("ngs,gsc->ngc", scores.softmax(-1), values_GSC).reshape(-1)


def check(cache: DenseCache, segments: list[Rows], seed: int) -> None:
    bases = {s.slot: cache.length(s.slot) for s in segments}
    inputs, outputs = one_pass(cache, segments, seed)
    for segment in segments:
        base, parents = bases[segment.slot], segment.parents or tuple(range(-1, segment.num_rows - 1))
        seen = ancestors(parents)
        for layer in range(L):
            keys, values = cache.read(segment.slot)[layer]
            for row in range(segment.num_rows):
                visible = [*range(base), *(base + other for other in range(row + 1) if seen[row, other])]
                queries = inputs[layer][segment.start + row, :N]
                expected = attend_by_hand(queries, keys[:, visible], values[:, visible])
                torch.testing.assert_close(outputs[layer][segment.start + row], expected, rtol=1e-5, atol=1e-5)


def fill(cache: DenseCache, counts: list[int]) -> list[int]:
    slots = [cache.allocate(count) for count in counts]
    for slot, count in zip(slots, counts, strict=True):
        one_pass(cache, [Rows(slot, 0, count)], seed=slot)
    return slots


CASES = {
    "one row alone": [(0, 1, None)],
    "chain alone": [(2, 7, None)],
    "tree alone": [(1, 6, (-1, 0, 0, 2, 1, 2))],
    "plain batch": [(0, 1, None), (1, 1, None), (2, 1, None)],
    "plain batch in another order": [(2, 1, None), (0, 1, None), (1, 1, None)],
    "equal chains": [(0, 4, None), (1, 4, None)],
    "ragged": [(0, 3, None), (1, 1, None), (2, 5, None)],
    "ragged trees and buckets": [(3, 4, (-1, 0, 0, 1)), (1, 1, None), (0, 6, (-1, 0, 1, 0, 3, 3)), (4, 2, None)],
    "idle rows between": [(0, 2, None), (2, 2, None)],
    "prefill beside decoding": [(1, 1, None), (2, 50, None), (0, 3, None)],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_row_sees_what_it_may_and_nothing_else(case: list[tuple[int, int, tuple[int, ...] | None]]) -> None:
    cache = new_cache()
    slots = fill(cache, [11, 3, 29, 270, 300])
    start, segments = 0, []
    for index, num_rows, parents in case:
        segments.append(Rows(slots[index], start, num_rows, parents))
        start += num_rows
    check(cache, segments, seed=50)
    check(cache, segments, seed=60)


@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_an_empty_cache_is_causal(num_rows: int) -> None:
    cache = new_cache()
    check(cache, [Rows(cache.allocate(1), 0, num_rows)], seed=1)


def test_a_prefill_behind_cached_tokens() -> None:
    cache = new_cache()
    (slot,) = fill(cache, [40])
    check(cache, [Rows(slot, 0, 60)], seed=1)


def test_ancestors_of_a_tree() -> None:
    seen = ancestors((-1, 0, 0, 1, 2))
    assert [[c for c in range(5) if seen[r, c]] for r in range(5)] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]


def test_segments_must_cover_the_rows() -> None:
    cache = new_cache()
    slots = fill(cache, [3, 3])
    with pytest.raises(AssertionError, match="once"):
        cache.begin([Rows(slots[0], 0, 2), Rows(slots[0], 2, 2)], num_groups=N)
