"""4-bit products of each instruction set against the arithmetic they promise, and against one another."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.models.grid import GROUP_WIDTHS, Grid
from outrider.native.library import is_available
from outrider.native.packing import pack_int4
from tests.native.test_kernels import call, tiles_of

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
precisions = pytest.mark.parametrize("precision", GROUP_WIDTHS)


def random_grid(num_in: int, precision: str, noise: torch.Generator) -> Grid:
    """One block of 32 outputs; scales of every size that float16 has, subnormal ones too."""
    group = GROUP_WIDTHS[precision]
    shape = (32, -(-num_in // group))
    scales = torch.randn(shape, generator=noise) * 2.0 ** torch.randint(-20, 3, shape, generator=noise)
    minimums = torch.randn(shape, generator=noise).half() if precision == "int4" else None
    levels = torch.randint(0, 16, (32, num_in), generator=noise).to(torch.uint8)
    return Grid(levels=levels, scales=scales.half(), minimums=minimums, group=group)


def random_rows(num_rows: int, grid: Grid, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """int8 levels ``[rows, in]`` and their scales ``[rows, groups]``."""
    levels = torch.randint(-127, 128, (num_rows, grid.levels.shape[1]), generator=noise).to(torch.int8)
    return levels, torch.rand(num_rows, grid.scales.shape[1], generator=noise) + 0.01


def sums_of_groups(levels: Tensor, group: int) -> Tensor:
    """Sums of each group of inputs, the last of which may be short."""
    return torch.stack([part.sum(-1) for part in levels.split(group, dim=-1)], dim=-1)


def product(kernels: str, rows: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    factors = torch.stack((scales, scales * sums_of_groups(rows.float(), grid.group)), dim=2).contiguous()
    packed = pack_int4(grid.levels, grid.scales, grid.minimums)
    out = torch.full((32, 32), -1.0)
    step, num_parts = ctypes.c_int64(32 * 64), rows.shape[1] // 32
    call("int4", kernels, tiles_of(rows), step, factors, packed, num_parts, grid.group // 32, rows.shape[0], out)
    return out[: rows.shape[0]]


def expected(rows: Tensor, scales: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """(product in float64, the sum of its terms' sizes)."""
    num_in = rows.shape[1]
    restored = rows.double() * scales.double().repeat_interleave(grid.group, dim=1)[:, :num_in]
    weight = grid.dequantised().double()
    size = grid.levels.double() * grid.scales.double().abs().repeat_interleave(grid.group, dim=1)[:, :num_in]
    size += weight.abs() + 8 * grid.scales.double().abs().repeat_interleave(grid.group, dim=1)[:, :num_in]
    return restored @ weight.t(), restored.abs() @ size.t()


@precisions
@quick
@given(num_rows=st.integers(1, 32), steps=st.integers(1, 20), seed=st.integers(0, 2**30))
def test_int4_product(kernels: str, precision: str, num_rows: int, steps: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    grid = random_grid(steps * 64, precision, noise)
    rows, scales = random_rows(num_rows, grid, noise)
    exact, size = expected(rows, scales, grid)
    assert ((product(kernels, rows, scales, grid) - exact).abs() <= size * 2.0**-20).all()


@precisions
def test_extremes_do_not_saturate(kernels: str, precision: str) -> None:
    grid = Grid(
        levels=torch.full((32, 1536), 15, dtype=torch.uint8),
        scales=torch.ones(32, 1536 // GROUP_WIDTHS[precision]).half(),
        minimums=torch.zeros(32, 48).half() if precision == "int4" else None,
        group=GROUP_WIDTHS[precision],
    )
    for level in (127, -127):
        rows = torch.full((2, 1536), level, dtype=torch.int8)
        got = product(kernels, rows, torch.ones(2, grid.scales.shape[1]), grid)
        assert (got == 1536 * level * (15 if precision == "int4" else 7)).all()


@precisions
@quick
@given(num_rows=st.integers(2, 32), pick=st.integers(0, 31), steps=st.integers(1, 20), seed=st.integers(0, 2**30))
def test_a_row_does_not_depend_on_its_company(
    kernels: str, precision: str, num_rows: int, pick: int, steps: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    grid = random_grid(steps * 64, precision, noise)
    rows, scales = random_rows(num_rows, grid, noise)
    row = pick % num_rows
    alone = product(kernels, rows[row : row + 1], scales[row : row + 1], grid)[0]
    assert torch.equal(product(kernels, rows, scales, grid)[row], alone)


@precisions
@pytest.mark.parametrize("num_rows", [1, 4, 5, 8, 9, 16, 17, 32])
def test_instruction_sets_with_fused_arithmetic_agree_bit_for_bit(precision: str, num_rows: int) -> None:
    noise = torch.Generator().manual_seed(num_rows)
    grid = random_grid(576, precision, noise)
    rows, scales = random_rows(num_rows, grid, noise)
    fused = [kernels for kernels in ("amx", "avx512", "avx2") if is_available(kernels)]
    results = [product(kernels, rows, scales, grid) for kernels in fused]
    assert all(torch.equal(result, results[0]) for result in results[1:])


@precisions
@quick
@given(steps=st.integers(1, 8), scale=st.floats(1e-6, 1e6), seed=st.integers(0, 2**30))
def test_rows_in_groups(kernels: str, precision: str, steps: int, scale: float, seed: int) -> None:
    group, width = GROUP_WIDTHS[precision], steps * 64
    x = torch.randn(width, generator=torch.Generator().manual_seed(seed)) * scale
    x[: width // 2] *= 1000
    levels, factors = torch.zeros(width, dtype=torch.int8), torch.zeros(-(-width // group), 2)
    call("groups", kernels, x, width, group, levels, factors)
    for start, (factor, total) in zip(range(0, width, group), factors, strict=True):
        part, own = x[start : start + group], levels[start : start + group]
        assert own.abs().max() == 127
        torch.testing.assert_close(factor, part.abs().max() / 127)
        torch.testing.assert_close(total, factor * own.sum())
        assert ((own * factor - part).abs() <= factor * 0.5001).all()


def test_a_group_of_zeros_is_zeros(kernels: str) -> None:
    levels, factors = torch.ones(64, dtype=torch.int8), torch.full((2, 2), 9.0)
    x = torch.zeros(64)
    x[40] = 1
    call("groups", kernels, x, 64, 32, levels, factors)
    assert not levels[:32].any() and factors[0, 1] == 0 and torch.isfinite(factors).all()
    assert levels[40] == 127
