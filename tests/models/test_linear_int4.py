"""4-bit parts in PyTorch: rows rounded group by group, and rows that know nothing of their companions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.device import Placement
from outrider.models.linear import Norm
from outrider.models.linear_int4 import round_groups
from outrider.models.llama_weights import make_kernels

WIDTH, INNER = 160, 96


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts() -> dict[str, Callable[[Tensor], Tensor]]:
    """Every kind of part as a function of rows ``[R, WIDTH]``."""
    kernels = make_kernels(Placement(device=torch.device("cpu"), precision="int4"), WIDTH)
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
def test_a_row_is_the_same_bits_whatever_its_companions_are(part: str) -> None:
    """Passes are padded to 16 rows, as the kernels ask; a companion is a thousand times as large."""
    x_RD = noise(32, WIDTH, seed=7)
    x_RD[-1] *= 1000
    together = PARTS[part](x_RD.clone())
    for row in (0, 5, 31):
        alone = torch.cat((x_RD[row : row + 1], torch.zeros(15, WIDTH)))
        assert torch.equal(PARTS[part](alone)[0], together[row])


@pytest.mark.parametrize("group", [32, 128])
def test_each_group_is_within_half_a_level_of_its_own_scale(group: int) -> None:
    x_RD = noise(6, WIDTH, seed=0)
    x_RD[:, :32] *= 1000
    rounded = round_groups(x_RD, group)
    for start in range(0, WIDTH, group):
        part = x_RD[:, start : start + group]
        step = part.abs().amax(dim=1, keepdim=True) / 127
        assert ((rounded[:, start : start + group] - part).abs() <= 0.501 * step).all()
    assert round_groups(torch.zeros(2, WIDTH), group).abs().max() == 0
