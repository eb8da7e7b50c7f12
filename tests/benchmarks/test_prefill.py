"""Reading prompts is timed on the real code, and rates count the layers' matrices."""

from __future__ import annotations

import torch
from benchmarks.prefill import num_layer_weights, read_prompt

from outrider.device import Placement
from outrider.models.config import LlamaConfig
from outrider.models.llama import LlamaTarget

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    norm_eps=1e-5,
    max_positions=64,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)


def test_a_prompt_is_read_in_chunks_and_forgotten() -> None:
    target = LlamaTarget.random(CONFIG, Placement(device=torch.device("cpu"), precision="float32"), seed=0)
    each = read_prompt(target, 20, 8, rounds=2)
    assert each["tokens"] == 20 and 0 < each["fastest_ms"] <= each["ms"]


def test_layer_weights_are_those_of_the_matrices() -> None:
    target = LlamaTarget.random(CONFIG, Placement(device=torch.device("cpu"), precision="float32"), seed=0)
    head = CONFIG.vocab_size * CONFIG.hidden_size
    assert num_layer_weights(target) == target.num_weight_bytes() // 4 - head
