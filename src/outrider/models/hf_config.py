"""Reads ``config.json`` and ``generation_config.json`` of a Hugging Face folder into a :class:`LlamaConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ModelNotFound, UnsupportedModel, WeightsError
from outrider.models.checkpoint import check_config
from outrider.models.config import LlamaConfig, RopeConfig
from outrider.models.reading import read_json

__all__ = ["ARCHITECTURES", "read_config"]

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Architectures with the arithmetic of Llama (Mistral: without a sliding window)."""

_BY_MODEL_TYPE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
_MISTRAL_DEFAULT_WINDOW = 4096
_MISTRAL_DEFAULT_KV_HEADS = 8


def read_config(folder: Path) -> LlamaConfig:
    """Read and check the config of a folder.

    Raises:
        ModelNotFound: no ``config.json``.
        WeightsError: broken JSON, or numbers that make no decoder.
        UnsupportedModel: another architecture or a variant that this runtime does not run, by name.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(
            f"{folder} holds no config.json; give a .gguf file or a folder with config.json and weights"
        )
    keys = _Keys(read_json(path), str(path))
    architecture = _architecture(keys)
    _refuse_variants(keys, architecture)
    num_heads, width = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    if num_heads < 1:
        raise WeightsError(f"{path}: num_attention_heads {num_heads} is not possible; allowed: 1 or more")
    default_kv_heads = _MISTRAL_DEFAULT_KV_HEADS if architecture == "MistralForCausalLM" else num_heads
    config = LlamaConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=width,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", default_kv_heads),
        head_width=keys.integer("head_dim", width // num_heads),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        max_positions=keys.integer("max_position_embeddings", 2048),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(folder, keys),
        rope=_rope(keys),
    )
    return check_config(config, str(path))


class _Keys:
    """Typed look-ups in a JSON object; null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e30:
            raise self.wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._value(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def _value(self, name: str, default: object) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise WeightsError(f"{self.where}: {name} is missing")
        return value

    def wrong(self, name: str, value: object, allowed: str) -> WeightsError:
        return WeightsError(f"{self.where}: {name} is {str(value)[:60]!r}; allowed: {allowed}")


def _architecture(keys: _Keys) -> str:
    listed = keys.get("architectures")
    if isinstance(listed, list) and listed:
        name = str(listed[0])
    else:
        model_type = str(keys.get("model_type"))
        name = _BY_MODEL_TYPE.get(model_type, model_type)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{keys.where}: architecture {name[:60]!r} is not supported; allowed: {', '.join(ARCHITECTURES)}"
        )
    return name


def _refuse_variants(keys: _Keys, architecture: str) -> None:
    """Refuse settings that change the arithmetic and that this runtime does not have."""
    quantisation = keys.get("quantization_config") or keys.get("compression_config")
    if quantisation is not None:
        method = quantisation.get("quant_method", "unnamed") if isinstance(quantisation, dict) else "unnamed"
        raise UnsupportedModel(
            f"{keys.where}: weights quantised by {str(method)[:40]!r} are not supported; "
            "give the unquantised checkpoint or a GGUF file"
        )
    for name in ("attention_bias", "mlp_bias"):
        if keys.flag(name):
            raise UnsupportedModel(f"{keys.where}: {name} is not supported; allowed: projections without biases")
    activation = keys.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{keys.where}: hidden_act {str(activation)[:40]!r} is not supported; allowed: silu")
    if keys.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{keys.where}: rotary embedding of a part of each head is not supported")
    if architecture == "MistralForCausalLM":
        _refuse_window(keys)


def _refuse_window(keys: _Keys) -> None:
    given = keys.values.get("sliding_window", _MISTRAL_DEFAULT_WINDOW)
    if given is not None and keys.integer("sliding_window", _MISTRAL_DEFAULT_WINDOW) < keys.integer(
        "max_position_embeddings", 4096 * 32
    ):
        raise UnsupportedModel(
            f"{keys.where}: sliding-window attention ({given} tokens) is not supported; allowed: sliding_window null"
        )


def _eos_token_ids(folder: Path, keys: _Keys) -> tuple[int, ...]:
    """``generation_config.json`` wins over ``config.json``; either may hold one id, a list, or null."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    where = str(path) if found is not None else keys.where
    found = keys.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    listed: Sequence[Any] = found if isinstance(found, list) else [found]
    for token in listed:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise WeightsError(f"{where}: eos_token_id holds {str(token)[:60]!r}; allowed: token ids")
    return tuple(dict.fromkeys(listed))


def _rope(keys: _Keys) -> RopeConfig:
    """Rotary settings: ``rope_parameters`` of newer configs, else ``rope_theta`` with ``rope_scaling``."""
    given = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise keys.wrong("rope_scaling", given, "an object or null")
    rope = _Keys(given, f"{keys.where}: rope parameters")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{keys.where}: rotary embedding of a part of each head is not supported")
    theta = rope.number("rope_theta", keys.number("rope_theta", 10000.0))
    kind = next((given[name] for name in ("rope_type", "type") if given.get(name) is not None), "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return _llama3(rope, theta)
    raise UnsupportedModel(
        f"{keys.where}: rotary scaling {str(kind)[:40]!r} is not supported; allowed: default, linear, llama3"
    )


def _llama3(rope: _Keys, theta: float) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.integer("original_max_position_embeddings")
    if not 0 < low < high or original < 1:
        raise WeightsError(
            f"{rope.where}: low_freq_factor {low}, high_freq_factor {high} and original_max_position_embeddings "
            f"{original} contradict each other; allowed: 0 < low < high, 1 or more positions"
        )
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original,
    )
