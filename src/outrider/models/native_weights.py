"""Weights of the native target: fused, reordered and packed once, in the order in which a pass streams them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement, Precision
from outrider.models.config import LlamaConfig, RopeConfig
from outrider.models.grid import GROUP_WIDTHS, Grid, combine, quantise_to_grid, read_grid
from outrider.models.layers import inverse_frequencies
from outrider.models.llama_weights import WeightSource, give_back_freed_memory
from outrider.models.rotation import StreamRotation
from outrider.native.library import FORMATS, CLayer, CMatrix, CModel
from outrider.native.packing import (
    BLOCK,
    Arena,
    head_rows,
    int4_tile_bytes,
    pack,
    pack_int4,
    padded,
    quantise,
    take_rows,
)

__all__ = [
    "AttentionShape",
    "NativeLayer",
    "NativeWeights",
    "PackedMatrix",
    "RotaryTable",
    "fuse_heads",
    "interleave",
    "padded_norm",
    "place_matrix",
    "read_native_weights",
    "spread_heads",
]

_ROWS_AT_A_TIME = 2048
"""Rows of a matrix that are converted together: what is in float32 besides the final weights."""


class AttentionShape(Protocol):
    """What packing must know of a model's attention."""

    @property
    def num_heads(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def rope(self) -> RopeConfig: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A matrix in the arena.

    Attributes:
        weights: blocks first, as :mod:`outrider.native.packing` lays them out.
        scales: one float32 per output in int8, else nothing.
        num_steps: 64-byte steps along the inputs; in 4 bits, steps of 64 inputs.
        group: inputs of a group in 4 bits, else 0.
    """

    weights: Tensor
    scales: Tensor | None
    num_steps: int
    group: int = 0

    @property
    def format(self) -> int:
        """How the library calls it."""
        name = "int4" if self.group else "bfloat16" if self.scales is None else "int8"
        return FORMATS.index(name)

    def describe(self) -> CMatrix:
        """For the library. The tensors must outlive what is returned."""
        scales = None if self.scales is None else self.scales.data_ptr()
        return CMatrix(
            weights=self.weights.data_ptr(),
            scales=scales,
            num_blocks=self.weights.shape[0],
            num_steps=self.num_steps,
            format=self.format,
            group_parts=self.group // 32,
        )

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
    """All of a target's weights, and the C structures that point at them. int8 goes with a rotated stream.

    4-bit layers keep the file's grid, so their stream is not rotated, and their LM head is int8.
    """

    embedding_VD: Tensor
    layers: tuple[NativeLayer, ...]
    final_norm: Tensor
    head: PackedMatrix
    rotation: StreamRotation | None
    described: ctypes.Array[CLayer]

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    def first_layers(self, num_layers: int) -> NativeWeights:
        """The first layers with the same embedding, final norm and LM head; nothing is copied."""
        return replace(self, layers=self.layers[:num_layers])

    def part_bytes(self) -> dict[str, int]:
        """Bytes of all layers' matrices by kind, and of the LM head."""
        kinds = ("qkv", "out", "gate_up", "down")
        sums = {kind: sum(getattr(layer, kind).num_bytes() for layer in self.layers) for kind in kinds}
        return {**sums, "head": self.head.num_bytes()}

    def num_bytes(self) -> int:
        """Bytes of all matrices and the LM head."""
        return sum(self.part_bytes().values())

    def address(self) -> int:
        """Where the first matrix lies; the others follow it in the order of a pass."""
        return self.layers[0].qkv.weights.data_ptr()

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
            format=self.layers[0].qkv.format,
            norm_eps=config.norm_eps,
            embedding=self.embedding_VD.data_ptr(),
            layers=ctypes.addressof(self.described),
            final_norm=self.final_norm.data_ptr(),
            head=self.head.describe(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            rotation_signs=None if self.rotation is None else self.rotation.scaled_signs_D.data_ptr(),
            rotation_cosines=None if self.rotation is None else self.rotation.cosines.data_ptr(),
            rotation_power=0 if self.rotation is None else self.rotation.power,
        )


class RotaryTable:
    """cos and sin by position, float32 ``[positions, C / 2]`` padded to 16; grows as positions are met."""

    _PIECE = 512
    """Positions are computed in pieces of one size, so that an entry's bits do not depend on how the table grew."""

    def __init__(self, config: AttentionShape) -> None:
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
    """Read, reorder, convert and pack, one matrix at a time, so that the peak stays near the final size.

    The largest, embedding and LM head, come first, while little else is in memory.
    """
    config, packer = source.config, _Packer(source, placement.precision)
    embedding_VD, packed_head, final_norm = packer.ends()
    layers = []
    for index in range(config.num_layers):
        layers.append(packer.layer(index))
        give_back_freed_memory()
    return NativeWeights(
        embedding_VD=embedding_VD,
        layers=tuple(layers),
        final_norm=final_norm,
        head=packed_head,
        rotation=packer.rotation,
        described=(CLayer * len(layers))(*(layer.describe() for layer in layers)),
    )


class _Packer:
    """Converts matrices one by one. In int8 the residual stream is rotated (:mod:`outrider.models.rotation`).

    A *reader* of the stream takes the norm's weight in, when rotated, and leaves ones; a *writer*'s outputs are padded as
    the stream is.
    """

    def __init__(self, source: WeightSource, precision: Precision) -> None:
        self._source, self._config = source, source.config
        self._precision: Precision = precision
        self._arena = Arena(_num_bytes(source.config, precision))
        self.rotation = StreamRotation(source.config.hidden_size) if precision == "int8" else None

    def ends(self) -> tuple[Tensor, PackedMatrix, Tensor]:
        """Embedding, LM head and final norm. A pass streams the head last, so that is where it lies."""
        embedding = self._source.tensor("model.embed_tokens.weight")
        is_tied = self._config.tie_word_embeddings
        head = embedding if is_tied else self._source.tensor("lm_head.weight")
        packed_head, final_norm = self.reader(head, self._source.tensor("model.norm.weight"), is_last=True)
        return self.embedding(embedding), packed_head, final_norm

    def layer(self, index: int) -> NativeLayer:
        if self._precision in GROUP_WIDTHS:
            return self._layer_int4(f"model.layers.{index}.")
        config, prefix = self._config, f"model.layers.{index}."

        def read(name: str) -> Tensor:
            return self._source.tensor(f"{prefix}{name}.weight")

        heads = [read(f"self_attn.{name}_proj") for name in "qkv"]
        qkv, attention_norm = self.reader(fuse_heads(*heads, config=config), read("input_layernorm"))
        out = self.writer(spread_heads(read("self_attn.o_proj"), config))
        both = interleave(read("mlp.gate_proj"), read("mlp.up_proj"))
        gate_up, feed_forward_norm = self.reader(both, read("post_attention_layernorm"))
        return NativeLayer(
            attention_norm=attention_norm,
            qkv=qkv,
            out=out,
            feed_forward_norm=feed_forward_norm,
            gate_up=gate_up,
            down=self.writer(read("mlp.down_proj")),
        )

    def _layer_int4(self, prefix: str) -> NativeLayer:
        config = self._config

        def read(name: str) -> Tensor:
            return self._source.tensor(f"{prefix}{name}.weight")

        def grid(name: str) -> Grid:
            return read_grid(self._source, f"{prefix}{name}.weight", self._precision, self._source.tensor)

        heads = [grid(f"self_attn.{name}_proj") for name in "qkv"]
        qkv = combine(lambda q, k, v: fuse_heads(q, k, v, config=config), *heads)
        gate_up = combine(interleave, grid("mlp.gate_proj"), grid("mlp.up_proj"))
        return NativeLayer(
            attention_norm=padded_norm(read("input_layernorm")),
            qkv=self._place_grid(qkv, BLOCK),
            out=self._place_grid(self._out_grid(prefix + "self_attn.o_proj.weight"), 64),
            feed_forward_norm=padded_norm(read("post_attention_layernorm")),
            gate_up=self._place_grid(gate_up, BLOCK),
            down=self._place_grid(grid("mlp.down_proj"), 64),
        )

    def reader(self, weight: Tensor, norm: Tensor, *, is_last: bool = False) -> tuple[PackedMatrix, Tensor]:
        if self.rotation is None:
            return self._place(weight, BLOCK, is_last=is_last), padded_norm(norm)
        return self._place(weight, BLOCK, norm=norm, is_last=is_last), padded_norm(torch.ones_like(norm))

    def writer(self, weight: Tensor) -> PackedMatrix:
        return self._place(weight if self.rotation is None else self.rotation.rotate_outputs(weight), 64)

    def embedding(self, table: Tensor) -> Tensor:
        if self.rotation is None:
            return table.to(torch.bfloat16).contiguous()
        rotated = torch.empty_like(table, dtype=torch.bfloat16)
        for start in range(0, table.shape[0], _ROWS_AT_A_TIME):
            rotated[start : start + _ROWS_AT_A_TIME] = self.rotation.rotate(table[start : start + _ROWS_AT_A_TIME])
        return rotated

    def _out_grid(self, name: str) -> Grid:
        """Heads that are no whole blocks are padded, which moves their inputs between groups: then the file's do not fit."""
        if self._config.head_width % BLOCK == 0:
            return read_grid(self._source, name, self._precision, self._source.tensor)
        return quantise_to_grid(spread_heads(self._source.tensor(name), self._config), self._precision)

    def _place_grid(self, grid: Grid, multiple: int) -> PackedMatrix:
        """Pack into the arena; padded outputs and inputs have scales of zero."""
        num_out, num_in = padded(grid.levels.shape[0], multiple), padded(grid.levels.shape[1])
        num_groups = -(-num_in // grid.group)

        def filled(part: Tensor, columns: int) -> Tensor:
            return F.pad(part, (0, columns - part.shape[1], 0, num_out - part.shape[0]))

        minimums = None if grid.minimums is None else filled(grid.minimums, num_groups)
        values = pack_int4(filled(grid.levels, num_in), filled(grid.scales, num_groups), minimums)
        packed = self._arena.reserve(values.shape, torch.uint8)
        packed.copy_(values)
        return PackedMatrix(weights=packed, scales=None, num_steps=num_in // 64, group=grid.group)

    def _place(
        self, weight: Tensor, multiple: int, *, norm: Tensor | None = None, is_last: bool = False
    ) -> PackedMatrix:
        """Pack into the arena; with ``norm`` each row is multiplied by it and rotated first."""
        rotation = self.rotation

        def turned(rows: Tensor) -> Tensor:
            return rows if norm is None or rotation is None else rotation.rotate(rows.float() * norm.float())

        is_int8 = self._precision != "bfloat16"
        return place_matrix(self._arena, weight, is_int8=is_int8, multiple=multiple, convert=turned, is_last=is_last)


def place_matrix(
    arena: Arena,
    weight: Tensor,
    *,
    is_int8: bool,
    multiple: int = BLOCK,
    convert: Callable[[Tensor], Tensor] = lambda rows: rows,
    is_last: bool = False,
) -> PackedMatrix:
    """Pack a matrix ``[out, in]`` into an arena, some rows at a time.

    Args:
        arena: with room for it.
        weight: any float dtype.
        is_int8: one scale for each output, else bfloat16.
        multiple: what outputs are padded to: 32, or 64 if they are the residual stream.
        convert: what is done to rows of it first.
        is_last: see :meth:`outrider.native.packing.Arena.reserve`.
    """
    num_out, num_in = padded(weight.shape[0], multiple), padded(weight.shape[1])
    dtype = torch.int8 if is_int8 else torch.bfloat16
    words = 64 // dtype.itemsize
    shape = (num_out // BLOCK, num_in // words, 2, 16, 16, 4 // dtype.itemsize)
    packed = arena.reserve(shape, dtype, is_last=is_last)
    scales = torch.zeros(num_out) if is_int8 else None
    for start in range(0, weight.shape[0], _ROWS_AT_A_TIME):
        rows = convert(weight[start : start + _ROWS_AT_A_TIME])
        rows = F.pad(rows, (0, num_in - rows.shape[1], 0, -rows.shape[0] % multiple))
        if scales is not None:
            rows, scales[start : start + rows.shape[0]] = quantise(rows)
        packed[start // BLOCK : (start + rows.shape[0]) // BLOCK] = pack(rows.to(dtype))
    return PackedMatrix(weights=packed, scales=scales, num_steps=num_in // words)


def padded_norm(norm: Tensor) -> Tensor:
    """float32, padded with zeros as the stream is."""
    return F.pad(norm.float(), (0, -norm.shape[0] % 64)).contiguous()


def fuse_heads(query: Tensor, key: Tensor, value: Tensor, *, config: AttentionShape) -> Tensor:
    """Query, key and value heads behind one another, each in whole blocks; see :func:`head_rows`."""
    paired, plain = head_rows(config.head_width, paired=True), head_rows(config.head_width, paired=False)
    return torch.cat((_heads(query, paired, config), _heads(key, paired, config), _heads(value, plain, config)))


def _heads(weight: Tensor, rows: Tensor, config: AttentionShape) -> Tensor:
    starts = torch.arange(0, weight.shape[0], config.head_width).unsqueeze(1)
    return take_rows(weight, torch.where(rows < 0, -1, starts + rows).flatten())


def spread_heads(out: Tensor, config: AttentionShape) -> Tensor:
    """The output matrix with each head's inputs padded to whole blocks."""
    missing = -config.head_width % BLOCK
    return F.pad(out.reshape(-1, config.num_heads, config.head_width), (0, missing)).flatten(1)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Blocks of 16 gate outputs and the same 16 of up, so that they meet in one block's results."""
    missing = -gate.shape[0] % 64
    pairs = [F.pad(weight, (0, 0, 0, missing)).reshape(-1, 16, weight.shape[1]) for weight in (gate, up)]
    return torch.stack(pairs, dim=1).flatten(0, 2)


def _num_bytes(config: LlamaConfig, precision: Precision) -> int:
    size = 2 if precision == "bfloat16" else 1
    *layers, head = _shapes(config)
    whole = padded(head[0]) * padded(head[1]) * size
    group = GROUP_WIDTHS.get(precision)
    if group is None:
        return whole + sum(padded(rows) * padded(columns) * size for rows, columns in layers)
    return whole + sum(padded(rows) // 16 * int4_tile_bytes(padded(columns), group) for rows, columns in layers)


def _shapes(config: LlamaConfig) -> Iterator[tuple[int, int]]:
    """Padded shapes of all matrices, the LM head last."""
    width = padded(config.head_width, BLOCK)
    heads = config.num_heads + 2 * config.num_kv_heads
    for _ in range(config.num_layers):
        yield heads * width, config.hidden_size
        yield config.hidden_size, config.num_heads * width
        yield 2 * padded(config.intermediate_size), config.hidden_size
        yield config.hidden_size, config.intermediate_size
    yield config.vocab_size, config.hidden_size
