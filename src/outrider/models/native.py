"""The native target: a Llama decoder whose whole pass is one call into C++.

It has its own cache layout and its own weights, packed once. Every row's arithmetic runs in one order, whatever the number
of rows, the companions, the chunking of a prompt, or whether the row is in a chain or a tree: so speculative output equals
plain output bit for bit, in every precision.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.cache.base import Cache
from outrider.cache.native import NativeCache
from outrider.device import Placement, Precision
from outrider.errors import ConfigError, PromptError
from outrider.models.base import ForwardResult, GreedyResult, PackedRows, Segment
from outrider.models.config import LlamaConfig
from outrider.models.decoder import check_slice, check_window, describe
from outrider.models.grid import note_of
from outrider.models.llama_weights import RandomWeights, WeightSource
from outrider.models.native_weights import NativeWeights, RotaryTable, read_native_weights
from outrider.native.library import PHASES, Context, CPass, CSegment, open_context, requested_kernels

if TYPE_CHECKING:
    from outrider.models.tokenizer import Tokenizer

__all__ = ["NativeTarget"]


class NativeTarget:
    """A Llama decoder as a :class:`outrider.models.base.Target`, on the CPU, in bfloat16, int8 or 4 bits.

    Args:
        checkpoint: where weights, config and tokenizer come from. Kept, and read again by :meth:`requantized`.
        placement: ``cpu``, any precision but ``float32``.
        weights: weights already in memory, shared with another target; read from the checkpoint when ``None``.
        kernels: instruction set; ``None`` takes ``OUTRIDER_NATIVE`` or else the fastest that runs here.
        num_threads: size of the native thread pool; ``None`` takes torch's. Threads of torch spin for milliseconds after
            each parallel operation and would take the processors from this pool, so whoever decodes with this target
            should set torch to one thread after building it.

    Raises:
        outrider.native.library.Unavailable: the native path cannot run here.
        ConfigError: a placement that it does not serve.
    """

    def __init__(
        self,
        checkpoint: WeightSource,
        placement: Placement,
        *,
        weights: NativeWeights | None = None,
        kernels: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        if placement.device.type != "cpu" or placement.precision == "float32":
            raise ConfigError(
                f"the native path does not run {placement.precision} on {placement.device}; "
                "it runs bfloat16, int8, int4 and int4-g128 on cpu"
            )
        self.checkpoint = checkpoint
        self.placement = placement
        self._kernels = kernels or requested_kernels()
        self._num_threads = num_threads or torch.get_num_threads()
        self._context: Context = open_context(self._kernels, self._num_threads)
        with torch.inference_mode():
            self._weights = weights or read_native_weights(checkpoint, placement)
        self.config: LlamaConfig = replace(checkpoint.config, num_layers=self._weights.num_layers)
        self.tokenizer: Tokenizer | None = getattr(checkpoint, "tokenizer", None)
        self.checkpoint_note: str = note_of(getattr(checkpoint, "note", ""), placement.precision)
        self.spec = describe(checkpoint, self.config, placement, path=f"native-{self._context.kernels}")
        self._rotary = RotaryTable(self.config)

    @staticmethod
    def random(config: LlamaConfig, placement: Placement, seed: int) -> NativeTarget:
        """A target with random weights: for tests, and as a drafter that knows nothing."""
        return NativeTarget(RandomWeights(config=config, seed=seed), placement)

    def slice_layers(self, num_layers: int) -> NativeTarget:
        """The first ``num_layers`` layers with the final norm and LM head, sharing this target's weights.

        Raises:
            ConfigError: not between 1 and this target's number of layers.
        """
        check_slice(num_layers, self.config)
        shared = self._weights.first_layers(num_layers)
        return NativeTarget(
            self.checkpoint, self.placement, weights=shared, kernels=self._kernels, num_threads=self._num_threads
        )

    def requantized(self, precision: Precision) -> NativeTarget:
        """The same checkpoint in another precision."""
        placement = Placement(device=self.placement.device, precision=precision)
        return NativeTarget(self.checkpoint, placement, kernels=self._kernels, num_threads=self._num_threads)

    def new_cache(self) -> NativeCache:
        """An empty cache of this target's layout."""
        config = self.config
        return NativeCache(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_width=config.head_width)

    @property
    def context(self) -> Context:
        """Threads and scratch memory, for whatever else takes turns with this target."""
        return self._context

    def num_weight_bytes(self) -> int:
        """Bytes that one pass streams: all matrices and the LM head once."""
        return self._weights.num_bytes()

    @torch.inference_mode()
    def forward(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> ForwardResult:
        """Run one pass; write the rows' keys and values behind each slot's cached tokens.

        Raises:
            PromptError: a row's position lies past the window.
        """
        logits_RV = torch.empty(rows.num_logit_rows, self.config.vocab_size)
        tokens_R = torch.empty(rows.num_logit_rows, dtype=torch.int64)
        call = CPass(logits=logits_RV.data_ptr(), argmax=tokens_R.data_ptr())
        tapped = self._run_tapped(call, rows, cache, taps)
        return ForwardResult(logits_RV=logits_RV, taps=tapped, tokens_R=tokens_R)

    @torch.inference_mode()
    def forward_greedy(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> GreedyResult:
        """As :meth:`forward`, but only each row's most probable token.

        The LM head compares as it goes, and no logits are written.
        """
        tokens_R = torch.empty(rows.num_logit_rows, dtype=torch.int64)
        tapped = self._run_tapped(CPass(argmax=tokens_R.data_ptr()), rows, cache, taps)
        return GreedyResult(tokens_R=tokens_R, taps=tapped)

    @torch.inference_mode()
    def profile(self, rows: PackedRows, cache: Cache) -> dict[str, float]:
        """As :meth:`forward_greedy`, but returns the milliseconds of each part, waits for slower threads included."""
        tokens_R = torch.empty(rows.num_logit_rows, dtype=torch.int64)
        phases = torch.zeros(len(PHASES), dtype=torch.int64)
        self._run(CPass(argmax=tokens_R.data_ptr(), phase_ns=phases.data_ptr()), rows, cache)
        return dict(zip(PHASES, (phases / 1e6).tolist(), strict=True))

    def stream_weights(self) -> int:
        """Read all matrices once with the pass's own threads, and return their sum: what no pass can be faster than."""
        return self._context.stream(self._weights.address(), self.num_weight_bytes())

    def part_bytes(self) -> dict[str, int]:
        """Bytes of matrices that each part of :meth:`profile` streams."""
        return {**self._weights.part_bytes(), "attention": 0}

    def _run_tapped(self, call: CPass, rows: PackedRows, cache: Cache, taps: Sequence[int]) -> dict[int, Tensor]:
        """Run the call, and hand out the hidden states behind the layers asked for."""
        taps_ARD = torch.empty(len(taps), rows.tokens_R.shape[0], self.config.hidden_size)
        layers = torch.tensor(list(taps), dtype=torch.int32)
        call.num_taps, call.tap_layers, call.taps = len(taps), layers.data_ptr(), taps_ARD.data_ptr()
        self._run(call, rows, cache)
        hidden_ARD = taps_ARD.to(self.placement.activation_dtype)
        return dict(zip(taps, hidden_ARD, strict=True))

    def _run(self, call: CPass, rows: PackedRows, cache: Cache) -> None:
        """Fill in the rest of the call, run it, and count the rows as cached."""
        assert isinstance(cache, NativeCache), type(cache)
        num_rows = rows.tokens_R.shape[0]
        wanted = rows.logit_rows
        logit_rows = (
            torch.arange(num_rows, dtype=torch.int32) if wanted is None else torch.tensor(wanted, dtype=torch.int32)
        )
        tokens_R, positions_R = rows.tokens_R.contiguous(), rows.positions_R.contiguous()
        self._check_tokens(tokens_R)
        segments, parents = self._segments(rows.segments, cache)
        call.num_rows, call.num_segments = num_rows, len(rows.segments)
        call.tokens, call.positions = tokens_R.data_ptr(), positions_R.data_ptr()
        call.segments = ctypes.addressof(segments)
        call.num_logit_rows, call.logit_rows = logit_rows.shape[0], logit_rows.data_ptr()
        cosines, sines = self._rotary.upto(int(positions_R.max()) + 1)
        self._context.run(self._weights.describe(self.config, cosines, sines), call)
        del parents  # alive until here: the segments point into it
        for segment in rows.segments:
            cache.advance(segment.slot, segment.num_rows)

    def _segments(self, segments: Sequence[Segment], cache: NativeCache) -> tuple[ctypes.Array[CSegment], list[Tensor]]:
        described = (CSegment * len(segments))()
        alive: list[Tensor] = []
        for entry, segment in zip(described, segments, strict=True):
            base = cache.length(segment.slot)
            check_window(base + segment.depth, self.config)
            cache.reserve(segment.slot, base + segment.num_rows)
            entry.cache, entry.capacity = cache.address(segment.slot)
            entry.base, entry.start, entry.num_rows = base, segment.start, segment.num_rows
            if segment.parents is not None:
                alive.append(torch.tensor(segment.parents, dtype=torch.int32))
                entry.parents = alive[-1].data_ptr()
        return described, alive

    def _check_tokens(self, tokens_R: Tensor) -> None:
        low, high = int(tokens_R.min()), int(tokens_R.max())
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise PromptError(f"token id {bad} is not in the vocabulary; allowed: 0 to {self.config.vocab_size - 1}")
