"""Sampling fields in the order of each engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.audit.orders import ORDERS, History, order_of, warped_logits
from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState

PROMPT, OUTPUT = (3, 3, 5), (2, 6, 2)
OURS = "masks,bias,penalties,temperature,min_p,top_k,top_p"


def history(params: SamplingParams, vocab_size: int = 12) -> History:
    state = SamplingState(params, prompt_tokens=PROMPT, vocab_size=vocab_size, eos_token_ids=(0,), seed=0, choice=0)
    state.commit(OUTPUT[:1])
    return History(state=state, prompt=PROMPT, paths=[OUTPUT[1 : 1 + size] for size in range(3)])


def law(order: str, logits_TV: Tensor, **fields: Any) -> Tensor:
    params = SamplingParams(**{"temperature": 0.7, **fields})
    return warped_logits(logits_TV.clone(), history(params, logits_TV.shape[1]), order_of(order)).softmax(dim=-1)


@pytest.mark.parametrize("seed", range(12))
def test_our_order_in_stages_is_what_the_engine_runs(seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(3, 12, generator=noise, dtype=torch.float64) * 3
    fields: dict[str, Any] = {
        "top_p": 0.8 if seed % 2 else 1.0,
        "top_k": 5 if seed % 3 else 0,
        "min_p": 0.05 if seed % 4 else 0.0,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": -0.4,
        "logit_bias": {4: 2.0, 6: -1.0},
        "bad_words_token_ids": ((6, 2), (9,)),
        "min_tokens": 3,
    }
    torch.testing.assert_close(law(OURS, logits_TV, **fields), law("vllm", logits_TV, **fields), atol=1e-6, rtol=0)


def test_llama_cpp_cuts_before_temperature_and_counts_the_prompt() -> None:
    logits_TV = torch.tensor([[2.0, 1.0, 0.0, 3.0, -1.0, 0.5, -2.0]] * 3).double()
    flat = law("vllm", logits_TV, temperature=3.0, top_p=0.8)
    sharp = law("llama.cpp", logits_TV, temperature=3.0, top_p=0.8)
    assert (sharp > 0).sum() < (flat > 0).sum()
    kept = logits_TV[0, [3, 0]] / 3
    torch.testing.assert_close(sharp[0, [3, 0]], kept.softmax(dim=-1))
    ours = law("vllm", logits_TV, temperature=1.0, frequency_penalty=1.0)
    theirs = law("llama.cpp", logits_TV, temperature=1.0, frequency_penalty=1.0)
    # The prompt holds token 3 twice, the output token 2 once by then.
    expected = (logits_TV[0] - torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0, 1.0, 0.0])).softmax(dim=-1)
    torch.testing.assert_close(theirs[0], expected)
    assert ours[0, 3] > theirs[0, 3]


def test_sglang_adds_before_it_multiplies_and_looks_at_the_output_alone() -> None:
    logits_TV = torch.tensor([[2.0, 1.0, 0.5, 3.0, -1.0, 0.5, 1.0]] * 3).double()
    fields = {"temperature": 1.0, "repetition_penalty": 2.0, "presence_penalty": 1.0}
    row = logits_TV[0].clone()
    row[2] = (row[2] - 1.0) * 2.0
    torch.testing.assert_close(law("sglang", logits_TV, **fields)[0], row.softmax(dim=-1))
    row = logits_TV[0].clone()
    row[[3, 5]] /= 2
    row[2] = row[2] / 2 - 1
    torch.testing.assert_close(law("vllm", logits_TV, **fields)[0], row.softmax(dim=-1))


def test_min_p_last_leaves_what_top_p_on_the_rest_would_cut() -> None:
    # min_p leaves 0.5, 0.3, 0.08; of those the first two reach 0.9. Of everything, 0.9 takes four, of which min_p drops one.
    probs = torch.tensor([[0.5, 0.3, 0.08, 0.06, 0.06]] * 3).double()
    fields = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.15}
    counts = {name: int((law(name, probs.log(), **fields)[0] > 0).sum()) for name in ("vllm", "transformers", "sglang")}
    assert counts == {"vllm": 2, "transformers": 3, "sglang": 3}


def test_top_k_ties_and_masks() -> None:
    logits_TV = torch.tensor([[1.0, 1.0, 1.0, 0.0]] * 3).double()
    assert (law("tgi", logits_TV, top_k=1)[0] > 0).sum() == 3, "their cut keeps every token of a tie"
    banned = law("sglang", logits_TV, bad_words_token_ids=((1,),))
    assert banned[0, 1] == 0 and math.isclose(float(banned[0].sum()), 1)


@pytest.mark.parametrize("name", ["vlm", "top_k,top_k", "temperature,heat", ""])
def test_unknown_orders_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="processor order"):
        order_of(name)


def test_every_engines_stages_are_known() -> None:
    for order in ORDERS.values():
        if order.stages:
            assert order_of(",".join(order.stages)).stages == order.stages
