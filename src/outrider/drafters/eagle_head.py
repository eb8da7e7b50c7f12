"""The EAGLE-3 head (arXiv 2503.01840): the module that is trained, and the definition of what is served.

The head reads *taps*, hidden states of chosen target layers. Its input at index i, an *entry*, is the feature of position
i (the taps that the target computed while it read token i, fused) beside the embedding of token i + 1, and it predicts
token i + 2: the target itself predicted token i + 1 from that state, and chose it. With tokens t[0] .. t[4] committed, of
which the target has read t[0] .. t[3] (the last committed token is read by the next pass)::

    entry (and rotary position)    0      1      2      3   |    4          5
    feature                      f[0]   f[1]   f[2]   f[3]  |  out[3]     out[4]
    token embedded               t[1]   t[2]   t[3]   t[4]  |  d[5]       d[6]
    predicts                     t[2]   t[3]   t[4]   d[5]  |  d[6]       d[7]
    made of                      target taps                |  the head's own output

Entry 3 yields the first draft token d[5]. Entries right of the bar have no taps yet, so the output of the entry before
stands in for the feature. Once the target has read the draft tokens, those entries are made anew from its taps.

Training unrolls the same thing at every index at once (*training-time test*): unroll step 0 reads features, step s the
outputs of step s - 1 *at the same index* beside the embedding of token i + 1 + s, at rotary position i + s::

    query of index i, step s   sees   step-0 keys of indexes <= i, and the keys of steps 1 .. s of index i itself

:class:`UnrolledAttention` is that rule; :mod:`outrider.drafters.eagle_pass` is the form that drafting runs.

Names of the state dict are those of the authors' checkpoints (``midlayer.*``, ``fc``, ``norm``, ``lm_head``, ``d2t``,
``t2d``; further layers ``layers.1.*`` and so on), so that exchanging heads copies tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.eagle_config import EagleConfig
from outrider.models.layers import inverse_frequencies, rms_norm

__all__ = ["Attend", "EagleHead", "RMSNorm", "UnrolledAttention"]

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: layer index, queries ``[.., H, C]``, keys and values ``[.., G, C]``, both rotated already.

Returns ``[.., H, C]``. Whoever calls the head decides what is remembered and who sees what.
"""

_NO_TOKEN = -(2**40)
"""Offsets of a head whose draft vocabulary was never set: no id of any vocabulary."""


class EagleHead(nn.Module):
    """One or more Llama layers, the first of which reads features and embeddings side by side, with an LM head of its own.

    All weights are NaN until they are loaded or :meth:`initialise` is called. The embedding table is the target's: frozen,
    handed in by :meth:`attach_embedding`, and no part of the state dict.

    Buffers:
        d2t: int64 ``[U]``, offsets: draft id d is target id ``d + d2t[d]``. Draft ids ascend with target ids.
        t2d: bool ``[V]``, which target ids are in the draft vocabulary.
    """

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        fused = config.num_taps * config.target_hidden_size
        self.input_norm = RMSNorm(fused, config.norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, config.norm_eps) for _ in config.tap_layers)
            if config.fc_norm
            else None
        )
        self.fc = _matrix(config.hidden_size, fused, bias=config.fc_bias)
        self.midlayer = EagleLayer(config, is_first=True)
        self.layers = nn.ModuleDict(
            {str(index): EagleLayer(config, is_first=False) for index in range(1, config.num_layers)}
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = _matrix(config.draft_vocab_size, config.hidden_size)
        self.register_buffer("d2t", torch.full((config.draft_vocab_size,), _NO_TOKEN, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.target_vocab_size, dtype=torch.bool))
        self.register_buffer("embedding", None, persistent=False)
        self._frequencies_C: Tensor | None = None

    def initialise(self, draft_ids: Sequence[int], *, seed: int) -> None:
        """Random matrices with variance 1 / inputs, norms of 1, and this draft vocabulary."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    noise = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
                    parameter.copy_(noise)
                else:
                    parameter.fill_(1.0)
            if self.fc.bias is not None:
                self.fc.bias.fill_(0.0)
        self.set_vocabulary(draft_ids)

    def set_vocabulary(self, draft_ids: Sequence[int]) -> None:
        """Make the draft vocabulary these target ids, each once; order does not matter."""
        ids_U = torch.tensor(sorted(set(draft_ids)), dtype=torch.int64, device=self.d2t.device)
        assert len(ids_U) == self.config.draft_vocab_size == len(draft_ids), (len(ids_U), len(draft_ids))
        assert int(ids_U[0]) >= 0 and int(ids_U[-1]) < self.config.target_vocab_size
        self.d2t.copy_(ids_U - torch.arange(len(ids_U), device=self.d2t.device))
        self.t2d.zero_()
        self.t2d[ids_U] = True

    def attach_embedding(self, table_VD: Tensor) -> None:
        """Use this frozen table, in its own dtype, on the device of the head's weights."""
        expected = (self.config.target_vocab_size, self.config.hidden_size)
        assert table_VD.shape == expected, (table_VD.shape, expected)
        self.embedding = table_VD.detach().to(device=self.fc.weight.device)

    def target_ids(self) -> Tensor:
        """Target id of every draft id, int64 ``[U]``, ascending."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, taps: Tensor) -> Tensor:
        """Features ``[.., D]`` from taps ``[.., A * D]``, concatenated in the order of ``config.tap_layers``."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            pieces = taps.chunk(self.config.num_taps, dim=-1)
            taps = torch.cat([norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)], dim=-1)
        fused: Tensor = self.fc(taps)
        return fused

    def forward(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layers.

        Args:
            hidden: features, or what :meth:`feedback` made of earlier outputs, ``[.., D]``.
            tokens: target ids of the tokens that stand one behind them, ``[..]``.
            positions: rotary position of each entry, ``[..]``.
            attend: attention, called once a layer.

        Returns:
            Output of the last layer before the final norm, ``[.., D]``.
        """
        assert self.embedding is not None, "attach_embedding comes first"
        cos, sin = self.rotation(positions, hidden.dtype)
        embedded = F.embedding(tokens, self.embedding).to(hidden.dtype)
        x: Tensor = self.midlayer(hidden, embedded, 0, attend, cos, sin)
        for index, layer in self.layers.items():
            x = layer(x, None, int(index), attend, cos, sin)
        return x

    def feedback(self, output: Tensor) -> Tensor:
        """What stands in for the feature in the next draft step."""
        normed: Tensor = self.norm(output) if self.config.norm_output else output
        return normed

    def logits(self, output: Tensor) -> Tensor:
        """Logits over the draft vocabulary, ``[.., U]``, of outputs of :meth:`forward`."""
        scores: Tensor = self.lm_head(self.norm(output))
        return scores

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[.., 1, C]`` at these positions; angles are float32."""
        if self._frequencies_C is None or self._frequencies_C.device != positions.device:
            half = inverse_frequencies(self.config.rope, self.config.head_width)
            self._frequencies_C = torch.cat((half, half)).to(positions.device)
        angles = positions.to(torch.float32).unsqueeze(-1) * self._frequencies_C
        return angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2)


