"""4-bit grids: a file's own is kept exactly, others are the nearest points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.models.dequantise import dequantise, four_bit_blocks
from outrider.models.grid import GROUP_WIDTHS, Grid, combine, note_of, quantise_to_grid, read_grid

Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(kind: GGMLQuantizationType, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Bytes of a tensor: any levels, scales and minimums of ordinary size."""
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (shape[0] * shape[1] // 32, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    halves = draw.normal(size=(len(blocks), 2)).astype(np.float16)
    num_bytes = 4 if kind == Q4_1 else 2
    blocks[:, :num_bytes] = halves.view(np.uint8)[:, :num_bytes]
    return blocks.reshape(-1)


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from([Q4_0, Q4_1]), rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 999))
def test_a_files_blocks_are_taken_as_they_are(kind: GGMLQuantizationType, rows: int, groups: int, seed: int) -> None:
    shape = (rows, groups * 32)
    raw = stored(kind, shape, seed)
    blocks = four_bit_blocks(raw, kind, shape)
    assert blocks is not None
    levels, scales, minimums = (
        torch.from_numpy(part.copy()) for part in (blocks.levels, blocks.scales, blocks.minimums)
    )
    grid = Grid(levels=levels, scales=scales, minimums=minimums, group=32)
    expected = torch.from_numpy(dequantise(raw, kind, shape))
    torch.testing.assert_close(grid.dequantised(), expected, rtol=1e-6, atol=1e-6)


def test_other_types_have_no_such_blocks() -> None:
    assert four_bit_blocks(np.zeros(34, dtype=np.uint8), Q8_0, (1, 32)) is None


@pytest.mark.parametrize("precision", GROUP_WIDTHS)
@pytest.mark.parametrize("num_in", [32, 96, 128, 200])
def test_quantised_weights_are_the_nearest_points(precision: str, num_in: int) -> None:
    weight = noise(6, num_in)
    weight[2] = 0
    weight[3] *= 1e-4
    grid = quantise_to_grid(weight, precision)
    steps = grid.scales.float().abs().repeat_interleave(grid.group, dim=1)[:, :num_in]
    # Half a step, and what rounding the ends to float16 costs; the symmetric grid lacks one end: a whole step there.
    most = 0.52 if precision == "int4" else 1.02
    assert ((grid.dequantised() - weight).abs() <= most * steps + 2e-3 * weight.abs()).all()
    assert not grid.dequantised()[2].any()


def test_the_coarse_grid_keeps_the_largest_weight_of_a_group() -> None:
    weight = torch.tensor([[1.0, -4.0, 2.0, 0.5] * 32])
    assert quantise_to_grid(weight, "int4-g128").dequantised()[0, 1] == -4


class Stored:
    def __init__(self, grid: Grid | None) -> None:
        self._grid = grid

    def grid(self, name: str) -> Grid | None:
        return self._grid


def test_the_files_grid_comes_first_and_only_in_groups_of_32() -> None:
    own = quantise_to_grid(noise(4, 64, seed=1), "int4")
    other = noise(4, 64, seed=2)
    assert read_grid(Stored(own), "x", "int4", lambda _: other) is own
    for source, precision in ((Stored(None), "int4"), (object(), "int4"), (Stored(own), "int4-g128")):
        got = read_grid(source, "x", precision, lambda _: other)
        assert torch.equal(got.levels, quantise_to_grid(other, precision).levels)


@pytest.mark.parametrize("precision", GROUP_WIDTHS)
def test_rows_of_several_grids_are_moved_together(precision: str) -> None:
    first, second = noise(3, 128, seed=1), noise(2, 128, seed=2)
    grids = [quantise_to_grid(weight, precision) for weight in (first, second)]
    both = combine(lambda a, b: torch.cat((b, a)), *grids)
    assert torch.equal(both.dequantised(), torch.cat((grids[1].dequantised(), grids[0].dequantised())))


def test_a_note_says_dequantised_only_where_that_is_so() -> None:
    note = "4-bit GGUF (Q4_1), dequantised"
    assert note_of(note, "int4") == "4-bit GGUF (Q4_1), as stored"
    assert note_of(note, "int8") == note_of(note, "int4-g128") == note
    assert note_of("8-bit GGUF (Q8_0), dequantised", "int4") == "8-bit GGUF (Q8_0), dequantised"
