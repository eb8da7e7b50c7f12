"""The Llama runtime for a GPU: pages, fused attention, and passes that are recorded once and replayed.

A pass is padded to one of a few shapes. For each shape there is one set of input tensors and one recording of the whole pass,
from embedding to LM head: the host fills the inputs and launches once, and waits for nothing before it reads the result. On a
CPU the same code runs unrecorded; that is how it is tested, not how to decode there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.cache.base import Cache
from outrider.cache.paged import PAGE, PagedCache
from outrider.cache.paged_attention import PagedAttention, PagedInputs, PagedPass, PassShape
from outrider.device import Placement, Precision, Recorded, to_device
from outrider.models.base import ForwardResult, GreedyResult, PackedRows, TargetSpec
from outrider.models.decoder import check_window
from outrider.models.llama import LlamaTarget
from outrider.models.llama_weights import WeightSource

__all__ = ["PagedTarget"]

_MOST_RECORDINGS = 32
"""Recordings kept; each holds memory for its intermediate results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Passes that one recording serves."""

    shape: PassShape
    num_wanted: int
    taps: tuple[int, ...]
    is_greedy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One recording and its inputs."""

    inputs: PagedInputs
    tokens_R: Tensor
    positions_R: Tensor
    wanted_R: Tensor
    run: Recorded[tuple[Tensor, dict[int, Tensor]]]


class PagedTarget:
    """A Llama decoder as a :class:`outrider.models.base.Target` over pages.

    Args:
        dense: the same model over slabs; its weights are shared.
    """

    def __init__(self, dense: LlamaTarget) -> None:
        self._dense = dense
        self.config = dense.config
        self.checkpoint: WeightSource = dense.checkpoint
        self.placement: Placement = dense.placement
        self.checkpoint_note = dense.checkpoint_note
        self.tokenizer = dense.tokenizer
        self.spec: TargetSpec = replace(dense.spec, path="pytorch-paged")
        self._passes: OrderedDict[_Kind, _Pass] = OrderedDict()
        self._pool: Tensor | None = None

    def slice_layers(self, num_layers: int) -> PagedTarget:
        """The first ``num_layers`` layers with the final norm and LM head, sharing this target's weights."""
        return PagedTarget(self._dense.slice_layers(num_layers))

    def requantized(self, precision: Precision) -> PagedTarget:
        """The same checkpoint on the same device in another precision."""
        return PagedTarget(self._dense.requantized(precision))

    def new_cache(self) -> PagedCache:
        """An empty cache of this target's layout."""
        return PagedCache(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_width=self.config.head_width,
            dtype=self.placement.activation_dtype,
            device=self.placement.device,
        )

    def num_weight_bytes(self) -> int:
        """Bytes that one pass streams: all matrices and the LM head once."""
        return self._dense.num_weight_bytes()

    @torch.inference_mode()
    def forward(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> ForwardResult:
        """Run one pass; write the rows' keys and values behind each slot's cached tokens.

        Raises:
            PromptError: a row's position lies past the window.
        """
        result, tapped = self._run(rows, cache, taps=tuple(sorted(taps)), is_greedy=False)
        return ForwardResult(logits_RV=result, taps=tapped)

    @torch.inference_mode()
    def forward_greedy(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> GreedyResult:
        """As :meth:`forward`, but only each row's most probable token."""
        result, tapped = self._run(rows, cache, taps=tuple(sorted(taps)), is_greedy=True)
        return GreedyResult(tokens_R=result, taps=tapped)

    def _run(
        self, rows: PackedRows, cache: Cache, *, taps: tuple[int, ...], is_greedy: bool
    ) -> tuple[Tensor, dict[int, Tensor]]:
        assert isinstance(cache, PagedCache), type(cache)
        for segment in rows.segments:
            check_window(cache.length(segment.slot) + segment.depth, self.config)
        places = cache.begin(rows.segments)
        num_rows, num_wanted = places.num_rows, rows.num_logit_rows
        padded = self._num_padded(num_wanted)
        kind = _Kind(shape=self._shape(places), num_wanted=padded, taps=taps, is_greedy=is_greedy)
        recorded = self._pass_of(kind, cache.pool)
        wanted = range(num_rows) if rows.logit_rows is None else rows.logit_rows
        recorded.inputs.load(places)
        for buffer, values in ((recorded.tokens_R, rows.tokens_R), (recorded.positions_R, rows.positions_R)):
            buffer.zero_()
            buffer[:num_rows].copy_(values)
        device = recorded.wanted_R.device
        recorded.wanted_R[:num_wanted].copy_(to_device(list(wanted), torch.int64, device), non_blocking=True)
        result, tapped = recorded.run()
        cache.advance(rows.segments)
        # The next pass overwrites what this one returned.
        return result[:num_wanted].clone(), {layer: tap_RD[:num_rows].clone() for layer, tap_RD in tapped.items()}

    def _shape(self, places: PagedPass) -> PassShape:
        shape = places.shape
        return replace(shape, rows=max(shape.rows, self._dense.body.weights.row_multiple))

    def _num_padded(self, num_wanted: int) -> int:
        """Rows that logits are computed of: a power of two, or none."""
        size = self._dense.body.weights.row_multiple if num_wanted else 0
        while size < num_wanted:
            size *= 2
        return size

    def _pass_of(self, kind: _Kind, pool: Tensor) -> _Pass:
        """The recording for this kind, made if need be; none outlives the pool that it writes to."""
        if pool is not self._pool:
            self._passes.clear()
            self._pool = pool
        found = self._passes.pop(kind, None) or self._new_pass(kind, pool)
        self._passes[kind] = found
        if len(self._passes) > _MOST_RECORDINGS:
            self._passes.popitem(last=False)
        return found

    def _new_pass(self, kind: _Kind, pool: Tensor) -> _Pass:
        device, body = self.placement.device, self._dense.body
        inputs = PagedInputs(kind.shape, page_size=PAGE, device=device)
        tokens_R, positions_R = (torch.zeros(kind.shape.rows, dtype=torch.int64, device=device) for _ in range(2))
        wanted_R = torch.zeros(kind.num_wanted, dtype=torch.int64, device=device)
        attention = PagedAttention(pool, inputs, num_groups=self.config.num_heads // self.config.num_kv_heads)

        def run() -> tuple[Tensor, dict[int, Tensor]]:
            x_RD, tapped = body.run(tokens_R, positions_R, attention=attention, taps=kind.taps)
            head, chosen_RD = body.weights.head, x_RD.index_select(0, wanted_R)
            if kind.num_wanted == 0:
                empty = x_RD.new_empty((0, self.config.vocab_size), dtype=torch.float32)
                return (tokens_R[:0] if kind.is_greedy else empty), tapped
            return (head.argmax(chosen_RD) if kind.is_greedy else head(chosen_RD)), tapped

        recorded = Recorded(run, device)
        return _Pass(inputs=inputs, tokens_R=tokens_R, positions_R=positions_R, wanted_R=wanted_R, run=recorded)