class EagleLayer(nn.Module):
    """A Llama layer. The first one attends from features and embeddings side by side, both normed, embedding first."""

    def __init__(self, config: EagleConfig, *, is_first: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(width, eps) if is_first else None
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.self_attn = _Attention(config, 2 * width if is_first else width)
        self.mlp = _FeedForward(config)

    def forward(
        self, hidden: Tensor, embedded: Tensor | None, index: int, attend: Attend, cos: Tensor, sin: Tensor
    ) -> Tensor:
        if self.hidden_norm is None:
            residual, inputs = hidden, self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        x = residual + self.self_attn(inputs, index, attend, cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, in_width: int) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.q_proj = _matrix(config.num_heads * config.head_width, in_width)
        self.k_proj = _matrix(config.num_kv_heads * config.head_width, in_width)
        self.v_proj = _matrix(config.num_kv_heads * config.head_width, in_width)
        self.o_proj = _matrix(config.hidden_size, config.num_heads * config.head_width)

    def forward(self, inputs: Tensor, index: int, attend: Attend, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*inputs.shape[:-1], -1, self.head_width)
        queries, keys, values = (proj(inputs).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        attended = attend(index, _rotated(queries, cos, sin), _rotated(keys, cos, sin), values)
        product: Tensor = self.o_proj(attended.flatten(-2))
        return product


class _FeedForward(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = _matrix(config.intermediate_size, config.hidden_size)
        self.up_proj = _matrix(config.intermediate_size, config.hidden_size)
        self.down_proj = _matrix(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return product


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in the dtype of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((width,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class UnrolledAttention:
    """Attention of training-time test: make one for a batch, call the head once an unroll step. The eager reference.

    Args:
        visible_BSS: which step-0 key (last dimension) each index may see; true on the diagonal. Causal, and cut at
            borders between packed texts: both are the caller's to say.

    It serves queries ``[B, S, H, C]``; what step s adds is seen by later steps of the same index alone. With a single step
    it is plain causal attention.
    """

    def __init__(self, visible_BSS: Tensor) -> None:
        self._visible = visible_BSS[:, None, None]
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from the next unroll step of ``layer``; shapes as in :data:`Attend`."""
        past_keys = self._keys.setdefault(layer, [])
        past_values = self._values.setdefault(layer, [])
        past_keys.append(keys)
        past_values.append(values)
        batch, size, num_heads, width = queries.shape
        groups = keys.shape[2]
        q = queries.view(batch, size, groups, num_heads // groups, width)
        scores = torch.einsum("bsgmc,btgc->bgmst", q, past_keys[0]).masked_fill(~self._visible, -torch.inf)
        own = [torch.einsum("bsgmc,bsgc->bgms", q, k).unsqueeze(-1) for k in past_keys[1:]]
        shares = (torch.cat((scores, *own), dim=-1) * width**-0.5).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.einsum("bgmst,btgc->bsgmc", shares[..., :size], past_values[0])
        for step, value in enumerate(past_values[1:]):
            mixed = mixed + torch.einsum("bgms,bsgc->bsgmc", shares[..., size + step], value)
        return mixed.reshape(batch, size, num_heads, width)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half form."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _matrix(num_out: int, num_in: int, *, bias: bool = False) -> nn.Linear:
    """A linear layer of NaN; torch's own start values would use up global noise and hide a tensor that was never loaded."""
    layer = nn.Linear(num_in, num_out, bias=bias, device="meta").to_empty(device=torch.get_default_device())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    return layer
