"""The head as drafting runs it: matrices fused, converted and packed once; the same arithmetic as the trained module.

This is the seam for faster kernels: whoever offers :class:`HeadPass`' three methods can take the place of the parts here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead, EagleLayer
from outrider.models.layers import Rotary, Rotation, gated, rms_norm
from outrider.models.linear import Matrix, dense_matrix

__all__ = ["AttendRows", "EaglePass", "HeadPass"]

AttendRows: TypeAlias = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]
"""Attention of one layer: layer index and the rows' rotated query, key and value heads, ``[R, H + 2 G, C]``.

Returns what the queries found, ``[R', H * C]``, and which rows those are (``None``: all of them): of the last layer only
some rows' outputs may be wanted.
"""


class HeadPass(Protocol):
    """The arithmetic of a head over packed rows."""

    config: EagleConfig

    def fuse(self, taps_RD: Tensor) -> Tensor:
        """Features ``[R, D]``."""
        ...

    def outputs(self, hidden_RD: Tensor, tokens_R: Tensor, rotation: Rotation, attend: AttendRows) -> Tensor:
        """What stands in for the next entries' features, ``[R', D]``, still without :meth:`feedback`'s norm."""
        ...

    def logits(self, outputs_RD: Tensor) -> Tensor:
        """float32 logits over the draft vocabulary, ``[R, U]``."""
        ...

    def feedback(self, outputs_RD: Tensor) -> Tensor:
        """What stands in for the feature of the next entry."""
        ...


class _Layer:
    """One layer's parts."""

    def __init__(self, layer: EagleLayer, placement: Placement) -> None:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=placement.device, dtype=placement.activation_dtype)

        attention, mlp = layer.self_attn, layer.mlp
        fused = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        self.qkv = dense_matrix(fused, placement)
        self.out = dense_matrix(attention.o_proj.weight, placement)
        self.gate_up = dense_matrix(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), placement)
        self.down = dense_matrix(mlp.down_proj.weight, placement)
        self.hidden_norm = None if layer.hidden_norm is None else moved(layer.hidden_norm.weight)
        self.input_norm = moved(layer.input_layernorm.weight)
        self.mlp_norm = moved(layer.post_attention_layernorm.weight)


class EaglePass:
    """A head's weights at a placement.

    Args:
        head: with its embedding attached; not kept.
        placement: bfloat16 or float32 (int8 runs as bfloat16 here).
    """

    def __init__(self, head: EagleHead, placement: Placement) -> None:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device=placement.device, dtype=placement.activation_dtype)

        assert head.embedding is not None, "attach_embedding comes first"
        self.config = config = head.config
        self.device, self.dtype = placement.device, placement.activation_dtype
        self._embedding_VD = moved(head.embedding)
        self._input_norm = None if head.input_norm is None else moved(head.input_norm.weight)
        self._fc_norms = [] if head.fc_norm is None else [moved(norm.weight) for norm in head.fc_norm]  # type: ignore[arg-type]
        self._fc: Matrix = dense_matrix(head.fc.weight, placement)
        self._fc_bias = None if head.fc.bias is None else moved(head.fc.bias)
        self._layers = [_Layer(layer, placement) for layer in (head.midlayer, *head.layers.values())]  # type: ignore[arg-type]
        self._norm = moved(head.norm.weight)
        self._lm_head: Matrix = dense_matrix(head.lm_head.weight, placement)
        self._rotary = Rotary(config, dtype=self.dtype, device=self.device)
        self.target_ids_U = head.target_ids().to(self.device)

    def num_weight_bytes(self) -> int:
        """Bytes that one level streams: all matrices but the fusing one, which reads taps only."""
        layers = sum(m.num_bytes for each in self._layers for m in (each.qkv, each.out, each.gate_up, each.down))
        return layers + self._lm_head.num_bytes

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotation of rows at these positions ``[R]``."""
        return self._rotary.at(positions)

    def fuse(self, taps_RD: Tensor) -> Tensor:
        """Features ``[R, D]`` of taps ``[R, A * D]``."""
        taps_RD = taps_RD.to(device=self.device, dtype=self.dtype)
        if self._input_norm is not None:
            taps_RD = rms_norm(taps_RD, self._input_norm, self.config.norm_eps)
        if self._fc_norms:
            pieces = zip(taps_RD.chunk(self.config.num_taps, dim=-1), self._fc_norms, strict=True)
            taps_RD = torch.cat([rms_norm(piece, weight, self.config.norm_eps) for piece, weight in pieces], dim=-1)
        features_RD = self._fc(taps_RD)
        return features_RD if self._fc_bias is None else features_RD + self._fc_bias

    def outputs(self, hidden_RD: Tensor, tokens_R: Tensor, rotation: Rotation, attend: AttendRows) -> Tensor:
        """Run the layers; see :meth:`outrider.drafters.eagle_head.EagleHead.forward`."""
        eps, width = self.config.norm_eps, self.config.head_width
        x_RD = hidden_RD
        for index, layer in enumerate(self._layers):
            inputs = rms_norm(x_RD, layer.hidden_norm if layer.hidden_norm is not None else layer.input_norm, eps)
            if layer.hidden_norm is not None:
                if self.config.norm_before_residual:
                    x_RD = inputs
                embedded_RD = F.embedding(tokens_R, self._embedding_VD)
                inputs = torch.cat((rms_norm(embedded_RD, layer.input_norm, eps), inputs), dim=-1)
            qkv_RNC = rotation.apply(layer.qkv(inputs).view(len(tokens_R), -1, width))
            attended, kept = attend(index, qkv_RNC)
            x_RD = layer.out.add_to(x_RD if kept is None else x_RD[kept], attended)
            x_RD = layer.down.add_to(x_RD, gated(layer.gate_up(rms_norm(x_RD, layer.mlp_norm, eps))))
        return x_RD

    def feedback(self, outputs_RD: Tensor) -> Tensor:
        """What stands in for the feature of the next entry."""
        return self._normed(outputs_RD) if self.config.norm_output else outputs_RD

    def logits(self, outputs_RD: Tensor) -> Tensor:
        """float32 logits ``[R, U]``. Products are rounded to the placement's dtype: only a ranking is wanted."""
        return self._lm_head(self._normed(outputs_RD)).float()

    def _normed(self, outputs_RD: Tensor) -> Tensor:
        return rms_norm(outputs_RD, self._norm, self.config.norm_eps)
