"""Where transformers defines the same processing, ours gives the same logits."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.sampling.laws import process_logits
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.sampling.warp import warp_logits

VOCAB = 500


def random_logits(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.equal(ours == -math.inf, theirs == -math.inf)
    assert torch.allclose(ours.nan_to_num(neginf=0), theirs.nan_to_num(neginf=0), atol=1e-5)


@pytest.mark.parametrize("value", [0.3, 0.9, 2.0])
def test_temperature(value: float) -> None:
    ours = warp_logits(random_logits(), [SamplingParams(temperature=value)] * 6)
    same(ours, TemperatureLogitsWarper(value)(None, random_logits()))


@pytest.mark.parametrize("value", [1, 7, 50, 499])
def test_top_k(value: int) -> None:
    ours = warp_logits(random_logits(), [SamplingParams(temperature=1, top_k=value)] * 6)
    same(ours, TopKLogitsWarper(value)(None, random_logits()))


@pytest.mark.parametrize("value", [0.05, 0.5, 0.9, 0.99])
def test_top_p(value: float) -> None:
    ours = warp_logits(random_logits(), [SamplingParams(temperature=1, top_p=value)] * 6)
    same(ours, TopPLogitsWarper(value)(None, random_logits()))


@pytest.mark.parametrize("value", [0.02, 0.2, 0.7])
def test_min_p(value: float) -> None:
    ours = warp_logits(random_logits(), [SamplingParams(temperature=1, min_p=value)] * 6)
    same(ours, MinPLogitsWarper(value)(None, random_logits()))


def test_chain_of_warpers_in_our_order() -> None:
    fields = SamplingParams(temperature=1.4, min_p=0.03, top_k=40, top_p=0.8)
    theirs = random_logits()
    for warper in (TemperatureLogitsWarper(1.4), MinPLogitsWarper(0.03), TopKLogitsWarper(40), TopPLogitsWarper(0.8)):
        theirs = warper(None, theirs)
    same(warp_logits(random_logits(), [fields] * 6), theirs)


def processed(fields: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    state = SamplingState(fields, prompt_tokens=prompt, vocab_size=VOCAB, eos_token_ids=(0,), seed=0, choice=0)
    state.commit(output)
    return process_logits(random_logits(1), [state], [()])


@pytest.mark.parametrize("value", [0.8, 1.3])
def test_repetition_penalty(value: float) -> None:
    prompt, output = [5, 9, 400, 5], [17, 9]
    ours = processed(SamplingParams(temperature=1, repetition_penalty=value), prompt, output)
    same(ours, RepetitionPenaltyLogitsProcessor(value)(torch.tensor([prompt + output]), random_logits(1)))


def test_bad_words() -> None:
    words = [[4], [17, 9, 30], [9, 31], [8, 32]]
    ours = processed(SamplingParams(bad_words_token_ids=words), [1], [17, 9])
    same(ours, NoBadWordsLogitsProcessor(words, eos_token_id=0)(torch.tensor([[17, 9]]), random_logits(1)))
