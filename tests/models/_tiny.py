"""Tiny random Llamas, ours and transformers', with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.device import Placement, Precision
from outrider.models.base import ForwardResult, PackedRows
from outrider.models.config import LlamaConfig, RopeConfig
from outrider.models.llama import LlamaTarget

CPU = torch.device("cpu")


def tiny_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_width": 8,
        "norm_eps": 1e-5,
        "max_positions": 1024,
        "tie_word_embeddings": False,
        "eos_token_ids": (0,),
    }
    return LlamaConfig(**{**values, **changes})


def tiny_target(precision: Precision = "float32", *, seed: int = 0, **changes: Any) -> LlamaTarget:
    return LlamaTarget.random(tiny_config(**changes), Placement(device=CPU, precision=precision), seed)


@dataclass(frozen=True)
class StateDict:
    """A checkpoint of a transformers model's own tensors."""

    config: LlamaConfig
    tensors: dict[str, Tensor]
    name: str = "tiny"
    fingerprint: str = "tiny"

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def transformers_pair(config: LlamaConfig, precision: Precision = "float32") -> tuple[Any, LlamaTarget]:
    """(transformers' model in float32, our target) with the same random weights."""
    import transformers

    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
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
            rope_parameters=_rope_parameters(config.rope),
            initializer_range=0.2,
        )
    ).eval()
    source = StateDict(config=config, tensors=dict(theirs.state_dict()))
    return theirs, LlamaTarget(source, Placement(device=CPU, precision=precision))


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind == "llama3":
        values["low_freq_factor"] = rope.low_freq_factor
        values["high_freq_factor"] = rope.high_freq_factor
        values["original_max_position_embeddings"] = rope.original_max_positions
    return values


def token_ids(count: int, *, seed: int = 0, vocab_size: int = 97) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(
    target: LlamaTarget,
    cache: Any,
    tokens: Sequence[Sequence[int]],
    slots: Sequence[int],
    *,
    parents: Sequence[tuple[int, ...] | None] | None = None,
    taps: Sequence[int] = (),
    logit_rows: tuple[int, ...] | None = None,
) -> ForwardResult:
    """One pass of ``tokens[i]`` behind what slot ``slots[i]`` holds."""
    starts = [cache.length(slot) for slot in slots]
    packed = PackedRows.pack(tokens, slots=slots, starts=starts, parents=parents, device=CPU, logit_rows=logit_rows)
    return target.forward(packed, cache, taps=taps)


def logits_alone(target: LlamaTarget, tokens: Sequence[int]) -> Tensor:
    """Logits of all rows of one sequence, read in one pass from an empty cache."""
    cache = target.new_cache()
    return run(target, cache, [tokens], [cache.allocate(len(tokens))]).logits_RV
