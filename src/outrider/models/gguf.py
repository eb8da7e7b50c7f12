"""Opens a GGUF file of architecture ``llama`` as a checkpoint.

Weights are dequantised to float32 when read. llama.cpp stores the rows of the query and key projections in the order of
its interleaved rotary embedding; they are put back into rotate-half order here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from outrider.errors import UnsupportedModel, WeightsError
from outrider.models.chat import ToolRendering
from outrider.models.checkpoint import Checkpoint, check_config, check_tensors
from outrider.models.config import LlamaConfig, RopeConfig
from outrider.models.dequantise import dequantise, four_bit_blocks
from outrider.models.fingerprint import TensorBytes, fingerprint
from outrider.models.gguf_file import GGUFFile
from outrider.models.gguf_vocab import gguf_tokenizer
from outrider.models.grid import Grid

__all__ = ["GGUFTensors", "inverse_permute", "open_gguf"]

Array = np.ndarray[Any, np.dtype[Any]]

_ROPE_FREQS = "rope_freqs.weight"
_FIXED_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SCALES = ("attention.scale", "embedding_scale", "final_logit_softcapping", "logit_scale", "residual_scale")
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


def open_gguf(path: Path, *, name: str, source: str = "", tool_rendering: ToolRendering = "template") -> Checkpoint:
    """Open a GGUF file.

    Args:
        path: the file.
        name: what the user asked for.
        source: where the file came from; the path itself if empty.
        tool_rendering: see :class:`outrider.models.tokenizer.Tokenizer`.

    Raises:
        WeightsError: a truncated, incomplete or hostile file.
        UnsupportedModel: another architecture, tensor type, rotary scaling or tokenizer than this runtime runs.
    """
    file = GGUFFile(path)
    architecture = _Keys(file).text("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"{path}: architecture {architecture!r} is not supported; allowed: llama")
    _check_kinds(file)
    config = check_config(_config(file), str(path))
    tensors = GGUFTensors(file, config)
    check_tensors(config, tensors)
    return Checkpoint(
        name=name,
        config=config,
        fingerprint=fingerprint(config, _tensor_bytes(file)),
        tokenizer=gguf_tokenizer(file.metadata, str(path), tool_rendering=tool_rendering),
        source=source or str(path),
        note=quantisation_note(file),
        tensors=tensors,
    )


class GGUFTensors:
    """The tensors of a GGUF file under their Hugging Face names, dequantised when read."""

    def __init__(self, file: GGUFFile, config: LlamaConfig) -> None:
        self._file = file
        self._config = config
        self._rows = {_hf_name(name): row for name, row in file.tensors.items() if name != _ROPE_FREQS}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: row.shape for name, row in self._rows.items()}

    def where(self, name: str) -> str:
        return str(self._file.path)

    def read(self, name: str) -> Tensor:
        """Read and dequantise one tensor to float32."""
        row = self._rows[name]
        return torch.from_numpy(self._ordered(name, dequantise(self._file.raw(row), row.kind, row.shape)))

    def grid(self, name: str) -> Grid | None:
        """A matrix stored in Q4_1 or Q4_0 as it is, else ``None``; values are not checked."""
        row = self._rows[name]
        blocks = four_bit_blocks(self._file.raw(row), row.kind, row.shape)
        if blocks is None:
            return None
        parts = [self._ordered(name, part) for part in (blocks.levels, blocks.scales, blocks.minimums)]
        levels, scales, minimums = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
        return Grid(levels=levels, scales=scales, minimums=minimums, group=32)

    def _ordered(self, name: str, values: Array) -> Array:
        if name.endswith("q_proj.weight"):
            return inverse_permute(values, self._config.num_heads)
        if name.endswith("k_proj.weight"):
            return inverse_permute(values, self._config.num_kv_heads)
        return values


def inverse_permute(values: Array, num_heads: int) -> Array:
    """Rows of a query or key projection ``[heads * width, D]`` from interleaved to rotate-half order.

    Within a head, row ``2 i`` (interleaved, first of pair i) becomes row ``i``; row ``2 i + 1`` becomes ``width / 2 + i``.
    """
    rows, width = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def quantisation_note(file: GGUFFile) -> str:
    """Names the type that holds most weights, such as ``4-bit GGUF (Q4_1), dequantised``."""
    elements: dict[GGMLQuantizationType, int] = {}
    for row in file.tensors.values():
        elements[row.kind] = elements.get(row.kind, 0) + math.prod(row.shape)
    kind = max(elements, key=lambda each: elements[each])
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if block == 1:
        return f"GGUF ({kind.name})"
    digits = re.search(r"\d+", kind.name)
    num_bits = digits.group() if digits else str(block_bytes * 8 // block)
    return f"{num_bits}-bit GGUF ({kind.name}), dequantised"


def _check_kinds(file: GGUFFile) -> None:
    """Dequantise one empty block of every type that occurs, so that a type which cannot be read is named at once."""
    for row in file.tensors.values():
        block, block_bytes = GGML_QUANT_SIZES[row.kind]
        try:
            dequantise(np.zeros(block_bytes, dtype=np.uint8), row.kind, (block,))
        except NotImplementedError:
            raise UnsupportedModel(
                f"{file.path}: tensor {row.name} has type {row.kind.name}, which the gguf library cannot dequantise"
            ) from None


def _hf_name(name: str) -> str:
    """The Hugging Face name; an unknown name stays as it is and is refused by the check of names."""
    if name in _FIXED_NAMES:
        return _FIXED_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def _tensor_bytes(file: GGUFFile) -> list[TensorBytes]:
    return [
        TensorBytes(name=_hf_name(row.name), dtype=row.kind.name, shape=row.shape, data=file.raw(row))
        for row in file.tensors.values()
    ]


class _Keys:
    """Typed look-ups in the metadata, with errors that name file and key."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, str, default))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, int, default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._get(key, (int, float), default))

    def _get(self, key: str, kind: type | tuple[type, ...], default: object) -> Any:
        value = self._file.metadata.get(key, default)
        if value is None:
            raise WeightsError(f"{self._file.path}: the metadata lacks {key}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise WeightsError(f"{self._file.path}: metadata {key} has the unexpected value {str(value)[:60]!r}")
        return value


def _config(file: GGUFFile) -> LlamaConfig:
    keys = _Keys(file)
    num_heads, width = keys.integer("llama.attention.head_count"), keys.integer("llama.embedding_length")
    if num_heads < 1:
        raise WeightsError(f"{file.path}: llama.attention.head_count {num_heads} is not possible; allowed: 1 or more")
    head_width = keys.integer("llama.attention.key_length", width // num_heads)
    _refuse_variants(file, head_width)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{file.path}: tensor token_embd.weight is missing")
    return LlamaConfig(
        vocab_size=embedding.shape[0],
        hidden_size=width,
        intermediate_size=keys.integer("llama.feed_forward_length"),
        num_layers=keys.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("llama.attention.head_count_kv", num_heads),
        head_width=head_width,
        norm_eps=_as_written(keys.number("llama.attention.layer_norm_rms_epsilon")),
        max_positions=keys.integer("llama.context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_ids=_eos_token_ids(file),
        rope=_rope(file, head_width),
    )


def _as_written(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    keys = _Keys(file)
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [keys.integer(f"tokenizer.ggml.{name}") for name in names if f"tokenizer.ggml.{name}" in file.metadata]
    return tuple(dict.fromkeys(found))


def _refuse_variants(file: GGUFFile, head_width: int) -> None:
    """Refuse what shares the name ``llama`` and has other arithmetic."""
    keys = _Keys(file)
    if keys.integer("llama.expert_count", 0):
        raise UnsupportedModel(f"{file.path}: a mixture of experts is not supported; allowed: dense llama")
    if keys.integer("llama.rope.dimension_count", head_width) != head_width:
        raise UnsupportedModel(f"{file.path}: rotary embedding of a part of each head is not supported")
    if keys.integer("llama.attention.value_length", head_width) != head_width:
        raise UnsupportedModel(f"{file.path}: value heads of another width than key heads are not supported")
    for name in _SCALES:
        if keys.number(f"llama.{name}", 1.0) != 1.0:
            raise UnsupportedModel(f"{file.path}: llama.{name} is not supported; allowed: 1 or absent")
    window, context = keys.integer("llama.attention.sliding_window", 0), keys.integer("llama.context_length")
    if 0 < window < context:
        raise UnsupportedModel(f"{file.path}: sliding-window attention ({window} tokens) is not supported")


def _rope(file: GGUFFile, head_width: int) -> RopeConfig:
    keys = _Keys(file)
    theta = keys.number("llama.rope.freq_base", 10000.0)
    kind = keys.text("llama.rope.scaling.type", "none")
    if _ROPE_FREQS in file.tensors:
        original = keys.integer("llama.rope.scaling.original_context_length", 8192)
        return _rope_from_freqs(file, theta, head_width, original)
    linear = keys.number("llama.rope.scale_linear", 1.0)
    factor = keys.number("llama.rope.scaling.factor", linear)
    if kind == "linear" or (kind == "none" and linear != 1.0):
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "none":
        raise UnsupportedModel(f"{file.path}: rotary scaling {kind!r} is not supported; allowed: none, linear, llama3")
    return RopeConfig(theta=theta)


def _rope_from_freqs(file: GGUFFile, theta: float, head_width: int, original: int) -> RopeConfig:
    """Recover Llama 3.1's scaling from the factors that llama.cpp stores: one divisor a rotary frequency."""
    row = file.tensors[_ROPE_FREQS]
    if row.shape != (head_width // 2,):
        raise WeightsError(f"{file.path}: tensor {_ROPE_FREQS} has shape {list(row.shape)}, not [{head_width // 2}]")
    factors = dequantise(file.raw(row), row.kind, row.shape).tolist()
    if not all(math.isfinite(factor) and factor >= 1 for factor in factors) or not (math.isfinite(theta) and theta > 0):
        raise WeightsError(f"{file.path}: tensor {_ROPE_FREQS} holds values below 1 or not finite")
    if max(factors) == 1:
        return RopeConfig(theta=theta)
    frequencies = [theta ** (-2 * i / head_width) for i in range(head_width // 2)]
    largest = _as_written(max(factors))
    for low, high in ((1.0, 4.0), *_fitted_limits(factors, frequencies, largest, original)):
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=largest,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=original,
        )
        if all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(_llama3_factors(rope, frequencies), factors, strict=True)
        ):
            return rope
    raise UnsupportedModel(f"{file.path}: the rotary factors in {_ROPE_FREQS} do not follow Llama 3.1's rule")


def _llama3_factors(rope: RopeConfig, frequencies: Sequence[float]) -> list[float]:
    """The divisor of each frequency under Llama 3.1's rule."""
    factors = []
    for frequency in frequencies:
        turns = rope.original_max_positions * frequency / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = min(1.0, max(0.0, blend))
        factors.append(1 / ((1 - blend) / rope.factor + blend))
    return factors


def _fitted_limits(
    factors: Sequence[float], frequencies: Sequence[float], largest: float, original: int
) -> list[tuple[float, float]]:
    """Blend limits from the frequencies strictly between them: there the blend is linear in the number of turns."""
    between = [
        (original * frequency / (2 * math.pi), (1 / factor - 1 / largest) / (1 - 1 / largest))
        for factor, frequency in zip(factors, frequencies, strict=True)
        if 1.0001 < factor < largest * 0.9999
    ]
    if len(between) < 2 or between[0][1] == between[-1][1]:
        return []
    (turns_a, blend_a), (turns_b, blend_b) = between[0], between[-1]
    slope = (blend_a - blend_b) / (turns_a - turns_b)
    low = turns_a - blend_a / slope
    return [(round(low, 4), round(low + 1 / slope, 4))] if slope > 0 else []
