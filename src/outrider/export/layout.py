"""A head in the layout of its authors: ``config.json`` of a one-layer Llama model and tensors by the authors' names.

Our tensors carry those names already, so weights are copied as they are. What needs care is the config: taps in the
engine's own numbering, and every norm and position key written out, since engines disagree on what a missing one means.
Under ``outrider`` stands what only Outrider and people read: target, fingerprint, template, recipe, acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor

from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import EMBEDDING, HeadInfo
from outrider.errors import UnsupportedModel, WeightsError
from outrider.export.engines import OWN_KEY, Engine
from outrider.models.config import RopeConfig

__all__ = ["config_of", "expected_shapes", "layout_of", "tensors_of"]

_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "num_layers": "num_hidden_layers",
    "target_vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
    "target_hidden_size": "target_hidden_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "fc_bias": "bias",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
}
"""Fields of :class:`EagleConfig` and the layout's names for them; taps and rotary embedding are written apart."""

_OPTIONAL = {"fc_bias": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
"""Options that public heads leave out when they do not use them, by one meaning in all engines."""

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_ROPE_NUMBERS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"),
}


def layout_of(
    config: EagleConfig, info: HeadInfo, engine: Engine, *, dtype: str, own: Mapping[str, Any]
) -> dict[str, Any]:
    """``config.json`` for an engine.

    Args:
        config, info: the head's.
        engine: whose numbering of taps is used.
        dtype: precision of the weights, as ``bfloat16``.
        own: further values under ``outrider``.
    """
    taps = engine.tap_ids(config)
    values = {theirs: getattr(config, ours) for ours, theirs in _NAMES.items()}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **values,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "num_aux_hidden_states": config.num_taps,
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": taps,
            "norm_before_fc": config.norm_before_fc,
        },
        OWN_KEY: {"engine": engine.name, "engine_version": engine.version, **asdict(info), **own},
    }


def tensors_of(head: EagleHead, engine: Engine, embedding: Tensor | None) -> dict[str, Tensor]:
    """The tensors that an engine is given, as they are."""
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    if _is_dropped(head.config, engine):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if embedding is not None:
        tensors[EMBEDDING] = embedding.contiguous()
    return tensors


def expected_shapes(config: EagleConfig, engine: Engine, *, has_embedding: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that such a head must have for this engine."""
    import torch

    with torch.device("meta"):
        found = {name: tuple(tensor.shape) for name, tensor in EagleHead(config).state_dict().items()}
    if _is_dropped(config, engine):
        found = {name: shape for name, shape in found.items() if name not in ("d2t", "t2d")}
    if has_embedding:
        found[EMBEDDING] = (config.target_vocab_size, config.hidden_size)
    return found


def config_of(values: Mapping[str, Any], engine: Engine, where: str, *, default_taps: tuple[int, ...]) -> EagleConfig:
    """The shape of a head in this layout.

    Args:
        values: its ``config.json``. engine: whose numbering of taps it follows.
        where: the file, for error texts.
        default_taps: our indexes of the taps that are meant where the config lists none; empty to refuse.

    Raises:
        WeightsError: a key that is missing, impossible, or contradicts another.
        UnsupportedModel: another architecture or another layout.
    """
    _check_kind(values, where)
    found: dict[str, Any] = {}
    for ours, theirs in _NAMES.items():
        if theirs in values:
            found[ours] = values[theirs]
        elif ours in _OPTIONAL:
            found[ours] = _OPTIONAL[ours]
    if "head_width" not in found:
        found["head_width"] = _head_width(found, where)
    found.setdefault("target_hidden_size", found.get("hidden_size"))
    found.setdefault("norm_before_residual", False)
    found["tap_layers"] = _taps(values, engine, where) or list(default_taps)
    if not found["tap_layers"]:
        raise WeightsError(f"{where}: eagle_aux_hidden_state_layer_ids is missing, and so is the target; give --target")
    found["rope"] = asdict(_rope(values, where))
    for field in fields(EagleConfig):
        if field.name not in found:
            raise WeightsError(f"{where}: {_NAMES.get(field.name, field.name)} is missing")
    return EagleConfig.from_json(found, where)


def _is_dropped(config: EagleConfig, engine: Engine) -> bool:
    return engine.drops_full_vocabulary and config.draft_vocab_size == config.target_vocab_size


def _check_kind(values: Mapping[str, Any], where: str) -> None:
    if "speculators_model_type" in values:
        raise UnsupportedModel(f"{where}: written by speculators; allowed: the layout of EAGLE-3's authors")
    names = values.get("architectures") or [""]
    if names[0] not in _ARCHITECTURES:
        raise UnsupportedModel(f"{where}: architecture is {str(names[0])[:60]!r}; allowed: {', '.join(_ARCHITECTURES)}")
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if values.get(key):
            raise UnsupportedModel(f"{where}: {key} is true; allowed: false")
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{where}: hidden_act is {str(values['hidden_act'])[:40]!r}; allowed: silu")


def _head_width(found: Mapping[str, Any], where: str) -> int:
    width, heads = found.get("hidden_size"), found.get("num_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1 or width % heads:
        raise WeightsError(f"{where}: head_dim is missing, and hidden_size over num_attention_heads is no whole number")
    return width // heads


def _taps(values: Mapping[str, Any], engine: Engine, where: str) -> list[int]:
    """Our indexes of the taps listed, of both places where they may stand; empty if there is no list."""
    nested = values.get("eagle_config") or {}
    lists = [each.get("eagle_aux_hidden_state_layer_ids") for each in (values, nested)]
    given = [each for each in lists if each is not None]
    for each in given:
        if not isinstance(each, list) or not all(isinstance(tap, int) for tap in each):
            raise WeightsError(f"{where}: eagle_aux_hidden_state_layer_ids is {str(each)[:60]}; allowed: layer indexes")
    if len(given) == 2 and given[0] != given[1]:
        raise WeightsError(
            f"{where}: eagle_aux_hidden_state_layer_ids is {given[0]}, but {given[1]} inside eagle_config; allowed: one list"
        )
    count = values.get("num_aux_hidden_states")
    if given and count is not None and count != len(given[0]):
        raise WeightsError(f"{where}: num_aux_hidden_states is {count}, but {len(given[0])} taps are listed")
    return [tap - engine.tap_shift for tap in given[0]] if given else []


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    numbers = {_ROPE_NUMBERS[name]: getattr(rope, name) for name in _ROPE_KEYS[rope.kind]}
    return {"rope_type": rope.kind, **numbers}


def _rope(values: Mapping[str, Any], where: str) -> RopeConfig:
    theta = values.get("rope_theta", 10000.0)
    scaling = values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise WeightsError(f"{where}: rope_scaling is {str(scaling)[:60]!r}; allowed: an object, or null")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise UnsupportedModel(f"{where}: rope_type is {str(kind)[:40]!r}; allowed: {', '.join(_ROPE_KEYS)}")
    for name in _ROPE_KEYS[kind]:
        if _ROPE_NUMBERS[name] not in scaling:
            raise WeightsError(f"{where}: rope_scaling lacks {_ROPE_NUMBERS[name]}")
    numbers = {name: scaling[_ROPE_NUMBERS[name]] for name in _ROPE_KEYS[kind]}
    return RopeConfig(theta=theta, kind=kind, **numbers)
