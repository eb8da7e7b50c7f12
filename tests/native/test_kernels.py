"""Each kernel of each instruction set against plain tensor operations."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.native.library import library
from outrider.native.packing import pack

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def call(name: str, kernels: str, *arguments: Any) -> None:
    function = getattr(library(), f"outrider_test_{name}")
    function.restype = ctypes.c_int32
    converted = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    assert function(kernels.encode(), *converted) == 0


def tiles_of(rows: Tensor) -> Tensor:
    """Operand rows as ``[step][32 rows][64 bytes]``, padded with zero rows."""
    num_rows, num_in = rows.shape
    words = 64 // rows.element_size()
    padded = torch.zeros(32, num_in, dtype=rows.dtype)
    padded[:num_rows] = rows
    return padded.view(32, num_in // words, words).transpose(0, 1).contiguous()


def product(kernels: str, rows: Tensor, weight: Tensor) -> Tensor:
    """rows x weight.T for one block of 32 outputs."""
    is_int8 = rows.dtype == torch.int8
    tiles, packed = tiles_of(rows), pack(weight)
    out = torch.full((32, 32), -1, dtype=torch.int32 if is_int8 else torch.float32)
    step = ctypes.c_int64(32 * 64)
    call("product", kernels, int(is_int8), tiles, step, packed, packed.shape[1], rows.shape[0], out)
    return out[: rows.shape[0]]


@quick
@given(num_rows=st.integers(1, 32), steps=st.integers(1, 20), seed=st.integers(0, 2**30))
def test_int8_product_is_exact(kernels: str, num_rows: int, steps: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    rows = torch.randint(-127, 128, (num_rows, steps * 64), generator=noise).to(torch.int8)
    weight = torch.randint(-127, 128, (32, steps * 64), generator=noise).to(torch.int8)
    assert torch.equal(product(kernels, rows, weight), rows.int() @ weight.int().t())


def test_int8_product_of_extremes_does_not_saturate(kernels: str) -> None:
    rows = torch.full((2, 1536), 127, dtype=torch.int8)
    rows[1] = -127
    weight = torch.full((32, 1536), -127, dtype=torch.int8)
    assert torch.equal(product(kernels, rows, weight), rows.int() @ weight.int().t())


@quick
@given(num_rows=st.integers(1, 32), steps=st.integers(1, 20), seed=st.integers(0, 2**30))
def test_bf16_product(kernels: str, num_rows: int, steps: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, steps * 32, generator=noise).bfloat16()
    weight = torch.randn(32, steps * 32, generator=noise).bfloat16()
    exact = rows.double() @ weight.double().t()
    bound = rows.double().abs() @ weight.double().abs().t() * (steps * 32 * 2.0**-23)
    assert ((product(kernels, rows, weight) - exact).abs() <= bound).all()


@quick
@given(num_rows=st.integers(2, 32), pick=st.integers(0, 31), seed=st.integers(0, 2**30))
def test_a_row_of_a_bf16_product_does_not_depend_on_its_company(
    kernels: str, num_rows: int, pick: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, 576, generator=noise).bfloat16()
    weight = torch.randn(32, 576, generator=noise).bfloat16()
    row = pick % num_rows
    assert torch.equal(product(kernels, rows, weight)[row], product(kernels, rows[row : row + 1], weight)[0])


@quick
@given(width=st.integers(1, 200), seed=st.integers(0, 2**30))
def test_norm(kernels: str, width: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    padded = -(-width // 64) * 64
    x, weight, out = torch.zeros(padded), torch.zeros(padded), torch.full((padded,), 9.0)
    x[:width], weight[:width] = torch.randn(width, generator=noise) * 5, torch.randn(width, generator=noise)
    call("norm", kernels, x, weight, width, padded, ctypes.c_float(1e-5), out)
    expected = torch.nn.functional.rms_norm(x[:width].double(), (width,), weight[:width].double(), 1e-5)
    torch.testing.assert_close(out[:width].double(), expected, rtol=1e-5, atol=1e-6)
    assert not out[width:].any()


@quick
@given(steps=st.integers(1, 8), scale=st.floats(1e-6, 1e6), seed=st.integers(0, 2**30))
def test_quantise(kernels: str, steps: int, scale: float, seed: int) -> None:
    x = torch.randn(steps * 64, generator=torch.Generator().manual_seed(seed)) * scale
    levels, row_scale = torch.zeros(steps * 64, dtype=torch.int8), torch.zeros(1)
    call("quantise", kernels, x, steps * 64, levels, row_scale)
    assert levels.abs().max() == 127
    torch.testing.assert_close(row_scale, (x.abs().max() / 127).view(1))
    assert ((levels * row_scale - x).abs() <= row_scale * 0.5001).all()


def test_quantise_of_zeros_is_zeros(kernels: str) -> None:
    levels, row_scale = torch.ones(64, dtype=torch.int8), torch.zeros(1)
    call("quantise", kernels, torch.zeros(64), 64, levels, row_scale)
    assert not levels.any() and torch.isfinite(row_scale).all()


@quick
@given(steps=st.integers(1, 8), seed=st.integers(0, 2**30))
def test_split_rows_are_254_times_finer(kernels: str, steps: int, seed: int) -> None:
    x = torch.randn(steps * 64, generator=torch.Generator().manual_seed(seed)) ** 3
    coarse, fine = (torch.zeros(steps * 64, dtype=torch.int8) for _ in range(2))
    row_scale = torch.zeros(1)
    call("split", kernels, x, steps * 64, coarse, fine, row_scale)
    restored = (coarse.double() + fine.double() / 254) * row_scale
    assert ((restored - x).abs() <= row_scale / 254 * 0.51).all()


def test_power_of_two(kernels: str) -> None:
    x = torch.linspace(-140, 120, 16 * 4096)
    out = torch.empty_like(x)
    call("power", kernels, x, out, len(x))
    exact = torch.exp2(x.double())
    assert ((out - exact).abs() <= exact * 3e-7 + 2.0**-125).all()
    edges = torch.zeros(16)
    edges[1], edges[2], edges[3] = -151, -1000, -1e30
    call("power", kernels, edges, out, 16)
    assert out[0] == 1 and not out[1:4].any()


def test_silu(kernels: str) -> None:
    x = torch.cat((torch.linspace(-30, 30, 4096 - 8), torch.tensor([0.0, -0.0, 90, -90, 1000, -1000, 1e30, -1e30])))
    out = torch.empty_like(x)
    call("silu", kernels, x, out, len(x))
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(x.double()), rtol=2e-6, atol=1e-30)
