"""Native norms, gated activations, rotary embeddings and products against plain forms, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafters.eagle_head import EagleHead
from outrider.native import training
from outrider.native.library import Context, Unavailable
from outrider.native.training_rows import row_kernels
from outrider.train.functions import SharedWeight, gated, linear, rotate, unit_norm
from outrider.train.losses import lean_loss
from outrider.train.unroll import UnrolledHead
from tests.drafters.heads import tiny_head
from tests.train.native_sets import use
from tests.train.test_unroll import NUM_STEPS, random_batch


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cosines(x: Tensor) -> Tensor:
    return noise(x.shape[0], 1, x.shape[2], seed=8).to(x.dtype)


Form = Callable[..., Tensor]
FORMS: dict[str, tuple[Form, Sequence[Tensor]]] = {
    "norm": (lambda x: unit_norm(x, 1e-5), (3 * noise(70, 96),)),
    "norm of one row": (lambda x: unit_norm(x, 1e-5), (noise(1, 16),)),
    "norm with a weight": (lambda x, weight: unit_norm(x, 1e-5, weight), (noise(70, 96), noise(96, seed=1).float())),
    "norm of steps": (lambda x, weight: unit_norm(x, 1e-5, weight), (noise(3, 20, 32), noise(32, seed=1).float())),
    "gated": (gated, (4 * noise(33, 96),)),
    "rotate": (lambda x: rotate(x, cosines(x), cosines(x).flip(0)), (noise(33, 3, 64),)),
    "linear, more out": (linear, (noise(70, 40), noise(130, 40, seed=1))),
    "linear, more in": (linear, (noise(33, 130), noise(40, 130, seed=1))),
    "linear, many rows": (linear, (noise(1500, 40), noise(70, 40, seed=1))),
}


def run(form: Form, given: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """What comes out, and the gradients; what is float32 stays so beside bfloat16."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [x.detach().to(dtype if x.dtype == torch.bfloat16 else wide).requires_grad_(True) for x in given]
    out = form(*inputs)
    out.backward(noise(*out.shape, seed=5).to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, of all values together."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FORMS)
def test_native_form_is_the_plain_one(kernels: str, name: str) -> None:
    """One rounding to bfloat16 of each value that comes out, at most 2^-9: sums and what lies between are float32."""
    form, given = FORMS[name]
    found, wanted = run(form, given), run(form, given, torch.float64)
    assert len(found) == len(given) + 1
    for ours, right in zip(found, wanted, strict=True):
        assert ours.shape == right.shape and error(ours, right) <= 2**-9
        assert bool(((ours.double() - right).abs() <= 2**-8 * right.abs().max()).all())


@pytest.mark.parametrize("name", FORMS)
def test_same_bits_from_any_number_of_threads(kernels: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(*FORMS[name])
    use(monkeypatch, kernels, 2)
    for first, second in zip(alone, run(*FORMS[name]), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("sizes", [(40, 130), (130, 40)])
def test_a_shared_matrix_rounds_its_gradient_once(kernels: str, sizes: tuple[int, int]) -> None:
    """Three uses, of few rows and of more than one chunk, are summed in float32: no error of theirs adds up."""
    num_in, num_out = sizes
    uses = [noise(rows, num_in, seed=rows) for rows in (33, 1400, 70)]
    slopes = [noise(len(x), num_out, seed=len(x) + 1) for x in uses]
    weight = noise(num_out, num_in).requires_grad_(True)
    shared = SharedWeight(weight)
    total = sum((linear(x, shared) * slope).sum() for x, slope in zip(uses, slopes, strict=True))
    assert isinstance(total, Tensor)
    total.backward()
    wanted = sum(slope.double().T @ x.double() for x, slope in zip(uses, slopes, strict=True))
    assert weight.grad is not None and isinstance(wanted, Tensor)
    assert error(weight.grad, wanted) <= 2**-9 and shared.num_uses == 0


def test_other_rows_take_the_plain_form(kernels: str) -> None:
    assert row_kernels(noise(2, 32), 32) is not None
    assert row_kernels(noise(2, 40), 40) is None  # registers hold 16
    assert row_kernels(noise(2, 32).float(), 32) is None and row_kernels(noise(2, 32).double(), 32) is None


def test_a_missing_compiler_is_noticed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(kernels: str, num_threads: int) -> Context:
        tries.append(kernels)
        raise Unavailable("no compiler")

    monkeypatch.setattr(training, "open_context", fail)
    monkeypatch.setattr(training, "requested_kernels", lambda: "none of these")
    assert training.training_kernels() is None and training.training_kernels() is None
    assert tries == ["none of these"]


def test_a_gate_far_from_zero(kernels: str) -> None:
    gate_up = torch.cat((torch.tensor([[-1e30, -100, -20, 0, 20, 100, 3e38] + [0.0] * 9]), torch.ones(1, 16)), dim=1)
    out, slope = run(gated, (gate_up.bfloat16(),))
    assert out[0, :7].tolist() == pytest.approx([0, 0, 0, 0, 20, 100, 3e38], rel=2**-8, abs=1e-6)
    assert bool(slope.isfinite().all())


def head_gradients(head: EagleHead, dtype: torch.dtype) -> list[Tensor]:
    """Of the loss of one batch, by all parameters."""
    head.zero_grad()
    batch = random_batch(head)
    hidden_NQD, head_UD = UnrolledHead(head, dtype=dtype)(batch, NUM_STEPS)
    at, rows = batch.is_live_NQ, batch.is_live_NQ.nonzero(as_tuple=True)
    laws = batch.law_ids_QK[rows[0] + rows[1]], batch.law_probs_QK[rows[0] + rows[1]]
    total, _ = lean_loss(hidden_NQD[at], head_UD, laws, torch.ones(int(at.sum()), dtype=laws[1].dtype), name="ce")
    total.backward()
    return [p.grad.clone() for p in head.parameters() if p.grad is not None]


@pytest.mark.parametrize("changes", [{}, {"num_layers": 2, "norm_output": True, "fc_bias": True, "fc_norm": True}])
def test_the_whole_unroll(kernels: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all parameters: as near to float64 as plain bfloat16 products come, rounding by rounding."""
    head = tiny_head(**changes).requires_grad_(True)
    found = head_gradients(head, torch.bfloat16)
    use(monkeypatch, None)
    plain = head_gradients(head, torch.bfloat16)
    assert head.embedding is not None
    exact = head.to(torch.float64)
    exact.attach_embedding(head.embedding.double())
    wanted = head_gradients(exact, torch.float64)
    assert len(found) == len(plain) == len(wanted)
    for ours, theirs, right in zip(found, plain, wanted, strict=True):
        assert error(ours, right) <= 1.5 * error(theirs, right) + 2**-7
