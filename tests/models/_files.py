"""Tiny model files, written by other libraries than the one under test where there is one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from outrider.models.checkpoint import expected_shapes
from outrider.models.config import LlamaConfig
from outrider.models.tokenizer import _BYTE_OF, Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTE_TOKENS = [text for text, _ in sorted(_BYTE_OF.items(), key=lambda pair: pair[1])]
MERGES = ["h e", "l l", "he ll", "Ġ w", "Ã ©"]
TOKENS = [*SPECIALS, *BYTE_TOKENS, *(merge.replace(" ", "") for merge in MERGES)]
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_width": 16,
        "norm_eps": 1e-5,
        "max_positions": 256,
        "tie_word_embeddings": True,
        "eos_token_ids": (2,),
    }
    return LlamaConfig(**{**values, **changes})


def random_tensors(shape: LlamaConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) * 0.1 for name, size in expected_shapes(shape).items()}


def llama_cpp_permute(weight: Tensor, num_heads: int) -> Tensor:
    """The reordering that llama.cpp's converter applies, written out row by row."""
    width = weight.shape[0] // num_heads
    rows = []
    for head in range(num_heads):
        for row in range(width):
            rows.append(head * width + row // 2 + (row % 2) * (width // 2))
    return weight[rows]


def write_gguf(
    path: Path,
    shape: LlamaConfig,
    tensors: Mapping[str, Tensor],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write with the gguf library. ``keys`` adds or overrides metadata; a value of ``None`` leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(shape), **(keys or {})}.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        values = tensor
        if name.endswith("q_proj.weight"):
            values = llama_cpp_permute(tensor, shape.num_heads)
        if name.endswith("k_proj.weight"):
            values = llama_cpp_permute(tensor, shape.num_kv_heads)
        data = values.float().numpy()
        stored = gguf.GGMLQuantizationType.F32 if data.ndim == 1 else kind
        writer.add_tensor(gguf_name(name), gguf.quantize(data, stored), raw_dtype=stored)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _metadata(shape: LlamaConfig) -> dict[str, Any]:
    return {
        "llama.context_length": shape.max_positions,
        "llama.embedding_length": shape.hidden_size,
        "llama.block_count": shape.num_layers,
        "llama.feed_forward_length": shape.intermediate_size,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.key_length": shape.head_width,
        "llama.attention.value_length": shape.head_width,
        "llama.rope.dimension_count": shape.head_width,
        "llama.rope.freq_base": shape.rope.theta,
        "llama.attention.layer_norm_rms_epsilon": shape.norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def backend(*, specials: tuple[str, ...] = tuple(SPECIALS)) -> Backend:
    """The same tokenizer, built by hand the way the model's own ``tokenizer.json`` has it."""
    built = Backend(
        models.BPE(
            vocab={token: index for index, token in enumerate(TOKENS)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in MERGES)],
        )
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    built.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return built


def tokenizer(**changes: Any) -> Tokenizer:
    values: dict[str, Any] = {"eos_token_ids": (2,), "chat_template": CHATML}
    return Tokenizer(backend(), **{**values, **changes})


def write_folder(folder: Path, shape: LlamaConfig, tensors: Mapping[str, Tensor], **changes: Any) -> Path:
    """A Hugging Face folder with one safetensors file; ``changes`` add to or (as ``None``) leave out config keys."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    values = {**hf_config(shape), **changes}
    write_json(folder / "config.json", {name: value for name, value in values.items() if value is not None})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    backend().save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "chat_template": CHATML,
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>"},
            "pad_token": None,
        },
    )
    return folder


def hf_config(shape: LlamaConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_width,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
