"""The Llama runtime: a target in pure PyTorch, written for few rows a pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider.cache.base import Cache
from outrider.cache.dense import DenseCache
from outrider.device import Placement, Precision
from outrider.models.base import ForwardResult, GreedyResult, PackedRows
from outrider.models.config import LlamaConfig
from outrider.models.decoder import check_slice, check_window, describe
from outrider.models.grid import note_of
from outrider.models.layers import Rotary, Rotation
from outrider.models.llama_weights import LayerWeights, LlamaWeights, RandomWeights, WeightSource, read_weights

if TYPE_CHECKING:
    from outrider.models.tokenizer import Tokenizer

__all__ = ["Attends", "LlamaBody", "LlamaTarget"]


class Attends(Protocol):
    """Attention of one pass over some cache."""

    def attend(self, layer: int, qkv_RNGC: Tensor) -> Tensor:
        """Cache this layer's keys and values and attend to everything each row may see; ``[R, N * G * C]``."""
        ...


class LlamaBody:
    """The layers of a Llama decoder, whatever cache lies behind its attention.

    Args:
        weights: of all layers, embedding and LM head.
        config: the model's shape.
        placement: device and precision.
    """

    def __init__(self, weights: LlamaWeights, config: LlamaConfig, placement: Placement) -> None:
        self.weights = weights
        self._config = config
        self._rotary = Rotary(config, dtype=placement.activation_dtype, device=placement.device)

    def run(
        self, tokens_R: Tensor, positions_R: Tensor, *, attention: Attends, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The residual stream behind the last layer, and before each tapped one; rows are padded already."""
        weights = self.weights
        x_RD = weights.stream.embed(tokens_R)
        rotation = self._rotary.at(positions_R)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(weights.layers):
            if index in taps:
                tapped[index] = weights.stream.tap(x_RD)
            x_RD = self._run_layer(layer, x_RD, rotation=rotation, attention=attention, index=index)
        if len(weights.layers) in taps:
            tapped[len(weights.layers)] = weights.stream.tap(x_RD)
        return x_RD, tapped

    def _run_layer(
        self, layer: LayerWeights, x_RD: Tensor, *, rotation: Rotation, attention: Attends, index: int
    ) -> Tensor:
        num_rows, groups, width = x_RD.shape[0], self._config.num_kv_heads, self._config.head_width
        qkv_RNC = layer.qkv(x_RD).view(num_rows, -1, width)
        attended = attention.attend(index, rotation.apply(qkv_RNC).view(num_rows, -1, groups, width))
        return layer.feed_forward(layer.out(x_RD, self.padded(attended)))

    def padded(self, x: Tensor) -> Tensor:
        """Rows of zeros behind, up to the row multiple."""
        missing = -x.shape[0] % self.weights.row_multiple
        return torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing else x


class LlamaTarget:
    """A Llama decoder as a :class:`outrider.models.base.Target`.

    Args:
        checkpoint: where weights, config and tokenizer come from. Kept, and read again by :meth:`requantized`.
        placement: device and precision.
        weights: weights already in memory, shared with another target; read from the checkpoint when ``None``.
    """

    def __init__(self, checkpoint: WeightSource, placement: Placement, *, weights: LlamaWeights | None = None) -> None:
        self.checkpoint = checkpoint
        self.placement = placement
        with torch.inference_mode():
            self._weights = weights or read_weights(checkpoint, placement)
        self.config: LlamaConfig = replace(checkpoint.config, num_layers=len(self._weights.layers))
        self.tokenizer: Tokenizer | None = getattr(checkpoint, "tokenizer", None)
        self.checkpoint_note: str = note_of(getattr(checkpoint, "note", ""), placement.precision)
        self.spec = describe(checkpoint, self.config, placement, path="pytorch")
        self.body = LlamaBody(self._weights, self.config, placement)

    @staticmethod
    def random(config: LlamaConfig, placement: Placement, seed: int) -> LlamaTarget:
        """A target with random weights: for tests, and as a drafter that knows nothing."""
        return LlamaTarget(RandomWeights(config=config, seed=seed), placement)

    def slice_layers(self, num_layers: int) -> LlamaTarget:
        """The first ``num_layers`` layers with the final norm and LM head, sharing this target's weights.

        Raises:
            ConfigError: not between 1 and this target's number of layers.
        """
        check_slice(num_layers, self.config)
        return LlamaTarget(self.checkpoint, self.placement, weights=self._weights.first_layers(num_layers))

    def requantized(self, precision: Precision) -> LlamaTarget:
        """The same checkpoint on the same device in another precision."""
        return LlamaTarget(self.checkpoint, Placement(device=self.placement.device, precision=precision))

    def new_cache(self) -> DenseCache:
        """An empty cache of this target's layout."""
        return DenseCache(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_width=self.config.head_width,
            dtype=self.placement.activation_dtype,
            device=self.placement.device,
        )

    def num_weight_bytes(self) -> int:
        """Bytes that one pass streams: all matrices and the LM head once."""
        return self._weights.num_bytes()

    @torch.inference_mode()
    def forward(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> ForwardResult:
        """Run one pass; write the rows' keys and values behind each slot's cached tokens.

        Raises:
            PromptError: a row's position lies past the window.
        """
        x_RD, tapped = self._run(rows, cache, frozenset(taps))
        num_rows = rows.num_logit_rows
        if num_rows == 0:  # a prefill chunk in the middle of a prompt: no law is wanted
            logits_RV = x_RD.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        else:
            logits_RV = self._weights.head(x_RD)[:num_rows]
        return ForwardResult(logits_RV=logits_RV, taps=tapped)

    @torch.inference_mode()
    def forward_greedy(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> GreedyResult:
        """As :meth:`forward`, but only each row's most probable token."""
        x_RD, tapped = self._run(rows, cache, frozenset(taps))
        num_rows = rows.num_logit_rows
        tokens_R = self._weights.head.argmax(x_RD)[:num_rows] if num_rows else rows.tokens_R[:0]
        return GreedyResult(tokens_R=tokens_R, taps=tapped)

    def _run(self, rows: PackedRows, cache: Cache, taps: frozenset[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """The residual stream behind the last layer of the rows that are asked for, padded, and all rows' taps."""
        assert isinstance(cache, DenseCache), type(cache)
        for segment in rows.segments:
            check_window(cache.length(segment.slot) + segment.depth, self.config)
        attention = cache.begin(rows.segments, num_groups=self.config.num_heads // self.config.num_kv_heads)
        tokens_R, positions_R = self._padded(rows.tokens_R), self._padded(rows.positions_R)
        x_RD, tapped = self.body.run(tokens_R, positions_R, attention=attention, taps=taps)
        cache.advance(rows.segments)
        wanted, num_rows = rows.logit_rows, rows.tokens_R.shape[0]
        tapped = {layer: tap_RD[:num_rows] for layer, tap_RD in tapped.items()}
        return x_RD if wanted is None else self._padded(x_RD[list(wanted)]), tapped

    def _padded(self, x: Tensor) -> Tensor:
        return self.body.padded(x)
