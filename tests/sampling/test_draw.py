"""Argmax and Gumbel-argmax, ties included."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.sampling.draw import argmax_tokens, draw_logits, draw_processed, draw_weights
from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import warp_logits

FIELDS = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(temperature=1.5, top_p=0.9),
    SamplingParams(temperature=3, top_p=0.999),
    SamplingParams(temperature=1, min_p=0.05),
    SamplingParams(temperature=1.2, top_k=300, top_p=0.95, min_p=0.001),
]


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


@pytest.mark.parametrize("vocab_size", [5, 2048])
@pytest.mark.parametrize("is_tied", [False, True])
def test_drawing_from_heads_is_drawing_from_the_whole_law(vocab_size: int, is_tied: bool) -> None:
    logits = torch.randn(len(FIELDS), vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    logits = logits.round() if is_tied else logits
    for seed in range(40):
        keys = [noise_key(seed, 0, row, Purpose.TARGET) for row in range(len(FIELDS))]
        expected = draw_logits(warp_logits(logits, FIELDS), gumbel_BV(keys, vocab_size))
        assert draw_processed(logits, FIELDS, keys) == expected
        assert [draw_processed(logits[i : i + 1], [f], [keys[i]])[0] for i, f in enumerate(FIELDS)] == expected
