"""int8 parts: levels near what they stand for, and rows that know nothing of their companions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.device import Placement
from outrider.models.linear import Norm
from outrider.models.linear_int8 import quantize_rows, split_rows
from outrider.models.llama_weights import make_kernels

CPU = torch.device("cpu")
WIDTH, INNER = 32, 48
SIZES = torch.tensor([1e-3, 1.0, 1e3, 1.0, 7.0, 1e-6]).unsqueeze(1)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts() -> dict[str, Callable[[Tensor], Tensor]]:
    """Every kind of part as a function of rows ``[R, WIDTH]``."""
    kernels = make_kernels(Placement(device=CPU, precision="int8"), WIDTH)
    norm = Norm(weight_D=1 + noise(WIDTH, seed=1) / 4, eps=1e-5)
    residual = kernels.residual_projection(noise(WIDTH, WIDTH, seed=2))
    return {
        "norm_projection": kernels.norm_projection(noise(INNER, WIDTH, seed=3), norm),
        "residual_projection": lambda x_RD: residual(x_RD, x_RD.flip(-1)),
        "feed_forward": kernels.feed_forward(noise(2 * INNER, WIDTH, seed=4), noise(WIDTH, INNER, seed=5), norm),
        "head": kernels.head(noise(INNER, WIDTH, seed=6), norm),
    }


PARTS = parts()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("count", [2, 5, 8, 9, 33])
def test_a_row_is_the_same_bits_whatever_its_companions_are(part: str, count: int) -> None:
    """A companion a thousand times as large would take all levels away from a row that shares its scale."""
    x_RD = noise(count, WIDTH, seed=count)
    x_RD[-1] *= 1000
    together = PARTS[part](x_RD.clone())
    for row in range(count):
        assert torch.equal(PARTS[part](x_RD[row : row + 1].clone())[0], together[row])


def test_levels_are_within_half_a_level_of_each_rows_own_scale() -> None:
    x_RD = noise(6, WIDTH, seed=0) * SIZES
    levels, peaks_R1 = quantize_rows(x_RD)
    assert levels.abs().amax(dim=-1).tolist() == [127] * 6
    assert bool(((levels * peaks_R1 / 127 - x_RD).abs() <= 0.501 * peaks_R1 / 127).all())


def test_two_rows_of_levels_are_a_hundred_times_nearer() -> None:
    x_RF = noise(6, WIDTH, seed=0) * SIZES
    levels, peaks_R1 = split_rows(x_RF)
    restored = (levels[:6] + levels[6:] / 254) * peaks_R1 / 127
    assert bool(((restored - x_RF).abs() <= 0.0025 * peaks_R1 / 127).all())


@pytest.mark.parametrize("part", ["norm_projection", "head"])
def test_rows_of_zeros_stay_zero(part: str) -> None:
    assert not PARTS[part](torch.zeros(2, WIDTH)).any()
