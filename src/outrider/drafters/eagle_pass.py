"""The head as drafting runs it: matrices fused, converted and packed once; the same arithmetic as the trained module.

:mod:`outrider.drafters.eagle_walk` hands attention in. Native kernels have a pass of their own
(:mod:`outrider.drafters.eagle_native_head`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import Placement
from outrider.drafters.eagle_head import EagleHead, EagleLayer, RMSNorm
from outrider.models.layers import Rotary, Rotation, gated
from outrider.models.linear import Matrix, dense_matrix

__all__ = ["AttendRows", "EaglePass"]

AttendRows: TypeAlias = Callable[[int, Tensor], tuple[Tensor, Tensor | None]]
"""Attention of one layer: layer index and the rows' rotated query, key and value heads, ``[R, H + 2 G, C]``.

Returns what the queries found, ``[R', H * C]``, and which rows those are (``None``: all of them): of the last layer only
some rows' outputs may be wanted.
"""


class _Norm:
    """RMS norm of few rows in a handful of small operations; torch's own takes five times as long in bfloat16 on a CPU."""

    def __init__(self, norm: RMSNorm, device: torch.device) -> None:
        width = norm.weight.shape[0]
        # x / sqrt(mean(x^2) + eps) = x * sqrt(D) / hypot(|x|, sqrt(D * eps))
        self._weight_D = norm.weight.detach().to(device=device, dtype=torch.float32) * width**0.5
        self._root = torch.tensor((width * norm.eps) ** 0.5, device=device)

    def __call__(self, x_RD: Tensor) -> Tensor:
        norms_R1 = torch.linalg.vector_norm(x_RD, 2, -1, keepdim=True, dtype=torch.float32)
        normed_RD: Tensor = (x_RD / norms_R1.hypot_(self._root)).mul_(self._weight_D).to(x_RD.dtype)
        return normed_RD


class _Layer:
    """One layer's parts."""

    def __init__(self, layer: EagleLayer, placement: Placement) -> None:
        device = placement.device
        attention, mlp = layer.self_attn, layer.mlp
        fused = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        self.qkv = dense_matrix(fused, placement)
        self.out = dense_matrix(attention.o_proj.weight, placement)
        self.gate_up = dense_matrix(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), placement)
        self.down = dense_matrix(mlp.down_proj.weight, placement)
        self.hidden_norm = None if layer.hidden_norm is None else _Norm(layer.hidden_norm, device)
        self.input_norm = _Norm(layer.input_layernorm, device)
        self.mlp_norm = _Norm(layer.post_attention_layernorm, device)


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
        self._input_norm = None if head.input_norm is None else _Norm(head.input_norm, self.device)
        self._fc_norms = [_Norm(norm, self.device) for norm in head.fc_norm or ()]  # type: ignore[arg-type]
        self._fc: Matrix = dense_matrix(head.fc.weight, placement)
        self._fc_bias = None if head.fc.bias is None else moved(head.fc.bias)
        self._layers = [_Layer(layer, placement) for layer in (head.midlayer, *head.layers.values())]  # type: ignore[arg-type]
        self._norm = _Norm(head.norm, self.device)
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
            taps_RD = self._input_norm(taps_RD)
        if self._fc_norms:
            pieces = zip(taps_RD.chunk(self.config.num_taps, dim=-1), self._fc_norms, strict=True)
            taps_RD = torch.cat([norm(piece) for piece, norm in pieces], dim=-1)
        features_RD = self._fc(taps_RD)
        return features_RD if self._fc_bias is None else features_RD + self._fc_bias

    def outputs(self, hidden_RD: Tensor, tokens_R: Tensor, rotation: Rotation, attend: AttendRows) -> Tensor:
        """Run the layers; see :meth:`outrider.drafters.eagle_head.EagleHead.forward`."""
        width = self.config.head_width
        x_RD = hidden_RD
        for index, layer in enumerate(self._layers):
            inputs = (layer.hidden_norm or layer.input_norm)(x_RD)
            if layer.hidden_norm is not None:
                if self.config.norm_before_residual:
                    x_RD = inputs
                embedded_RD = F.embedding(tokens_R, self._embedding_VD)
                inputs = torch.cat((layer.input_norm(embedded_RD), inputs), dim=-1)
            qkv_RNC = rotation.apply(layer.qkv(inputs).view(len(tokens_R), -1, width))
            attended, kept = attend(index, qkv_RNC)
            x_RD = layer.out.add_to(x_RD if kept is None else x_RD[kept], attended)
            x_RD = layer.down.add_to(x_RD, gated(layer.gate_up(layer.mlp_norm(x_RD))))
        return x_RD

    def feedback(self, outputs_RD: Tensor) -> Tensor:
        """What stands in for the feature of the next entry."""
        return self._norm(outputs_RD) if self.config.norm_output else outputs_RD

    def logits(self, outputs_RD: Tensor) -> Tensor:
        """float32 logits ``[R, U]``. Products are rounded to the placement's dtype: only a ranking is wanted."""
        return self._lm_head(self._norm(outputs_RD)).float()
