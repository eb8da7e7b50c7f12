"""Training-time test of an EAGLE-3 head: the one file of the pipeline that knows this kind of head.

It computes what ``EagleHead.forward`` with :class:`outrider.drafters.eagle_head.UnrolledAttention` defines, from the same
parameters, and is tested equal to it; it leaves out what no loss needs. Of a prompt only features, keys and values are
computed, queries stand where a draft can begin: before a trained token that is followed by another. With a prompt of
tokens 0 .. 4 and an answer a, b, c, e (the end)::

    index i (features, step-0 keys)   0  1  2  3  4(prompt's last)   5(a)    6(b)
    query                                         yes               yes     yes
    step 0 reads, predicts                        a -> b            b -> c  c -> e
    step 1 reads, predicts                        b -> c            c -> e  nothing is left: weight 0
    law held against at step s                    that of query row s further on

RMS norm weights before queries, keys and values are folded into these matrices once a batch; queries, keys and values, and
gate and up, are one product each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.eagle_head import EagleHead, EagleLayer
from outrider.train.attention import AttentionPlan, unrolled_attention
from outrider.train.functions import SharedWeight, gated, linear, rotate, take_rows, unit_norm
from outrider.train.packing import TrainBatch

__all__ = ["UnrolledHead"]

Heads = tuple[Tensor, Tensor]
"""Keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer's matrices as one batch uses them: one norm folded in, neighbours fused; ``all`` is query, key and value."""

    all: SharedWeight
    query: Tensor
    key_value: Tensor
    out: SharedWeight
    norm: Tensor
    gate_up: SharedWeight
    down: SharedWeight
    residual_norm: Tensor | None

    @staticmethod
    def fold(layer: EagleLayer, dtype: torch.dtype) -> _Layer:
        attention = layer.self_attn
        norm: Tensor = layer.input_layernorm.weight
        if layer.hidden_norm is not None:
            norm = torch.cat((norm, layer.hidden_norm.weight))
        matrices = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        query_key_value = (torch.cat(matrices) * norm).to(dtype)
        num_queries = len(matrices[0])
        gate_up = torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight))
        is_normed = layer.norm_before_residual and layer.hidden_norm is not None
        return _Layer(
            all=SharedWeight(query_key_value),
            query=query_key_value[:num_queries],
            key_value=query_key_value[num_queries:],
            out=SharedWeight(attention.o_proj.weight.to(dtype)),
            gate_up=SharedWeight(gate_up.to(dtype)),
            norm=layer.post_attention_layernorm.weight,
            down=SharedWeight(layer.mlp.down_proj.weight.to(dtype)),
            residual_norm=layer.hidden_norm.weight.to(dtype) if is_normed and layer.hidden_norm is not None else None,
        )


