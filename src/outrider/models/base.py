"""The target protocol: packed rows in, logits (and taps) out.

A target knows nothing of requests, drafters or verdicts. It is handed the packed rows of one pass and a cache whose
sequences have *slots*; it writes the rows' keys and values behind each slot's cached tokens and returns what it computed.
Forgetting refused rows is the cache's business (:mod:`outrider.cache.base`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider.cache.base import Cache
from outrider.device import Placement, Precision

if TYPE_CHECKING:
    from outrider.models.llama_weights import WeightSource
    from outrider.models.tokenizer import Tokenizer

__all__ = ["ForwardResult", "GreedyResult", "LoadedTarget", "PackedRows", "Segment", "Target", "TargetSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What the rest of the system may know of a target.

    ``precision`` is a name of :data:`outrider.device.PRECISIONS`; ``fingerprint`` identifies the weights before any precision
    conversion; ``path`` says which implementation runs (``pytorch``, later ``native``).
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    precision: str
    device: torch.device
    fingerprint: str
    path: str = "pytorch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The consecutive packed rows that one sequence brings to a pass.

    Attributes:
        slot: the sequence's slot in the cache.
        start: first packed row.
        num_rows: rows of this sequence, at least 1.
        parents: ``None`` for a chain (row i sees rows 0..i). For a tree, the parent *row inside the segment* of each row
            (-1 for row 0): row i sees itself and its ancestors. All rows see every token cached before the pass.
    """

    slot: int
    start: int
    num_rows: int
    parents: tuple[int, ...] | None = None

    @property
    def depth(self) -> int:
        """Positions that the rows cover: siblings share one."""
        return self.num_rows if self.parents is None else max(_positions(0, self.num_rows, self.parents)) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The input of one pass: all sequences' rows behind one another, ragged.

    Attributes:
        tokens_R: int64 token ids.
        positions_R: int64 absolute positions (siblings share one).
        segments: one per sequence, in row order, covering all R rows.
        logit_rows: which packed rows need logits (all of them: ``None``). Prefill asks for the last row only.
    """

    tokens_R: Tensor
    positions_R: Tensor
    segments: tuple[Segment, ...]
    logit_rows: tuple[int, ...] | None = None

    @property
    def num_logit_rows(self) -> int:
        """How many rows need logits."""
        return int(self.tokens_R.shape[0]) if self.logit_rows is None else len(self.logit_rows)

    @staticmethod
    def pack(
        tokens: Sequence[Sequence[int]],
        *,
        slots: Sequence[int],
        starts: Sequence[int],
        parents: Sequence[tuple[int, ...] | None] | None = None,
        device: torch.device,
        logit_rows: tuple[int, ...] | None = None,
    ) -> PackedRows:
        """Pack ``tokens[i]``, the rows of the sequence in ``slots[i]`` whose cache holds ``starts[i]`` tokens."""
        flat: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for index, rows in enumerate(tokens):
            tree = None if parents is None else parents[index]
            segments.append(Segment(slot=slots[index], start=len(flat), num_rows=len(rows), parents=tree))
            flat.extend(rows)
            positions.extend(_positions(starts[index], len(rows), tree))
        return PackedRows(
            tokens_R=torch.tensor(flat, dtype=torch.int64, device=device),
            positions_R=torch.tensor(positions, dtype=torch.int64, device=device),
            segments=tuple(segments),
            logit_rows=logit_rows,
        )


def _positions(start: int, num_rows: int, parents: tuple[int, ...] | None) -> Sequence[int]:
    if parents is None:
        return range(start, start + num_rows)
    depths = [0] * num_rows
    for row, parent in enumerate(parents):
        depths[row] = 0 if parent < 0 else depths[parent] + 1
    return [start + depth for depth in depths]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """What a pass computed.

    Attributes:
        logits_RV: float32 logits of the rows asked for.
        taps: hidden state behind each layer asked for, ``{layer: [R, D]}``, before the final norm. Index i is the
            residual stream *before* layer i (0 = embeddings, ``num_layers`` = output of the last layer).
        tokens_R: as in :class:`GreedyResult`, where the pass found them on the way; ``None`` where it did not.
    """

    logits_RV: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    tokens_R: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyResult:
    """What a pass computed when nobody reads its logits.

    Attributes:
        tokens_R: int64, the most probable token of each row asked for; of equal logits the lowest id.
        taps: as in :class:`ForwardResult`.
    """

    tokens_R: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)


class Target(Protocol):
    """A model that can be decoded with. Four methods and a spec."""

    @property
    def spec(self) -> TargetSpec: ...

    def new_cache(self) -> Cache:
        """An empty cache of this target's layout."""
        ...

    def forward(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> ForwardResult:
        """Run one pass; write the rows' keys and values behind each slot's cached tokens (lengths grow by num_rows)."""
        ...

    def forward_greedy(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> GreedyResult:
        """As :meth:`forward`, but only the argmax of each row's logits, which need not be written anywhere."""
        ...

    def num_weight_bytes(self) -> int:
        """Bytes that one pass streams: all matrices and the LM head once."""
        ...


class LoadedTarget(Target, Protocol):
    """A target that was read from a checkpoint: it has a tokenizer, and can be copied in part or in another precision."""

    checkpoint: WeightSource
    placement: Placement
    checkpoint_note: str
    tokenizer: Tokenizer | None

    def slice_layers(self, num_layers: int) -> LoadedTarget:
        """The first layers with the final norm and LM head, sharing this target's weights."""
        ...

    def requantized(self, precision: Precision) -> LoadedTarget:
        """The same checkpoint on the same device in another precision."""
        ...
