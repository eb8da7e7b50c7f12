"""Argmax and Gumbel-argmax, ties included."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.sampling.draw import argmax_tokens, draw_logits, draw_weights


@pytest.mark.parametrize("vocab_size", [1, 3, 256, 512, 700, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_argmax_gives_ties_to_the_lowest_id(vocab_size: int, dtype: torch.dtype) -> None:
    scores = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size), dtype=dtype)
    scores[1] = scores[0].round()
    scores[2] = 0.0
    scores[3] = -math.inf
    scores[3, -1] = -1e30
    expected = [max(range(vocab_size), key=lambda t, row=row: (row[t], -t)) for row in scores.tolist()]
    assert argmax_tokens(scores) == expected


def test_argmax_of_rows_that_are_not_contiguous() -> None:
    scores = torch.randn(512, 6).t()
    assert argmax_tokens(scores) == scores.argmax(-1).tolist()


def test_draw_adds_the_noise_and_never_draws_the_forbidden() -> None:
    noise = torch.tensor([[0.0, 3.0, 50.0]], dtype=torch.float64)
    assert draw_logits(torch.tensor([[1.0, 0.0, -math.inf]]), noise.clone()) == [1]
    assert draw_weights(torch.tensor([[1.0, 0.0, 0.001]]), noise.clone()) == [2]
    assert draw_weights(torch.tensor([[1.0, 0.0, 0.0]]), noise.clone()) == [0]