class UnrolledHead:
    """A head as training runs it.

    Args:
        head: the module that is trained, its embedding attached.
        dtype: of activations and of the folded matrices; the parameters keep theirs.
    """

    def __init__(self, head: EagleHead, *, dtype: torch.dtype) -> None:
        assert head.embedding is not None, "attach_embedding comes first"
        self.head = head
        self.dtype = dtype
        self._config = head.config
        with torch.no_grad():
            # The embedding is frozen and only ever read through its norm: norm it once.
            self._embedding_VD = unit_norm(head.embedding.to(dtype), head.config.norm_eps)

    def __call__(self, batch: TrainBatch, num_steps: int) -> tuple[Tensor, Tensor]:
        """Unroll.

        Returns:
            Outputs of all steps behind the final norm, ``[N, Q, D]``, and the LM head, ``[U, D]`` in the parameters'
            dtype: their product is the logits.
        """
        layers = [_Layer.fold(layer, self.dtype) for layer in self._layers()]
        plan = AttentionPlan.build(batch.plan_texts, dtype=self.dtype)
        full = None if len(layers) == 1 else AttentionPlan.build(batch.all_texts, dtype=self.dtype)
        keys: list[list[Heads]] = [[] for _ in layers]
        hidden = self._first_step(batch, layers, keys, plan, full)
        outputs = [hidden]
        for step in range(1, num_steps):
            hidden = self._later_step(batch, layers, keys, plan, self._feedback(hidden), step)
            outputs.append(hidden)
        return unit_norm(torch.stack(outputs), self._config.norm_eps, self.head.norm.weight), self.head.lm_head.weight

    def num_flop(self, num_keys: int, num_queries: int, num_steps: int) -> float:
        """Floating-point operations of matrices, forward and backward: 6 a weight and row that it is applied to."""
        config, head = self._config, self.head
        width = config.head_width
        prompt = head.fc.weight.numel()
        query = head.lm_head.weight.numel()
        for index, layer in enumerate(self._layers()):
            weights = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
            key_value = 2 * config.num_kv_heads * width * layer.self_attn.k_proj.weight.shape[1]
            is_last = index == config.num_layers - 1
            prompt += key_value if is_last else weights
            query += weights - key_value if is_last else 0
        later = sum(p.numel() for layer in self._layers() for p in layer.parameters() if p.dim() == 2)
        later += head.lm_head.weight.numel()
        return 6.0 * (prompt * num_keys + query * num_queries + later * num_queries * (num_steps - 1))

    def _layers(self) -> list[EagleLayer]:
        layers: list[EagleLayer] = [self.head.midlayer]
        for layer in self.head.layers.values():
            assert isinstance(layer, EagleLayer)
            layers.append(layer)
        return layers

    def _unit(self, x: Tensor) -> Tensor:
        return unit_norm(x, self._config.norm_eps)

    def _feedback(self, output_QD: Tensor) -> Tensor:
        if not self._config.norm_output:
            return output_QD
        return unit_norm(output_QD, self._config.norm_eps, self.head.norm.weight)

    def _turn(self, positions: Tensor) -> Heads:
        cos, sin = self.head.rotation(positions, self.dtype)
        half = sin.shape[-1] // 2
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)

    def _first_step(
        self,
        batch: TrainBatch,
        layers: list[_Layer],
        keys: list[list[Heads]],
        plan: AttentionPlan,
        full: AttentionPlan | None,
    ) -> Tensor:
        """Step 0: features at every index; all of a layer only where something reads it."""
        hidden = self._fuse(batch.taps_RD.to(self.dtype))
        unit = self._unit(hidden)
        inputs = torch.cat((F.embedding(batch.next_tokens_R, self._embedding_VD), unit), dim=-1)
        positions = batch.positions_R
        for index, layer in enumerate(layers):
            turn = self._turn(positions)
            is_last = index == len(layers) - 1
            keys[index].append(self._keys(linear(inputs, layer.key_value), turn))
            at = batch.query_rows_Q
            residual = self._residual(layer, hidden, unit)
            if is_last:
                inputs, residual = take_rows(inputs, at), take_rows(residual, at)
                turn = (turn[0][at], turn[1][at])
            who = plan if is_last else full
            assert who is not None
            queries = rotate(self._heads(linear(inputs, layer.query)), *turn)
            hidden = self._finish(layer, residual, unrolled_attention(who, queries, keys[index][0], []))
            if not is_last:
                unit = inputs = self._unit(hidden)
        return hidden

    def _later_step(
        self,
        batch: TrainBatch,
        layers: list[_Layer],
        keys: list[list[Heads]],
        plan: AttentionPlan,
        hidden: Tensor,
        step: int,
    ) -> Tensor:
        """Steps 1 and on: the head's own output in the place of the feature, at the query indexes alone."""
        turn = self._turn(batch.positions_R[batch.query_rows_Q] + step)
        unit = self._unit(hidden)
        inputs = torch.cat((F.embedding(batch.read_tokens_NQ[step], self._embedding_VD), unit), dim=-1)
        for index, layer in enumerate(layers):
            num_queries, num_both = layer.query.shape[0], layer.key_value.shape[0]
            both = linear(inputs, layer.all)
            query, key_value = torch.split(both, [num_queries, num_both], dim=-1)
            keys[index].append(self._keys(key_value, turn))
            queries = rotate(self._heads(query), *turn)
            attended = unrolled_attention(plan, queries, keys[index][0], keys[index][1:])
            hidden = self._finish(layer, self._residual(layer, hidden, unit), attended)
            unit = inputs = self._unit(hidden)
        return hidden

    def _fuse(self, taps_RD: Tensor) -> Tensor:
        head, weight = self.head, self.head.fc.weight
        if head.input_norm is not None:
            taps_RD, weight = self._unit(taps_RD), weight * head.input_norm.weight
        if head.fc_norm is not None:
            pieces = taps_RD.chunk(self._config.num_taps, dim=-1)
            taps_RD = torch.cat([self._unit(piece) for piece in pieces], dim=-1)
            weight = weight * torch.cat([norm.weight for norm in head.fc_norm])  # type: ignore[misc]
        bias = None if head.fc.bias is None else head.fc.bias.to(self.dtype)
        fused_RD = linear(taps_RD, weight.to(self.dtype))
        return fused_RD if bias is None else fused_RD + bias

    def _residual(self, layer: _Layer, hidden: Tensor, unit: Tensor) -> Tensor:
        return hidden if layer.residual_norm is None else unit * layer.residual_norm

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self._config.head_width)

    def _keys(self, key_value: Tensor, turn: Heads) -> Heads:
        key, value = key_value.chunk(2, dim=-1)
        shape = (key.shape[0], -1, self._config.head_width)
        return rotate(key.reshape(shape), *turn), value.reshape(shape)

    def _finish(self, layer: _Layer, residual: Tensor, attended_QHC: Tensor) -> Tensor:
        x = residual + linear(attended_QHC.flatten(1), layer.out)
        normed = unit_norm(x, self._config.norm_eps, layer.norm)
        return x + linear(gated(linear(normed, layer.gate_up)), layer.down)
