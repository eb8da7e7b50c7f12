"""Lean losses against the eager definition, in float64; the definition against what it must mean."""

from __future__ import annotations

import pytest
import torch

from outrider.train import losses
from outrider.train.losses import LOSSES, LossName, dense_laws, lean_loss, row_losses, step_weights

NUM_ROWS, SIZE, WIDTH = 7, 11, 5


def laws(rows: int = NUM_ROWS, mass: float = 0.8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return mass * (2 * torch.randn(rows, SIZE, generator=generator, dtype=torch.float64)).softmax(-1)


def sparse_laws(kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    probs, ids = laws().topk(kept, dim=-1)
    probs[2, 1:] = 0  # tokens that the head cannot say: probability 0 at id 0
    ids[2, 1:] = 0
    return ids, probs


@pytest.mark.parametrize("name", LOSSES)
def test_lean_is_eager(name: LossName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ROW_PAD", 2)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(NUM_ROWS, generator=generator, dtype=torch.float64)
    sparse = sparse_laws(4)
    total, rows = lean_loss(hidden, head, sparse, weights, name=name, piece=3)
    (3 * total).backward()
    assert hidden.grad is not None and head.grad is not None
    found = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None
    eager = row_losses(hidden @ head.T, dense_laws(*sparse, SIZE), name)
    torch.testing.assert_close(rows, eager.detach())
    (3 * (eager * weights).sum()).backward()
    torch.testing.assert_close(found, (hidden.grad, head.grad))


@pytest.mark.parametrize("name", LOSSES)
def test_the_targets_own_law_is_the_best(name: LossName) -> None:
    """No change of the logits lowers the loss once the head says what the target says."""
    law = laws(mass=1.0)
    logits = law.log().requires_grad_(True)
    row_losses(logits, law, name).sum().backward()
    assert logits.grad is not None
    if name in ("ce", "kl"):
        torch.testing.assert_close(logits.grad, torch.zeros_like(law))
    worse = row_losses(law.log() + 0.3 * torch.randn_like(law), law, name)
    assert bool((worse > row_losses(law.log(), law, name)).all())


def test_divergences_are_zero_at_the_target_and_tv_is_refusal() -> None:
    law = laws(mass=1.0)
    for name in ("kl", "tv", "lk"):
        torch.testing.assert_close(row_losses(law.log(), law, name), torch.zeros(len(law), dtype=torch.float64))  # type: ignore[arg-type]
    other = laws(mass=0.6)
    kept = torch.minimum(other, torch.full_like(other, 1 / SIZE)).sum(-1)
    torch.testing.assert_close(row_losses(torch.zeros_like(other), other, "tv"), 1 - kept)


def test_a_law_without_mass_costs_nothing() -> None:
    nothing = torch.zeros(2, SIZE, dtype=torch.float64)
    logits = torch.randn(2, SIZE, dtype=torch.float64, requires_grad=True)
    row_losses(logits, nothing, "ce").sum().backward()
    torch.testing.assert_close(logits.grad, nothing)


def test_step_weights() -> None:
    assert step_weights(3, 1.0) == pytest.approx([1 / 3] * 3)
    assert step_weights(2, 0.5) == pytest.approx([2 / 3, 1 / 3])
