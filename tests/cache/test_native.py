"""The native cache against a plain list of tensors."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.cache.native import NativeCache

SHAPE: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 3, "head_width": 20}


def write(cache: NativeCache, slot: int, values: Tensor) -> None:
    """Append ``[L, 2, G, n, C]`` through the documented layout, one number at a time being too slow: by whole tiles."""
    start, count = cache.length(slot), values.shape[3]
    cache.reserve(slot, start + count)
    memory = cache._memory[slot].view(2, 3, 2, -1)
    keys = memory[:, :, 0].view(2, 3, -1, 1, 16, 16, 2)
    sides = memory[:, :, 1].view(2, 3, -1, 2, 16, 16, 2)
    for index in range(count):
        position, half = start + index, 10
        key, value = values[:, 0, :, index], values[:, 1, :, index]
        keys[:, :, position // 16, 0, :half, position % 16, 0] = key[..., :half]
        keys[:, :, position // 16, 0, :half, position % 16, 1] = key[..., half:]
        padded = torch.nn.functional.pad(value, (0, 12)).view(2, 3, 2, 16)
        sides[:, :, position // 32, :, position % 32 // 2, :, position % 2] = padded
    cache.advance(slot, count)


def content(seed: int, count: int) -> Tensor:
    return torch.randn(2, 2, 3, count, 20, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_read_returns_what_was_written() -> None:
    cache = NativeCache(**SHAPE)
    slot, values = cache.allocate(1), content(0, 70)
    write(cache, slot, values)
    assert torch.equal(cache.read(slot), values)


def test_growth_keeps_the_content_and_the_new_memory_is_finite() -> None:
    cache = NativeCache(**SHAPE)
    slot, values = cache.allocate(1), content(0, 250)
    write(cache, slot, values)
    more = content(1, 300)
    write(cache, slot, more)
    assert torch.equal(cache.read(slot), torch.cat((values, more), dim=3))
    assert torch.isfinite(cache._memory[slot]).all()
    assert cache.address(slot)[1] % 128 == 0


def test_slots_are_reused_lowest_first_and_start_empty() -> None:
    cache = NativeCache(**SHAPE)
    slots = [cache.allocate(5) for _ in range(3)]
    write(cache, slots[0], content(0, 3))
    cache.free(slots[0])
    assert cache.allocate(5) == slots[0]
    assert cache.length(slots[0]) == 0
    assert not cache._memory[slots[0]].any()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_keep_and_copy_behave_like_a_list(data: st.DataObject) -> None:
    cache = NativeCache(**SHAPE)
    slot, model = cache.allocate(1), content(0, 0)
    for step in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(1, 40))
        values = content(step, count)
        write(cache, slot, values)
        model = torch.cat((model, values), dim=3)
        base = data.draw(st.integers(0, model.shape[3]))
        path = sorted(data.draw(st.sets(st.integers(0, max(0, model.shape[3] - base - 1)), max_size=12)))
        if base == model.shape[3]:
            path = []
        cache.keep(slot, base=base, path=path)
        model = torch.cat((model[:, :, :, :base], model[:, :, :, [base + row for row in path]]), dim=3)
        assert torch.equal(cache.read(slot), model)
    other, count = cache.allocate(1), data.draw(st.integers(0, model.shape[3]))
    cache.copy_prefix(slot, other, count)
    assert torch.equal(cache.read(other), model[:, :, :, :count])
