"""A head's weights for the native kernels, and its pass as one call into C++.

The head is a small Llama: the native pass that runs the target runs it too, with three differences that
``native/csrc/abi.h`` describes. Its stream starts from given rows (earlier outputs, or taps that the fusing matrix makes
features of), the first layer reads the embedded token beside the stream, and the LM head ranks what it computes. Products
are bfloat16 or int8 as asked, except that taps, whose outliers no int8 row stands, are always fused in bfloat16. Rows of
int8 products are split in two (``rows.h``): the stream of a head is not rotated, and few rows cost no more twice.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Precision
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead, EagleLayer
from outrider.errors import ConfigError
from outrider.models.layers import rms_norm
from outrider.models.native_weights import (
    NativeLayer,
    PackedMatrix,
    RotaryTable,
    fuse_heads,
    interleave,
    padded_norm,
    place_matrix,
    spread_heads,
)
from outrider.native.library import CForest, CGrowth, CLayer, CModel, Context, CPass, CSegment
from outrider.native.packing import Arena, padded

__all__ = ["GrowthLimits", "HeadRows", "NativeHead", "Ranked"]

_STREAM = 64
"""What the stream's width is padded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Rows of one pass.

    Attributes:
        start_RD: float32; what the stream starts from, or if ``is_taps`` what :meth:`NativeHead.prepared_taps` gave.
        is_taps: whether those are taps.
        tokens, positions: of each row.
        segments: the sequences that the rows belong to.
        logit_rows: rows that are ranked.
    """

    start_RD: Tensor
    is_taps: bool
    tokens: Sequence[int]
    positions: Sequence[int]
    segments: ctypes.Array[CSegment]
    logit_rows: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthLimits:
    """How trees grow.

    Attributes:
        width: nodes expanded on a level, and children of each.
        min_score: candidates that score less are left out.
        min_level: see :class:`outrider.drafters.tree.TreeShape`.
    """

    width: int
    min_score: float = -math.inf
    min_level: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """What a pass found.

    Attributes:
        outputs_RD: float32, of all rows, before the final norm.
        logits_RU: float32, of the rows that were ranked; the head's next pass overwrites them.
        ids_RK, logprobs_RK: their likeliest draft ids, best first, of equals the lowest, and log-probabilities.
    """

    outputs_RD: Tensor
    logits_RU: Tensor
    ids_RK: Tensor
    logprobs_RK: Tensor


class NativeHead:
    """A head's packed weights.

    Args:
        head: with its embedding attached; not kept.
        precision: ``bfloat16`` or ``int8``.
        context: the threads that run it.

    Raises:
        ConfigError: another precision.
    """

    def __init__(self, head: EagleHead, precision: Precision, context: Context) -> None:
        if precision not in ("bfloat16", "int8"):
            raise ConfigError(f"the native pass of a head does not run {precision}; allowed: bfloat16, int8")
        assert head.embedding is not None, "attach_embedding comes first"
        self.config = head.config
        self.precision: Precision = precision
        self._context = context
        self._embedding_VD = head.embedding.to(dtype=torch.bfloat16, device="cpu").contiguous()
        self._tap_norms_AD = _tap_norms(head)
        self._pack(head)
        self._side_norm = padded_norm(head.midlayer.input_layernorm.weight.detach())
        self._final_norm = padded_norm(head.norm.weight.detach())
        self._output_norm_D = head.norm.weight.detach().float()
        self._fuse_bias = None if head.fc.bias is None else padded_norm(head.fc.bias.detach())
        self._described = (CLayer * len(self._layers))(*(layer.describe() for layer in self._layers))
        self._rotary = RotaryTable(head.config)
        self._rotations = self._rotary.upto(1)
        self._num_positions = len(self._rotations[0])
        self._model = self._describe(*self._rotations)
        self._logits_RU = torch.empty(0, head.config.draft_vocab_size)
        self._target_ids_U = head.target_ids().long().cpu().contiguous()

    def _pack(self, head: EagleHead) -> None:
        is_int8 = self.precision == "int8"
        layers = [head.midlayer, *head.layers.values()]
        matrices = [_matrices(layer, head) for layer in layers]  # type: ignore[arg-type]
        fuse, lm_head = head.fc.weight.detach(), head.lm_head.weight.detach()
        streamed = [matrix for each in matrices for matrix in each] + [(lm_head, 32)]
        num_bytes = sum(_num_bytes(matrix, is_int8=is_int8) for matrix in streamed)
        arena = Arena(num_bytes + _num_bytes((fuse, _STREAM), is_int8=False))
        self._fuse = place_matrix(arena, fuse, is_int8=False, multiple=_STREAM)
        self._layers = []
        for layer, each in zip(layers, matrices, strict=True):
            placed = [place_matrix(arena, weight, is_int8=is_int8, multiple=multiple) for weight, multiple in each]
            self._layers.append(_native_layer(layer, placed))  # type: ignore[arg-type]
        self._lm_head = place_matrix(arena, lm_head, is_int8=is_int8)

    def num_weight_bytes(self) -> int:
        """Bytes that one level streams: all matrices but the fusing one, which reads taps only."""
        layers = sum(m.num_bytes() for each in self._layers for m in (each.qkv, each.out, each.gate_up, each.down))
        return layers + self._lm_head.num_bytes()

    def prepared_taps(self, taps_RD: Tensor) -> Tensor:
        """Taps ``[R, A * D]`` as :class:`HeadRows` takes them: normed if the head asks for it, float32, padded."""
        taps_RD = taps_RD.float()
        if self._tap_norms_AD is not None:
            split_RAD = taps_RD.view(len(taps_RD), *self._tap_norms_AD.shape)
            normed_RAD = F.rms_norm(split_RAD, split_RAD.shape[2:], eps=self.config.norm_eps) * self._tap_norms_AD
            taps_RD = normed_RAD.flatten(1)
        missing = -taps_RD.shape[1] % 64
        return (F.pad(taps_RD, (0, missing)) if missing else taps_RD).contiguous()

    @property
    def is_feedback_plain(self) -> bool:
        """True if outputs start the next entries' stream as they are."""
        return not self.config.norm_output

    def feedback(self, outputs_RD: Tensor) -> Tensor:
        """What the next entries' stream starts from."""
        if self.is_feedback_plain:
            return outputs_RD
        return rms_norm(outputs_RD, self._output_norm_D, self.config.norm_eps)

    def run(self, rows: HeadRows, *, num_top: int) -> Ranked:
        """Run the layers, write the rows' keys and values, and rank the tokens behind the rows asked for."""
        call = _Call(self.config, rows, self._room_for_logits(len(rows.logit_rows)), num_top)
        self._context.run(self._model_for(max(rows.positions) + 1), call.rows)
        return call.ranked

    def grow(self, rows: HeadRows, trees: ctypes.Array[CGrowth], *, limits: GrowthLimits) -> None:
        """Run a pass over entries, one logit row a tree, and fill the trees behind them; levels are read as they grow.

        Args:
            rows: taps.
            trees: with room for their candidates.
            limits: of all trees.
        """
        assert self.is_feedback_plain, "the outputs are normed between the levels"
        width, most_rows = limits.width, len(trees) * limits.width
        call = _Call(self.config, rows, self._room_for_logits(most_rows), width, most_ranked=most_rows)
        furthest = max(tree.position + tree.depth for tree in trees)
        forest = CForest(
            num_trees=len(trees),
            width=width,
            trees=ctypes.addressof(trees),
            target_ids=self._target_ids_U.data_ptr(),
            min_score=limits.min_score,
            min_level=limits.min_level,
        )
        self._context.grow(self._model_for(max(*rows.positions, furthest) + 1), call.rows, forest)

    def _room_for_logits(self, num_rows: int) -> Tensor:
        """Memory that every pass fills anew: fresh pages would cost more than ranking does."""
        if len(self._logits_RU) < num_rows:
            self._logits_RU = torch.empty(num_rows, self.config.draft_vocab_size)
        return self._logits_RU[:num_rows]

    def _model_for(self, num_positions: int) -> CModel:
        if num_positions > self._num_positions:
            self._rotations = self._rotary.upto(num_positions)
            self._num_positions = len(self._rotations[0])
            self._model = self._describe(*self._rotations)
        return self._model

    def _describe(self, cosines: Tensor, sines: Tensor) -> CModel:
        config = self.config
        return CModel(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            hidden_padded=padded(config.hidden_size),
            inner_padded=padded(config.intermediate_size),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_width=config.head_width,
            vocab_size=config.draft_vocab_size,
            format=self._lm_head.format,
            norm_eps=config.norm_eps,
            embedding=self._embedding_VD.data_ptr(),
            layers=ctypes.addressof(self._described),
            final_norm=self._final_norm.data_ptr(),
            head=self._lm_head.describe(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            side_norm=self._side_norm.data_ptr(),
            norm_inputs=config.norm_before_residual,
            fuse=self._fuse.describe(),
            fuse_bias=None if self._fuse_bias is None else self._fuse_bias.data_ptr(),
            split_rows=True,
        )


class _Call:
    """One pass as C takes it, and what keeps its memory alive.

    Args:
        config: of the head.
        rows: of the pass.
        logits_RU: room for the logits of all rows that are ranked.
        num_top: ids ranked of each.
        most_ranked: rows that the ids and log-probabilities have room for, if that is more than this pass ranks.
    """

    def __init__(
        self, config: EagleConfig, rows: HeadRows, logits_RU: Tensor, num_top: int, *, most_ranked: int = 0
    ) -> None:
        num_rows, num_ranked = len(rows.tokens), len(rows.logit_rows)
        num_top, room = min(num_top, config.draft_vocab_size), max(num_ranked, most_ranked)
        self.ranked = Ranked(
            outputs_RD=torch.empty(num_rows, config.hidden_size),
            logits_RU=logits_RU,
            ids_RK=torch.empty(room, num_top, dtype=torch.int64),
            logprobs_RK=torch.empty(room, num_top),
        )
        tokens, positions = (ctypes.c_int64 * num_rows)(*rows.tokens), (ctypes.c_int64 * num_rows)(*rows.positions)
        logit_rows, last_layer = (ctypes.c_int32 * num_ranked)(*rows.logit_rows), ctypes.c_int32(config.num_layers)
        self._alive = (tokens, positions, logit_rows, last_layer, rows)
        self.rows = CPass(
            num_rows=num_rows,
            num_segments=len(rows.segments),
            tokens=ctypes.addressof(tokens),
            positions=ctypes.addressof(positions),
            segments=ctypes.addressof(rows.segments),
            num_logit_rows=num_ranked,
            logit_rows=ctypes.addressof(logit_rows),
            logits=logits_RU.data_ptr(),
            num_taps=1,
            tap_layers=ctypes.addressof(last_layer),
            taps=self.ranked.outputs_RD.data_ptr(),
            inputs=rows.start_RD.data_ptr(),
            is_fused=rows.is_taps,
            num_top=num_top,
            top_ids=self.ranked.ids_RK.data_ptr(),
            top_logprobs=self.ranked.logprobs_RK.data_ptr(),
        )


def _matrices(layer: EagleLayer, head: EagleHead) -> list[tuple[Tensor, int]]:
    """Query/key/value, output, gate/up and down as they are packed, with what their outputs are padded to."""
    config, attention, mlp = head.config, layer.self_attn, layer.mlp
    query, key, value = (
        _halves(proj.weight.detach(), config.hidden_size)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    qkv = fuse_heads(query, key, value, config=config)
    out = spread_heads(attention.o_proj.weight.detach(), config)
    gate_up = interleave(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())
    return [(qkv, 32), (out, _STREAM), (gate_up, 32), (mlp.down_proj.weight.detach(), _STREAM)]


def _halves(weight: Tensor, width: int) -> Tensor:
    """Inputs in pieces of the stream's width, each padded."""
    return torch.cat([F.pad(piece, (0, -width % _STREAM)) for piece in torch.split(weight, width, dim=1)], dim=1)


def _native_layer(layer: EagleLayer, placed: Sequence[PackedMatrix]) -> NativeLayer:
    stream_norm = layer.input_layernorm if layer.hidden_norm is None else layer.hidden_norm
    qkv, out, gate_up, down = placed
    return NativeLayer(
        attention_norm=padded_norm(stream_norm.weight.detach()),
        qkv=qkv,
        out=out,
        feed_forward_norm=padded_norm(layer.post_attention_layernorm.weight.detach()),
        gate_up=gate_up,
        down=down,
    )


def _tap_norms(head: EagleHead) -> Tensor | None:
    """Norm weights of the taps, ``[pieces that are normed apart, width]``."""
    if head.input_norm is not None:
        return head.input_norm.weight.detach().float().unsqueeze(0)
    if head.fc_norm is None:
        return None
    return torch.stack([norm.detach().float() for norm in head.fc_norm.parameters()])


def _num_bytes(matrix: tuple[Tensor, int], *, is_int8: bool) -> int:
    weight, multiple = matrix
    return padded(padded(weight.shape[0], multiple) * padded(weight.shape[1]) * (1 if is_int8 else 2))
