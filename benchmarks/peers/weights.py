"""The same weights in the form that each peer reads: a Hugging Face folder written from our checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.models.checkpoint import Checkpoint

__all__ = ["write_hf_folder"]


def write_hf_folder(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write config, float32 weights and tokenizer once; ``fingerprint.txt`` says of which checkpoint.

    The weights are written as our checkpoint reads them (dequantised, not rounded), so that each peer rounds for itself.
    """
    import torch
    from safetensors.torch import save_file

    stamp = folder / "fingerprint.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == checkpoint.fingerprint:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: checkpoint.tensor(name).to(torch.float32).contiguous() for name in checkpoint.tensor_names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", hf_config(checkpoint))
    _write_json(folder / "generation_config.json", {"eos_token_id": list(checkpoint.config.eos_token_ids)})
    _write_tokenizer(checkpoint, folder)
    stamp.write_text(checkpoint.fingerprint, encoding="utf-8")
    return folder


def hf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json`` of a Llama decoder of this shape."""
    ours = checkpoint.config
    assert ours.rope.kind == "default", "this comparison is for plain rotary embeddings"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": ours.num_heads,
        "num_key_value_heads": ours.num_kv_heads,
        "head_dim": ours.head_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": ours.norm_eps,
        "max_position_embeddings": ours.max_positions,
        "tie_word_embeddings": ours.tie_word_embeddings,
        "rope_theta": ours.rope.theta,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": list(ours.eos_token_ids),
        "torch_dtype": "float32",
    }


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    end = tokenizer.decode(checkpoint.config.eos_token_ids[:1], skip_special_tokens=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
