"""Weights of the native target: fused, reordered and packed once, in the order in which a pass streams them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement
from outrider.models.config import LlamaConfig
from outrider.models.layers import inverse_frequencies
from outrider.models.llama_weights import WeightSource
from outrider.native.library import CLayer, CMatrix, CModel
from outrider.native.packing import BLOCK, Arena, head_rows, pack, padded, quantise, take_rows

__all__ = ["NativeWeights", "PackedMatrix", "RotaryTable", "read_native_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A matrix in the arena. ``scales`` holds one float32 per output in int8, nothing in bfloat16."""

    weights: Tensor
    scales: Tensor | None

    def describe(self) -> CMatrix:
        """For the library. The tensors must outlive what is returned."""
        scales = None if self.scales is None else self.scales.data_ptr()
        num_blocks, num_steps = self.weights.shape[:2]
        return CMatrix(weights=self.weights.data_ptr(), scales=scales, num_blocks=num_blocks, num_steps=num_steps)

    def num_bytes(self) -> int:
        """Bytes that a pass streams."""
        return self.weights.numel() * self.weights.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """One layer; norms are float32, padded with zeros."""

    attention_norm: Tensor
    qkv: PackedMatrix
    out: PackedMatrix
    feed_forward_norm: Tensor
    gate_up: PackedMatrix
    down: PackedMatrix

    def describe(self) -> CLayer:
        """For the library."""
        return CLayer(
            attention_norm=self.attention_norm.data_ptr(),
            qkv=self.qkv.describe(),
            out=self.out.describe(),
            feed_forward_norm=self.feed_forward_norm.data_ptr(),
            gate_up=self.gate_up.describe(),
            down=self.down.describe(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """All of a target's weights, and the C structures that point at them."""

    embedding_VD: Tensor
    layers: tuple[NativeLayer, ...]
    final_norm: Tensor
    head: PackedMatrix
    is_int8: bool
    described: ctypes.Array[CLayer]

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    def first_layers(self, num_layers: int) -> NativeWeights:
        """The first layers with the same embedding, final norm and LM head; nothing is copied."""
        return replace(self, layers=self.layers[:num_layers])

    def num_bytes(self) -> int:
        """Bytes of all matrices and the LM head."""
        parts = (part for w in self.layers for part in (w.qkv, w.out, w.gate_up, w.down))
        return sum(part.num_bytes() for part in parts) + self.head.num_bytes()

    def describe(self, config: LlamaConfig, cosines: Tensor, sines: Tensor) -> CModel:
        """For the library."""
        return CModel(
            num_layers=len(self.layers),
            hidden=config.hidden_size,
            hidden_padded=padded(config.hidden_size),
            inner_padded=padded(config.intermediate_size),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_width=config.head_width,
            vocab_size=config.vocab_size,
            is_int8=int(self.is_int8),
            norm_eps=config.norm_eps,
            embedding=self.embedding_VD.data_ptr(),
            layers=ctypes.addressof(self.described),
            final_norm=self.final_norm.data_ptr(),
            head=self.head.describe(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )


class RotaryTable:
    """cos and sin by position, float32 ``[positions, C / 2]`` padded to 16; grows as positions are met."""

    _PIECE = 512
    """Positions are computed in pieces of one size, so that an entry's bits do not depend on how the table grew."""

    def __init__(self, config: LlamaConfig) -> None:
        self._frequencies_C = inverse_frequencies(config.rope, config.head_width)
        self._cosines, self._sines = self._piece(0)

    def upto(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Tables that cover positions 0 .. num_positions - 1 at least."""
        have = self._cosines.shape[0]
        if num_positions > have:
            starts = range(have, max(num_positions, 2 * have), self._PIECE)
            pieces = [self._piece(start) for start in starts]
            self._cosines = torch.cat((self._cosines, *(cosines for cosines, _ in pieces)))
            self._sines = torch.cat((self._sines, *(sines for _, sines in pieces)))
        return self._cosines, self._sines

    def _piece(self, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + self._PIECE, dtype=torch.float32)
        angles = positions.unsqueeze(1) * self._frequencies_C
        padding = (0, -angles.shape[1] % 16)
        return F.pad(angles.cos(), padding).contiguous(), F.pad(angles.sin(), padding).contiguous()


def read_native_weights(source: WeightSource, placement: Placement) -> NativeWeights:
    """Read, reorder, convert and pack, one matrix at a time, so that the peak stays near the final size."""
    config, is_int8 = source.config, placement.precision == "int8"
    arena = Arena(_num_bytes(config, is_int8))
    layers = tuple(_read_layer(source, index, arena=arena, is_int8=is_int8) for index in range(config.num_layers))
    embedding = source.tensor("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else source.tensor("lm_head.weight")
    return NativeWeights(
        embedding_VD=embedding.to(torch.bfloat16).contiguous(),
        layers=layers,
        final_norm=_norm(source.tensor("model.norm.weight")),
        head=_place(head, arena, is_int8=is_int8),
        is_int8=is_int8,
        described=(CLayer * len(layers))(*(layer.describe() for layer in layers)),
    )


def _read_layer(source: WeightSource, index: int, *, arena: Arena, is_int8: bool) -> NativeLayer:
    config, prefix = source.config, f"model.layers.{index}."

    def matrix(name: str) -> Tensor:
        return source.tensor(f"{prefix}{name}_proj.weight")

    qkv = fuse_heads(matrix("self_attn.q"), matrix("self_attn.k"), matrix("self_attn.v"), config)
    gate_up = interleave(matrix("mlp.gate"), matrix("mlp.up"))
    return NativeLayer(
        attention_norm=_norm(source.tensor(prefix + "input_layernorm.weight")),
        qkv=_place(qkv, arena, is_int8=is_int8),
        out=_place(spread_heads(matrix("self_attn.o"), config), arena, is_int8=is_int8, multiple=64),
        feed_forward_norm=_norm(source.tensor(prefix + "post_attention_layernorm.weight")),
        gate_up=_place(gate_up, arena, is_int8=is_int8),
        down=_place(matrix("mlp.down"), arena, is_int8=is_int8, multiple=64),
    )


def fuse_heads(query: Tensor, key: Tensor, value: Tensor, config: LlamaConfig) -> Tensor:
    """Query, key and value heads behind one another, each in whole blocks; see :func:`head_rows`."""
    paired, plain = head_rows(config.head_width, paired=True), head_rows(config.head_width, paired=False)
    return torch.cat((_heads(query, paired, config), _heads(key, paired, config), _heads(value, plain, config)))


def _heads(weight: Tensor, rows: Tensor, config: LlamaConfig) -> Tensor:
    starts = torch.arange(0, weight.shape[0], config.head_width).unsqueeze(1)
    return take_rows(weight, torch.where(rows < 0, -1, starts + rows).flatten())


def spread_heads(out: Tensor, config: LlamaConfig) -> Tensor:
    """The output matrix with each head's inputs padded to whole blocks."""
    missing = -config.head_width % BLOCK
    return F.pad(out.unflatten(1, (config.num_heads, config.head_width)), (0, missing)).flatten(1)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Blocks of 16 gate outputs and the same 16 of up, so that they meet in one block's results."""
    missing = -gate.shape[0] % 64
    pairs = [F.pad(weight, (0, 0, 0, missing)).unflatten(0, (-1, 16)) for weight in (gate, up)]
    return torch.stack(pairs, dim=1).flatten(0, 2)


def _place(weight: Tensor, arena: Arena, *, is_int8: bool, multiple: int = BLOCK) -> PackedMatrix:
    """``multiple``: what outputs are padded to; those of the residual stream (``out``, ``down``) as its width is."""
    weight = F.pad(weight, (0, -weight.shape[1] % 64, 0, -weight.shape[0] % multiple))
    if not is_int8:
        return PackedMatrix(weights=arena.place(pack(weight.to(torch.bfloat16))), scales=None)
    levels, scales = quantise(weight)
    return PackedMatrix(weights=arena.place(pack(levels)), scales=scales.contiguous())


def _norm(weight: Tensor) -> Tensor:
    return F.pad(weight.float(), (0, -weight.shape[0] % 64)).contiguous()


def _num_bytes(config: LlamaConfig, is_int8: bool) -> int:
    size = 1 if is_int8 else 2
    return sum(padded(rows) * padded(columns) * size for rows, columns in _shapes(config))


def _shapes(config: LlamaConfig) -> Iterator[tuple[int, int]]:
    """Padded shapes of all matrices."""
    width = padded(config.head_width, BLOCK)
    heads = config.num_heads + 2 * config.num_kv_heads
    for _ in range(config.num_layers):
        yield heads * width, config.hidden_size
        yield config.hidden_size, config.num_heads * width
        yield 2 * padded(config.intermediate_size), config.hidden_size
        yield config.hidden_size, config.intermediate_size
    yield config.vocab_size, config.hidden_size
