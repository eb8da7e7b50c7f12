"""Weights of the Llama runtime as it runs them: fused, heads reordered, converted and packed once."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.device import Placement, Precision
from outrider.models.config import LlamaConfig
from outrider.models.grid import GROUP_WIDTHS, read_grid
from outrider.models.linear import (
    DenseKernels,
    FeedForward,
    Head,
    Kernels,
    Norm,
    NormProjection,
    ResidualProjection,
    Stream,
)
from outrider.models.linear_int4 import Int4Kernels
from outrider.models.linear_int8 import Int8Kernels

__all__ = ["LayerWeights", "LlamaWeights", "RandomWeights", "WeightSource", "make_kernels", "read_weights"]


class WeightSource(Protocol):
    """Where weights come from; :class:`outrider.models.checkpoint.Checkpoint` is one."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> LlamaConfig: ...
    @property
    def fingerprint(self) -> str: ...

    def tensor(self, name: str) -> Tensor:
        """The tensor of that Hugging Face name, ``[out, in]`` for matrices."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. ``qkv`` yields heads in the order of :mod:`outrider.cache.attention`."""

    qkv: NormProjection
    out: ResidualProjection
    feed_forward: FeedForward

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""
        return self.qkv.num_bytes + self.out.num_bytes + self.feed_forward.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All of a target's weights, and how its passes are shaped (:class:`outrider.models.linear.Kernels`)."""

    stream: Stream
    layers: tuple[LayerWeights, ...]
    head: Head
    row_multiple: int

    def first_layers(self, num_layers: int) -> LlamaWeights:
        """The first layers with the same embedding, final norm and LM head; nothing is copied."""
        return replace(self, layers=self.layers[:num_layers])

    def num_bytes(self) -> int:
        """Bytes of all matrices and the LM head."""
        return sum(layer.num_bytes for layer in self.layers) + self.head.num_bytes


def make_kernels(placement: Placement, width: int) -> Kernels:
    """Who builds the parts of a target of this hidden width at this placement."""
    if placement.precision in GROUP_WIDTHS:
        return Int4Kernels(placement)
    return Int8Kernels(placement, width) if placement.precision == "int8" else DenseKernels(placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnGrid:
    """A source whose matrices, embedding and LM head apart, are rounded to a 4-bit grid."""

    source: WeightSource
    precision: Precision

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def config(self) -> LlamaConfig:
        return self.source.config

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def tensor(self, name: str) -> Tensor:
        if not name.endswith("_proj.weight"):
            return self.source.tensor(name)
        return read_grid(self.source, name, self.precision, self.source.tensor).dequantised()


def read_weights(source: WeightSource, placement: Placement) -> LlamaWeights:
    """Read, fuse, convert and pack, one layer at a time, so that the peak stays near the final size."""
    config = source.config
    kernels = make_kernels(placement, config.hidden_size)
    if placement.precision in GROUP_WIDTHS:
        source = _OnGrid(source=source, precision=placement.precision)
    stream, head = _read_ends(source, kernels)
    layers = []
    for index in range(config.num_layers):
        layers.append(_read_layer(source, index, kernels))
        give_back_freed_memory()
    return LlamaWeights(
        stream=stream,
        layers=tuple(layers),
        head=head,
        row_multiple=kernels.row_multiple,
    )


def give_back_freed_memory() -> None:
    """Return freed memory to the system, where the C library can.

    glibc keeps it after a large array was freed, and the conversions of each layer leave holes: some 5 MB a layer of a
    small model, on top of the weights themselves.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _read_ends(source: WeightSource, kernels: Kernels) -> tuple[Stream, Head]:
    """Embedding and LM head: the largest tensors, read once when tied and let go before the layers are read."""
    embedding = source.tensor("model.embed_tokens.weight")
    norm = Norm(weight_D=source.tensor("model.norm.weight"), eps=source.config.norm_eps)
    stream = kernels.stream(embedding)
    if not source.config.tie_word_embeddings:
        embedding = source.tensor("lm_head.weight")
    return stream, kernels.head(embedding, norm)


def _read_layer(source: WeightSource, index: int, kernels: Kernels) -> LayerWeights:
    config, prefix = source.config, f"model.layers.{index}."

    def matrix(name: str) -> Tensor:
        return source.tensor(f"{prefix}{name}_proj.weight")

    def norm(name: str) -> Norm:
        return Norm(weight_D=source.tensor(f"{prefix}{name}_layernorm.weight"), eps=config.norm_eps)

    query = _group_last(matrix("self_attn.q"), config, dim=0)
    qkv = torch.cat((query, matrix("self_attn.k"), matrix("self_attn.v")))
    gate_up = torch.cat((matrix("mlp.gate"), matrix("mlp.up")))
    return LayerWeights(
        qkv=kernels.norm_projection(qkv, norm("input")),
        out=kernels.residual_projection(_group_last(matrix("self_attn.o"), config, dim=1)),
        feed_forward=kernels.feed_forward(gate_up, matrix("mlp.down"), norm("post_attention")),
    )


def _group_last(weight: Tensor, config: LlamaConfig, *, dim: int) -> Tensor:
    """Reorder query heads from (key/value group, member) to (member, key/value group) along ``dim``."""
    groups, width = config.num_kv_heads, config.head_width
    shape = list(weight.shape)
    heads = weight.reshape(*shape[:dim], groups, config.num_heads // groups, width, *shape[dim + 1 :])
    return heads.transpose(dim, dim + 1).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWeights:
    """A source of random weights: for tests, and as a drafter that knows nothing."""

    config: LlamaConfig
    seed: int

    @property
    def name(self) -> str:
        return f"random:{self.seed}"

    @property
    def fingerprint(self) -> str:
        return self.name

    def tensor(self, name: str) -> Tensor:
        """Normal with variance 1 / inputs (norm weights: near 1); a fixed function of seed and name."""
        shape = self._shape(name)
        seed = (self.seed * 1_000_003 + sum(ord(char) * 31**i for i, char in enumerate(name))) % 2**63
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return 1 + 0.1 * noise if len(shape) == 1 else noise / shape[1] ** 0.5

    def _shape(self, name: str) -> tuple[int, ...]:
        c = self.config
        queries, keys = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
        shapes = {
            "q_proj": (queries, c.hidden_size),
            "k_proj": (keys, c.hidden_size),
            "v_proj": (keys, c.hidden_size),
            "o_proj": (c.hidden_size, queries),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "lm_head": (c.vocab_size, c.hidden_size),
        }
        return shapes.get(name.split(".")[-2], (c.hidden_size,))
