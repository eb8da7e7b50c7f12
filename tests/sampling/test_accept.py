"""The acceptance rule at its edges."""

from __future__ import annotations

import torch

from outrider.sampling.accept import accepts_B, residual_BV


def accepts(target: float, draft: float, u: float, dtype: torch.dtype = torch.float64) -> bool:
    row = accepts_B(
        torch.tensor([target], dtype=dtype), torch.tensor([draft], dtype=dtype), torch.tensor([u], dtype=torch.float64)
    )
    return bool(row[0])


def test_kept_below_the_ratio_and_refused_above() -> None:
    assert accepts(0.3, 0.6, 0.4999999)
    assert not accepts(0.3, 0.6, 0.5000001)


def test_a_token_more_likely_under_the_target_is_always_kept() -> None:
    largest = 1 - 2.0**-53
    assert accepts(0.5, 0.5, largest)
    assert accepts(0.7, 0.1, largest)
    assert accepts(0.1, 0.1, largest, torch.float32)


def test_what_the_target_forbids_is_never_kept() -> None:
    assert not accepts(0.0, 0.5, 2.0**-53)
    assert not accepts(0.0, 1e-45, 2.0**-53, torch.float32)


def test_what_the_drafter_calls_impossible_is_refused() -> None:
    assert not accepts(0.9, 0.0, 2.0**-53)
    assert not accepts(0.0, 0.0, 2.0**-53)


def test_products_do_not_underflow() -> None:
    """float32's smallest number: u * draft is formed in float64."""
    assert not accepts(1e-45, 1.0, 0.5, torch.float32)
    assert not accepts(1e-45, 4e-45, 0.9, torch.float32)
    assert accepts(1e-45, 4e-45, 0.2, torch.float32)


def test_residual_is_the_positive_part_of_the_difference() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])
    draft = torch.tensor([[0.25, 0.0, 0.75], [0.5, 0.5, 0.0]])
    assert residual_BV(target, draft).tolist() == [[0.25, 0.5, 0.0], [0.0, 0.0, 0.5]]


def test_an_empty_residual_falls_back_to_the_target() -> None:
    target = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    draft = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    assert residual_BV(target, draft).tolist() == [[0.5, 0.5], [0.5, 0.0]]
