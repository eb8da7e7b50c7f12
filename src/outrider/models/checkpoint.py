"""A model as it lies on disk: its shape, its tokenizer, and tensors that are read one at a time.

Tensors have Hugging Face names whatever file they come from, and keep the file's precision (a quantised GGUF gives
float32). Names and shapes are checked when the checkpoint is opened, values when a tensor is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.errors import UnsupportedModel, WeightsError
from outrider.models.config import LlamaConfig
from outrider.models.grid import Grid, GridSource
from outrider.models.tokenizer import Tokenizer

__all__ = ["Checkpoint", "MemoryTensors", "TensorSource", "check_config", "check_tensors", "expected_shapes"]

Shape = tuple[int, ...]

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_MAX_LAYERS = 4096
_MAX_WIDTH = 2**31 - 1


class TensorSource(Protocol):
    """Where tensors come from. Names are Hugging Face names."""

    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape, read without touching the weights."""
        ...

    def read(self, name: str) -> Tensor:
        """Read one tensor."""
        ...

    def where(self, name: str) -> str:
        """The file that holds (or should hold) the tensor, for error texts."""
        ...


class MemoryTensors:
    """Tensors that are already in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def where(self, name: str) -> str:
        return "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model ready to be built.

    Attributes:
        name: what the user asked for.
        config: shape of the decoder.
        fingerprint: hash of weights and shape before any precision conversion (:mod:`outrider.models.fingerprint`).
        tokenizer: its tokenizer, ``None`` if the files hold none.
        source: where it came from: a path, a hub id and revision, or a package.
        note: what a reader of results must know, such as "4-bit GGUF, dequantised"; may be empty.
        tensors: where the weights are read from.
    """

    name: str
    config: LlamaConfig
    fingerprint: str
    tokenizer: Tokenizer | None
    source: str
    note: str
    tensors: TensorSource

    def tensor_names(self) -> tuple[str, ...]:
        """Names of all weights, in layer order. A tied LM head is not a weight of its own and is not listed."""
        return tuple(expected_shapes(self.config))

    def tensor(self, name: str) -> Tensor:
        """Read one weight in the file's precision, on the CPU; a tied ``lm_head.weight`` is the embedding.

        Raises:
            WeightsError: misshapen, unreadable or not finite.
        """
        if name == LM_HEAD and self.config.tie_word_embeddings:
            name = EMBEDDING
        expected = expected_shapes(self.config)[name]
        tensor = self.tensors.read(name)
        where = self.tensors.where(name)
        if tuple(tensor.shape) != expected:
            raise _misshapen(name, where, tuple(tensor.shape), expected)
        _check_values(tensor, name, where)
        return tensor

    def grid(self, name: str) -> Grid | None:
        """A matrix as the file's 4-bit blocks hold it; ``None`` if it is stored otherwise, misshapen or not finite.

        Whoever gets ``None`` reads :meth:`tensor` instead, which names what is wrong.
        """
        stored = self.tensors.grid(name) if isinstance(self.tensors, GridSource) else None
        if stored is None or stored.minimums is None:
            return None
        is_sound = tuple(stored.levels.shape) == expected_shapes(self.config)[name]
        is_finite = all(bool(torch.isfinite(part).all()) for part in (stored.scales, stored.minimums))
        return stored if is_sound and is_finite else None


@functools.lru_cache(maxsize=8)
def expected_shapes(config: LlamaConfig) -> Mapping[str, Shape]:
    """Name and shape ``[out, in]`` of every weight of a model of this shape, in layer order."""
    c = config
    query, key, width, inner = (
        c.num_heads * c.head_width,
        c.num_kv_heads * c.head_width,
        c.hidden_size,
        c.intermediate_size,
    )
    shapes: dict[str, Shape] = {EMBEDDING: (c.vocab_size, width)}
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (width,)
        shapes[prefix + "self_attn.q_proj.weight"] = (query, width)
        shapes[prefix + "self_attn.k_proj.weight"] = (key, width)
        shapes[prefix + "self_attn.v_proj.weight"] = (key, width)
        shapes[prefix + "self_attn.o_proj.weight"] = (width, query)
        shapes[prefix + "post_attention_layernorm.weight"] = (width,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, width)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, width)
        shapes[prefix + "mlp.down_proj.weight"] = (width, inner)
    shapes["model.norm.weight"] = (width,)
    if not c.tie_word_embeddings:
        shapes[LM_HEAD] = (c.vocab_size, width)
    return MappingProxyType(shapes)


