"""Rotary embedding against the textbook form, norm and gate against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.models.config import RopeConfig
from outrider.models.layers import Rotary, gated, inverse_frequencies, rms_norm

from ._tiny import tiny_config


def rotate_by_pairs(x_HC: Tensor, position: int, frequencies: Tensor) -> Tensor:
    """Each pair (i, i + C / 2) as a complex number, turned by position * frequency."""
    first, second = x_HC.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.exp(1j * position * frequencies.double())
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("position", [0, 1, 37, 1000])
def test_queries_and_keys_turn_and_values_do_not(position: int) -> None:
    config = tiny_config()
    qkv_RNC = torch.randn(1, 6 + 2 + 2, 8, generator=torch.Generator().manual_seed(0))
    rotary = Rotary(config, dtype=torch.float32, device=torch.device("cpu"))
    got = rotary.at(torch.tensor([position])).apply(qkv_RNC)
    expected = rotate_by_pairs(qkv_RNC[0, :8], position, inverse_frequencies(config.rope, 8))
    torch.testing.assert_close(got[0, :8].double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(got[0, 8:], qkv_RNC[0, 8:])


def test_default_and_linear_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(theta=100.0), 4)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1]))
    slowed = inverse_frequencies(RopeConfig(theta=100.0, kind="linear", factor=4.0), 4)
    torch.testing.assert_close(slowed, torch.tensor([0.25, 0.025]))


def test_llama3_keeps_fast_slows_slow_and_blends_between() -> None:
    rope = RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_positions=8192)
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    ratio = inverse_frequencies(rope, 128) / plain
    turns = 8192 * plain / (2 * torch.pi)
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 2 and bool((between.diff() < 0).all())


def test_norm_and_gate() -> None:
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(rms_norm(x, torch.tensor([1.0, 2.0]), 0.0), x / 12.5**0.5 * torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(
        gated(torch.tensor([[0.0, 2.0, 5.0, 3.0]])), torch.tensor([[0.0, 6 / (1 + 2.718281828**-2)]])
    )
