"""The lean unroll is the module's own forward pass with the reference attention, in float64, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafters.eagle_head import EagleHead, UnrolledAttention
from outrider.train.corpus import Text
from outrider.train.losses import dense_laws, lean_loss, row_losses
from outrider.train.packing import TextStates, TrainBatch, pack_batch, rows_of
from outrider.train.unroll import UnrolledHead
from tests.drafters.heads import tiny_head

NUM_STEPS = 4


def text_of(tokens: list[int], trained: str, id: str = "a") -> Text:
    return Text(id=id, line=1, tokens=tuple(tokens), trained=tuple(mark == "x" for mark in trained))


TEXTS = (
    text_of([3, 5, 7, 2, 9, 11, 4, 8], "...xxxxx"),
    text_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], "..xxx...xxxx", "b"),
)


def wide_head(**changes: Any) -> EagleHead:
    head = tiny_head(**changes).to(torch.float64)
    assert head.embedding is not None
    head.attach_embedding(head.embedding.to(torch.float64))
    return head.requires_grad_(True)


def random_batch(head: EagleHead) -> TrainBatch:
    generator = torch.Generator().manual_seed(1)
    width = head.config.num_taps * head.config.target_hidden_size
    states = []
    for text in TEXTS:
        rows = rows_of(text)
        law = torch.rand(len(rows.queries), 3, generator=generator, dtype=torch.float64) / 3
        ids = torch.randint(0, head.config.draft_vocab_size, law.shape, generator=generator)
        taps = torch.randn(rows.num_keys, width, generator=generator, dtype=torch.float64)
        states.append(TextStates(taps_SD=taps, law_ids_QK=ids, law_probs_QK=law))
    return pack_batch(TEXTS, states, num_steps=NUM_STEPS)


def reference_logits(head: EagleHead, batch: TrainBatch) -> list[Tensor]:
    """Logits of every step at the query rows, text by text through the module itself."""
    pieces: list[list[Tensor]] = [[] for _ in range(NUM_STEPS)]
    taps = batch.taps_RD[: batch.num_keys].split([num_keys for num_keys, _ in batch.plan_texts])
    for text, taps_SD, (num_keys, queries) in zip(TEXTS, taps, batch.plan_texts, strict=True):
        attend = UnrolledAttention(torch.ones(1, num_keys, num_keys, dtype=torch.bool).tril())
        hidden = head.fuse(taps_SD[None])
        padded = [*text.tokens, *[0] * NUM_STEPS]
        for step in range(NUM_STEPS):
            tokens = torch.tensor([padded[step + 1 : step + 1 + num_keys]])
            output = head(hidden, tokens, torch.arange(num_keys)[None] + step, attend)
            pieces[step].append(head.logits(output)[0, list(queries)])
            hidden = head.feedback(output)
    return [torch.cat(each) for each in pieces]


def test_rows_of_a_text() -> None:
    rows = rows_of(TEXTS[1])
    assert (rows.num_keys, rows.queries, rows.num_steps) == (10, (1, 2, 7, 8, 9), (2, 1, 3, 2, 1))
    assert rows_of(text_of([1, 2, 3], "..x")).queries == ()


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "norms and bias": {"fc_norm": True, "fc_bias": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_lean_unroll_is_the_module(shape: str) -> None:
    head = wide_head(**SHAPES[shape])
    batch = random_batch(head)
    outputs, weights = UnrolledHead(head, dtype=torch.float64)(batch, NUM_STEPS)
    logits = outputs @ weights.T
    for step, expected in enumerate(reference_logits(head, batch)):
        live = batch.is_live_NQ[step, : batch.num_queries]
        own = logits[step, : batch.num_queries]
        torch.testing.assert_close(own[live], expected[live], rtol=1e-4, atol=1e-5)  # its softmax is float32


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_the_whole_are_autograds(shape: str) -> None:
    head = wide_head(**SHAPES[shape])
    batch = random_batch(head)
    laws = dense_laws(batch.law_ids_QK, batch.law_probs_QK, head.config.draft_vocab_size)
    laws = torch.cat((laws, laws.new_zeros(NUM_STEPS, laws.shape[1])))
    live = batch.is_live_NQ[:, : batch.num_queries].double()
    outputs, weights = UnrolledHead(head, dtype=torch.float64)(batch, NUM_STEPS)
    steps, queries = batch.is_live_NQ.nonzero(as_tuple=True)
    rows = batch.law_ids_QK[queries + steps], batch.law_probs_QK[queries + steps]
    total, _ = lean_loss(outputs[steps, queries], weights, rows, torch.ones(len(steps)).double(), name="ce", piece=3)
    total.backward()
    found = {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}
    head.zero_grad()
    reference = torch.zeros((), dtype=torch.float64)
    for step, logits in enumerate(reference_logits(head, batch)):
        losses = row_losses(logits, laws[step : step + batch.num_queries], "ce")
        reference = reference + (losses * live[step]).sum()
    torch.testing.assert_close(total, reference, rtol=1e-5, atol=1e-6)
    reference.backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