def check_tensors(config: LlamaConfig, tensors: TensorSource, *, ignored: Iterable[str] = ()) -> None:
    """Check that exactly the expected tensors are there, in the expected shapes.

    Args:
        config: shape of the decoder.
        tensors: what the files hold.
        ignored: names that may be there and are not used.

    Raises:
        WeightsError: a missing, misshapen or unknown tensor, named with its file and both shapes.
    """
    found, expected = tensors.shapes(), expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise WeightsError(f"{tensors.where(name)}: tensor {name} is missing; its shape should be {_text(shape)}")
        if tuple(found[name]) != shape:
            raise _misshapen(name, tensors.where(name), tuple(found[name]), shape)
    unknown = sorted(set(found) - set(expected) - set(ignored))
    if config.tie_word_embeddings and LM_HEAD in unknown:
        unknown.remove(LM_HEAD)
    if unknown:
        raise WeightsError(
            f"{tensors.where(unknown[0])}: tensor {unknown[0]} ({len(unknown)} such) is not part of a Llama decoder; "
            "running the model without it would change its output"
        )


def check_config(config: LlamaConfig, where: str) -> LlamaConfig:
    """Check that the numbers of a config make a decoder, and return it.

    Raises:
        WeightsError: a number that is out of any sensible range.
        UnsupportedModel: a shape that this runtime does not run.
    """
    c = config
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_width",
        "max_positions",
    )
    for name in sizes:
        _require(1 <= getattr(c, name) <= _MAX_WIDTH, where, name, getattr(c, name), "1 or more")
    _require(1 <= c.num_layers <= _MAX_LAYERS, where, "num_layers", c.num_layers, f"1 to {_MAX_LAYERS}")
    _require(_positive(c.norm_eps), where, "norm_eps", c.norm_eps, "a finite number above 0")
    _require(_positive(c.rope.theta), where, "rope theta", c.rope.theta, "a finite number above 0")
    _require(_positive(c.rope.factor), where, "rope factor", c.rope.factor, "a finite number above 0")
    if c.num_heads % c.num_kv_heads:
        raise UnsupportedModel(
            f"{where}: {c.num_heads} query heads do not divide among {c.num_kv_heads} key/value heads"
        )
    if c.head_width % 2:
        raise UnsupportedModel(f"{where}: head width {c.head_width} is odd; rotary embedding needs an even one")
    return config


def _require(holds: bool, where: str, name: str, given: object, allowed: str) -> None:
    if not holds:
        raise WeightsError(f"{where}: {name} {given!r} is not possible; allowed: {allowed}")


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _check_values(tensor: Tensor, name: str, where: str) -> None:
    if not tensor.is_floating_point():
        raise WeightsError(f"{where}: tensor {name} has type {tensor.dtype}; allowed: floating point")
    if not _surely_finite(tensor) and not torch.isfinite(tensor).all():
        num_bad = int((~torch.isfinite(tensor)).sum())
        raise WeightsError(
            f"{where}: tensor {name} holds {num_bad} values that are NaN or infinite; fetch the file again"
        )


def _surely_finite(tensor: Tensor) -> bool:
    """One cheap pass: a finite sum has only finite terms (numpy's one thread, where it can, does not wait for others)."""
    if tensor.dtype == torch.float32:
        with np.errstate(all="ignore"):
            return bool(np.isfinite(tensor.numpy().sum()))
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32)))


def _misshapen(name: str, where: str, found: Shape, expected: Shape) -> WeightsError:
    return WeightsError(f"{where}: tensor {name} has shape {_text(found)}; the config asks for {_text(expected)}")


def _text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
