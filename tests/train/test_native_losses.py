"""The native loss against float64 and against plain bfloat16 products, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.train import losses
from outrider.train.losses import LOSSES, LossName, dense_laws, lean_loss, row_losses
from tests.train.native_sets import use

Found = tuple[Tensor, Tensor, Tensor]


def problem(num_rows: int, size: int, width: int, num_kept: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden rows, head, a sparse law's ids and probabilities, weights of rows."""
    generator = torch.Generator().manual_seed(num_rows + size)
    hidden = torch.randn(num_rows, width, generator=generator).bfloat16()
    head = (torch.randn(size, width, generator=generator) * 2 * width**-0.5).bfloat16().float()
    probs, ids = (0.8 * (2 * torch.randn(num_rows, size, generator=generator)).softmax(-1)).topk(num_kept, dim=-1)
    probs[0, 1:] = 0  # tokens that the head cannot say: probability 0 at id 0
    ids[0, 1:] = 0
    return hidden, head, ids, probs, torch.rand(num_rows, generator=generator)


def run(hidden: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, name: LossName = "ce") -> Found:
    """Rows' losses, and gradients by hidden rows and head."""
    hidden, head = hidden.clone().requires_grad_(True), head.clone().requires_grad_(True)
    total, rows = lean_loss(hidden, head, (ids, probs), weights, name=name)
    total.backward()
    assert hidden.grad is not None and head.grad is not None
    return rows, hidden.grad, head.grad


def exact(hidden: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, name: LossName = "ce") -> Found:
    """The eager definition in float64."""
    hidden, head = hidden.double().requires_grad_(True), head.double().requires_grad_(True)
    rows = row_losses(hidden @ head.T, dense_laws(ids, probs.double(), len(head)), name)
    (rows * weights).sum().backward()
    assert hidden.grad is not None and head.grad is not None
    return rows.detach(), hidden.grad, head.grad


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, of all values together."""
    return float((found.double() - expected).norm() / expected.norm())


# Rows, outputs and widths on and off the tiles' 32; more outputs than one chunk of 16 tiles; a single row.
SHAPES = ((70, 100, 50), (32, 64, 32), (1, 33, 64), (300, 530, 96))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSES)
def test_native_loss_is_the_eager_one(
    kernels: str, name: LossName, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exponentials, scaled rows and what comes out are rounded to bfloat16, 2^-9 each at most, as in plain products."""
    given = problem(*shape)
    found, wanted = run(*given, name), exact(*given, name)
    with monkeypatch.context() as patch:
        use(patch, None)
        plain = run(*given, name)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=2**-8, atol=2**-8)
    for ours, theirs, right in zip(found[1:], plain[1:], wanted[1:], strict=True):
        assert error(ours, right) <= max(1.5 * error(theirs, right), 3 * 2**-9)


def test_pieces_add_up(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(300, 100, 50)
    whole = run(*given)
    monkeypatch.setattr(losses, "_NATIVE_PIECE", 100)
    apart = run(*given)
    assert torch.equal(whole[0], apart[0]) and torch.equal(whole[1], apart[1])
    torch.testing.assert_close(apart[2], whole[2], rtol=1e-4, atol=1e-5)


def test_same_bits_from_any_number_of_threads(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(300, 200, 50)
    alone, again = run(*given), run(*given)
    use(monkeypatch, kernels, 2)
    for first, second, third in zip(alone, again, run(*given), strict=True):
        assert torch.equal(first, second) and torch.equal(first, third)


@pytest.mark.parametrize(("size", "above"), [(40, 75), (130, 75), (130, 200)])
def test_a_logit_far_above_the_first_ones(kernels: str, size: int, above: int) -> None:
    """Exponentials are relative to the first 32 logits until they grow too large; here the last output is far above."""
    hidden, head, ids, probs, weights = problem(3, size, 32)
    hidden[:, 0], head[:, 0], head[-1, 0] = 1, 0, above
    found, wanted = run(hidden, head, ids, probs, weights), exact(hidden, head, ids, probs, weights)
    # A logit more than 87 below the largest has no exponential in float32, and the loss counts it as just that far below.
    if above < 80:
        torch.testing.assert_close(found[0].double(), wanted[0], rtol=2**-8, atol=2**-8)
    assert bool(found[0].isfinite().all())
    assert error(found[1], wanted[1]) < 3 * 2**-9 and error(found[2], wanted[2]) < 3 * 2**-9


def test_nan_shows_in_its_row_alone(kernels: str) -> None:
    hidden, head, *rest = problem(70, 100, 50)
    hidden[40, 7] = torch.nan
    rows = run(hidden, head, *rest)[0]
    assert not bool(rows[40].isfinite()) and bool(rows[:40].isfinite().all()) and bool(rows[41:].isfinite().all())
    hidden[40, 7], head[3, 2] = 0, torch.nan
    assert not bool(run(hidden, head, *rest)[1].isfinite().all())
