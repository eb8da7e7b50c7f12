"""The parts of a Llama layer that are not matrices: norm, rotary embedding, gated activation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.config import RopeConfig

__all__ = ["Rotary", "Rotation", "gated", "inverse_frequencies", "rms_norm"]


def rms_norm(x_RD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row."""
    return F.rms_norm(x_RD, weight_D.shape, weight_D, eps)


def gated(gate_up_RF: Tensor) -> Tensor:
    """SwiGLU: silu(first half) * second half."""
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    return F.silu(gate_RF).mul_(up_RF)


def inverse_frequencies(rope: RopeConfig, head_width: int) -> Tensor:
    """Rotations per position of each dimension pair, float32 ``[C / 2]``.

    ``llama3`` follows Llama 3.1: wavelengths longer than ``original_max_positions / low_freq_factor`` are slowed by
    ``factor``, those shorter than ``original_max_positions / high_freq_factor`` kept, those between blended linearly.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32) / head_width
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * frequencies / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        share_kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
        return share_kept * frequencies + (1 - share_kept) * frequencies / rope.factor
    return frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Rotary embedding of one pass, computed once and shared by all layers.

    Covers query, key *and value* heads of a row (values with angle 0), so that a layer rotates its fused product in three
    operations over one piece of memory. The sign of rotate-half is folded into ``sin``.
    """

    cos_RNC: Tensor
    sin_RNC: Tensor

    def apply(self, qkv_RNC: Tensor) -> Tensor:
        """``[R, heads, C]``, rotated."""
        swapped_RNC = qkv_RNC.roll(qkv_RNC.shape[-1] // 2, -1)
        return torch.addcmul(qkv_RNC * self.cos_RNC, swapped_RNC, self.sin_RNC)


class HeadShape(Protocol):
    """What rotary embedding must know of a model: a :class:`outrider.models.config.LlamaConfig`, or a head's config."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def rope(self) -> RopeConfig: ...


class Rotary:
    """Rotary position embedding, rotate-half form."""

    def __init__(self, config: HeadShape, *, dtype: torch.dtype, device: torch.device) -> None:
        half = inverse_frequencies(config.rope, config.head_width)
        self._frequencies_C = torch.cat((half, half)).to(device)
        self._signs_C = torch.cat((-torch.ones_like(half), torch.ones_like(half))).to(device)
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._num_values = config.num_kv_heads
        self._dtype = dtype

    def at(self, positions_R: Tensor) -> Rotation:
        """The rotation of rows at these positions. Angles are float32, as in training."""
        angles_RC = positions_R.to(torch.float32).unsqueeze(1) * self._frequencies_C
        cos_RC, sin_RC = angles_RC.cos(), angles_RC.sin() * self._signs_C
        return Rotation(cos_RNC=self._spread(cos_RC, 1.0), sin_RNC=self._spread(sin_RC, 0.0))

    def _spread(self, table_RC: Tensor, value: float) -> Tensor:
        num_rows, width = table_RC.shape
        rotated = table_RC.to(self._dtype).unsqueeze(1).expand(-1, self._num_rotated, -1)
        fixed = rotated.new_full((1, 1, 1), value).expand(num_rows, self._num_values, width)
        return torch.cat((rotated, fixed), dim=1)
