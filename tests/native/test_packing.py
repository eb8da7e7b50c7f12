"""Packed weights hold every weight in its place, and zeros elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.native.packing import Arena, head_rows, int4_tile_bytes, pack, pack_int4, quantise, take_rows, unpack


@settings(max_examples=20, deadline=None)
@given(blocks=st.integers(1, 4), steps=st.integers(1, 4), dtype=st.sampled_from([torch.bfloat16, torch.int8]))
def test_unpack_inverts_pack(blocks: int, steps: int, dtype: torch.dtype) -> None:
    num_in = steps * 64 // (2 if dtype == torch.bfloat16 else 1)
    weight = torch.randint(-127, 128, (blocks * 32, num_in)).to(dtype)
    assert torch.equal(unpack(pack(weight)), weight)


def test_pack_puts_a_weight_where_the_kernels_read_it() -> None:
    weight = torch.zeros(64, 128, dtype=torch.int8)
    weight[32 + 16 + 3, 64 + 4 * 5 + 2] = 7  # block 1, tile 1, output 3; step 1, word 5, byte 2
    flat = pack(weight).flatten()
    place = (1 * 2 + 1) * 2048 + 1024 + 5 * 64 + 3 * 4 + 2
    assert flat.nonzero().flatten().tolist() == [place]


def test_paired_heads_bring_rotary_partners_together() -> None:
    rows = head_rows(64, paired=True).view(2, 2, 16)
    assert rows[0, 0].tolist() == list(range(16)) and rows[0, 1].tolist() == list(range(32, 48))
    assert rows[1, 0].tolist() == list(range(16, 32)) and rows[1, 1].tolist() == list(range(48, 64))


@settings(max_examples=20, deadline=None)
@given(half=st.integers(1, 70), paired=st.booleans())
def test_head_rows_hold_every_dimension_once(half: int, paired: bool) -> None:
    rows = head_rows(2 * half, paired=paired)
    assert len(rows) % 32 == 0
    assert sorted(rows[rows >= 0].tolist()) == list(range(2 * half))


def test_take_rows_of_minus_one_is_zeros() -> None:
    weight = torch.arange(1.0, 7.0).view(3, 2)
    assert take_rows(weight, torch.tensor([2, -1, 0])).tolist() == [[5, 6], [0, 0], [1, 2]]


def test_quantise_is_within_half_a_level_and_keeps_zeros() -> None:
    weight = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    levels, scales = quantise(weight)
    assert levels.abs().max() == 127 and scales[3] == 0
    assert ((levels * scales.unsqueeze(1) - weight).abs() <= scales.unsqueeze(1) * 0.5001).all()


def test_arena_places_tensors_apart_and_aligned() -> None:
    arena = Arena(300)
    first, second = arena.reserve((3,), torch.float32), arena.reserve((2, 50), torch.int8)
    first.fill_(5)
    second.fill_(7)
    assert first.data_ptr() % 64 == 0 and second.data_ptr() == first.data_ptr() + 64
    assert first.tolist() == [5, 5, 5] and (second == 7).all()


def test_an_arena_that_is_full_says_so() -> None:
    arena = Arena(64)
    with pytest.raises(AssertionError, match="too small"):
        arena.reserve((8 * 1024 * 1024,), torch.float32)


@pytest.mark.parametrize("group", [32, 128])
def test_pack_int4_puts_a_level_and_a_scale_where_the_kernels_read_them(group: int) -> None:
    levels = torch.zeros(64, 192, dtype=torch.uint8)
    levels[32 + 16 + 3, 32 + 4 * 5 + 2] = 7  # block 1, tile 1, output 3; part 1, word 5: the high half of line 1
    scales = torch.zeros(64, -(-192 // group)).half()
    scales[32 + 16 + 3, 1] = 1.5
    minimums = scales * 2 if group == 32 else None
    packed = pack_int4(levels, scales, minimums)
    tile = int4_tile_bytes(192, group)
    assert packed.shape == (2, 2 * tile) and not packed[0].any() and not packed[1, :tile].any()
    flat = packed[1, tile:].clone()
    halves = flat[: tile - 192 * 8].view(torch.float16)
    scale_at = 32 + 3 if group == 32 else 16 + 3
    assert halves[scale_at] == 1.5 and (group == 128 or halves[scale_at + 16] == 3)
    at = tile - 192 * 8 + 256 + 64 + 3 * 4 + 2
    assert flat[at] == 7 << 4
    flat[at] = 0
    assert not flat[tile - 192 * 8 :].any()
