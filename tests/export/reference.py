"""A reader of exported folders that shares no code with the head: what an engine computes, from the files alone.

Follows the layout's public description: config keys of a Llama model, tensors by the authors' names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def reference_logits(folder: Path, taps_TD: Tensor, tokens_T: Tensor, embedding_VD: Tensor) -> Tensor:
    """Logits over the *target* vocabulary after one causal pass, ``[T, V]``; minus infinity where the head is silent."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    embedding = weights.get("embed_tokens.weight", embedding_VD.double())
    hidden = _feature(config, weights, taps_TD.double())
    for layer in range(config["num_hidden_layers"]):
        hidden = _layer(config, weights, layer, hidden, embedding[tokens_T])
    scores = _norm(hidden, weights["norm.weight"], config) @ weights["lm_head.weight"].T
    offsets = weights.get("d2t", torch.zeros(config["draft_vocab_size"])).long()
    logits = torch.full((len(tokens_T), config["vocab_size"]), -torch.inf, dtype=torch.float64)
    logits[:, torch.arange(len(offsets)) + offsets] = scores
    return logits


def _norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weight


def _feature(config: dict[str, Any], weights: dict[str, Tensor], taps: Tensor) -> Tensor:
    if config["norm_before_fc"]:
        taps = _norm(taps, weights["input_norm.weight"], config)
    if config["fc_norm"]:
        pieces = taps.chunk(config["num_aux_hidden_states"], dim=-1)
        taps = torch.cat([_norm(p, weights[f"fc_norm.{i}.weight"], config) for i, p in enumerate(pieces)], dim=-1)
    fused = taps @ weights["fc.weight"].T
    return fused + weights["fc.bias"] if config["bias"] else fused


def _layer(config: dict[str, Any], weights: dict[str, Tensor], layer: int, hidden: Tensor, embedded: Tensor) -> Tensor:
    prefix = "midlayer." if layer == 0 else f"layers.{layer}."
    w = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    residual = hidden
    if layer == 0:
        normed = _norm(hidden, w["hidden_norm.weight"], config)
        residual = normed if config["norm_before_residual"] else hidden
        inputs = torch.cat((_norm(embedded, w["input_layernorm.weight"], config), normed), dim=-1)
    else:
        inputs = _norm(hidden, w["input_layernorm.weight"], config)
    x = residual + _attention(config, w, inputs)
    y = _norm(x, w["post_attention_layernorm.weight"], config)
    gate = y @ w["mlp.gate_proj.weight"].T
    return x + (gate * gate.sigmoid() * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def _attention(config: dict[str, Any], w: dict[str, Tensor], inputs: Tensor) -> Tensor:
    size, width = len(inputs), config["head_dim"]
    q, k, v = ((inputs @ w[f"self_attn.{n}_proj.weight"].T).view(size, -1, width) for n in "qkv")
    q, k = _rotate(config, q), _rotate(config, k)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, k) / width**0.5
    hidden_keys = torch.ones(size, size).triu(1).bool()
    mixed = torch.einsum("hqk,khc->qhc", scores.masked_fill(hidden_keys, -torch.inf).softmax(-1), v)
    return mixed.reshape(size, -1) @ w["self_attn.o_proj.weight"].T


def _rotate(config: dict[str, Any], x: Tensor) -> Tensor:
    half = config["head_dim"] // 2
    scaling = config["rope_scaling"] or {"rope_type": "default", "factor": 1.0}
    assert scaling["rope_type"] in ("default", "linear")
    inverse = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half) / scaling["factor"]
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * inverse
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), dim=-1)
