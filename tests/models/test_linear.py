"""Floating-point parts against plain formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement, Precision
from outrider.models.linear import DenseMatrix, Norm, PackedMatrix, can_pack_bfloat16
from outrider.models.llama_weights import make_kernels

CPU = torch.device("cpu")
WIDTH, INNER = 64, 96

needs_bfloat16 = pytest.mark.skipif(
    not can_pack_bfloat16(CPU), reason="this processor does not multiply bfloat16 natively"
)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


NORM = Norm(weight_D=1 + noise(WIDTH, seed=9) / 4, eps=1e-5)


def normed(x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + NORM.eps).sqrt() * NORM.weight_D.double()


TOLERANCE: dict[Precision, float] = {"float32": 1e-6, "bfloat16": 1e-2, "int8": 3e-2}


@pytest.mark.parametrize("precision", TOLERANCE)
def test_every_part_is_its_formula(precision: Precision) -> None:
    kernels = make_kernels(Placement(device=CPU, precision=precision), WIDTH)
    table, weight, out = noise(50, WIDTH, seed=1), noise(INNER, WIDTH, seed=2), noise(WIDTH, INNER, seed=3)
    gate_up, tolerance = noise(2 * INNER, WIDTH, seed=4), TOLERANCE[precision]
    stream, tokens = kernels.stream(table), torch.arange(11)
    x, y = stream.embed(tokens), noise(11, INNER, seed=5).to(stream.tap(stream.embed(tokens)).dtype)
    seen = stream.tap(x).double()
    assert relative(stream.tap(x), table[:11].double()) < tolerance
    assert relative(kernels.norm_projection(weight, NORM)(x), normed(seen) @ weight.double().t()) < tolerance
    added = stream.tap(kernels.residual_projection(out)(x, y))
    assert relative(added, seen + y.double() @ out.double().t()) < tolerance
    gate, up = (normed(seen) @ gate_up.double().t()).chunk(2, -1)
    fed = stream.tap(kernels.feed_forward(gate_up, out, NORM)(x))
    assert relative(fed, seen + (F.silu(gate) * up) @ out.double().t()) < tolerance
    logits = kernels.head(weight, NORM)(x)
    assert logits.dtype == torch.float32
    assert relative(logits, normed(seen) @ weight.double().t()) < tolerance


@needs_bfloat16
def test_logits_of_bfloat16_are_not_rounded_to_bfloat16() -> None:
    weight, x = noise(500, 576, seed=1).bfloat16(), noise(3, 576, seed=2).bfloat16()
    exact = x.double() @ weight.double().t()
    matrix = PackedMatrix(weight)
    assert relative(matrix(x), exact) > 1e-3
    assert relative(matrix.logits(x), exact) < 2e-5


@needs_bfloat16
def test_packed_products_do_not_depend_on_the_number_of_rows() -> None:
    matrix, x = PackedMatrix(noise(960, 576, seed=1).bfloat16()), noise(33, 576, seed=2).bfloat16()
    whole = matrix(x)
    for count in (1, 2, 3, 8, 17):
        assert torch.equal(matrix(x[:count]), whole[:count])


def test_float32_passes_are_padded_so_that_products_keep_their_arithmetic() -> None:
    kernels = make_kernels(Placement(device=CPU, precision="float32"), WIDTH)
    assert kernels.row_multiple == 16
    matrix, x = DenseMatrix(noise(960, 576, seed=1)), noise(48, 576, seed=2)
    assert torch.equal(matrix(x[:16]), matrix(x)[:16])


@pytest.mark.parametrize("precision", TOLERANCE)
def test_bytes_are_those_of_the_matrices(precision: Precision) -> None:
    kernels = make_kernels(Placement(device=CPU, precision=precision), WIDTH)
    size = {"float32": 4, "bfloat16": 2, "int8": 1}[precision]
    part = kernels.feed_forward(noise(2 * INNER, WIDTH, seed=4), noise(WIDTH, INNER, seed=3), NORM)
    assert part.num_bytes == 3 * INNER * WIDTH * size


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16])
def test_packed_argmax_is_that_of_the_logits(num_rows: int) -> None:
    """Outputs in pairs that differ by less than bfloat16 can show: the second product has to decide."""
    if not can_pack_bfloat16(torch.device("cpu")):
        pytest.skip("this processor has no bfloat16 products in oneDNN")
    generator = torch.Generator().manual_seed(num_rows)
    base_VD = torch.randn(128, 64, generator=generator).to(torch.bfloat16)
    nudged_VD = base_VD.clone()
    nudged_VD[:, 5] += base_VD[:, 5].abs() * 2.0**-7
    matrix = PackedMatrix(torch.stack((base_VD, nudged_VD), dim=1).flatten(0, 1))
    x_RD = torch.randn(num_rows, 64, generator=generator).to(torch.bfloat16)
    logits_RV = matrix.logits(x_RD)
    assert (matrix(x_RD).topk(2).values.diff() == 0).any(), "no row is a tie in bfloat16: the test is void"
    assert torch.equal(matrix.argmax(x_RD), logits_RV.argmax(dim=-1))
