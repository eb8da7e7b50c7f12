"""The real model in our runtime against transformers with the very same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ._tiny import logits_alone, run

TEXT = "<|im_start|>user\nWrite a haiku about a drafting horse.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def theirs(real_target_f32: Any) -> Any:
    import transformers

    config, checkpoint = real_target_f32.config, real_target_f32.checkpoint
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_width,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_parameters={"rope_type": config.rope.kind, "rope_theta": config.rope.theta},
        )
    ).eval()
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    model.load_state_dict({name: checkpoint.tensor(name) for name in names}, strict=False)
    model.tie_weights()
    return model


@pytest.mark.real_model
def test_logits_and_greedy_continuation_are_those_of_transformers(real_target_f32: Any, theirs: Any) -> None:
    tokens = real_target_f32.tokenizer.encode(TEXT)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
        continued = theirs.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)[0].tolist()
    got = logits_alone(real_target_f32, tokens)
    assert (got - expected).abs().max() < 2e-3
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    cache = real_target_f32.new_cache()
    slot = cache.allocate(64)
    new = list(tokens)
    for _ in range(12):
        new.append(int(run(real_target_f32, cache, [new[cache.length(slot) :]], [slot]).logits_RV[-1].argmax()))
    assert new[: len(continued)] == continued


def _copies(target: Any, bounds: dict[str, float]) -> list[tuple[Any, float]]:
    return [(target.requantized(precision), bound) for precision, bound in bounds.items()]


@pytest.mark.real_model
def test_lower_precisions_agree_with_float32(real_target_f32: Any, real_target_bf16: Any) -> None:
    tokens = real_target_f32.tokenizer.encode(TEXT * 3)
    exact = logits_alone(real_target_f32, tokens).log_softmax(-1)
    for target, bound in ((real_target_bf16, 0.005), *_copies(real_target_f32, {"int8": 0.05, "int4": 0.01})):
        got = logits_alone(target, tokens).log_softmax(-1)
        divergence = (exact.exp() * (exact - got)).sum(-1).mean()
        assert divergence < bound
