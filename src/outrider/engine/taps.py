"""Hidden states on their way from the target to a drafter that reads them. Everyone else pays nothing for this.

A pass computes taps for all of its rows, drafts that are refused included; only rows that stay in the cache are handed
over. With 7 tokens committed and the chain a-b-c proposed, a kept and b refused, they are the rows of token 6 (the root)
and of a, at positions 6 and 7; the correction token has no row yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, TapDrafter
from outrider.models.base import Segment
from outrider.types import Verdict

__all__ = ["hand_over", "joined_taps", "tap_reader", "wanted_taps"]


def tap_reader(drafter: object) -> TapDrafter | None:
    """The drafter if it reads taps."""
    # Every step asks, and asking the protocol itself takes as long as a small operation of the model.
    return cast(TapDrafter, drafter) if hasattr(drafter, "absorb") and hasattr(drafter, "taps") else None


def wanted_taps(drafter: Drafter | None) -> tuple[int, ...]:
    """Taps to ask the target for; none without a drafter that reads them."""
    reader = tap_reader(drafter)
    return () if reader is None else reader.taps


def joined_taps(taps: Mapping[int, Tensor], layers: Sequence[int]) -> Tensor:
    """Rows of all taps behind one another, ``[R, A * D]``."""
    return torch.cat([taps[layer] for layer in layers], dim=-1)


def hand_over(
    drafter: Drafter | None,
    keys: Sequence[int | None],
    segments: Sequence[Segment],
    starts: Sequence[int],
    verdicts: Sequence[Verdict],
    taps: Mapping[int, Tensor],
) -> None:
    """Give the drafter the taps of each sequence's kept rows.

    Every step of a drafter that is hardly ever asked comes by here, behind a pass that left nothing in the processor's
    caches: what counts is how few kinds of operations run.

    Args:
        drafter: does nothing unless it is a :class:`TapDrafter`.
        keys: one a sequence; what the drafter knows it by, ``None`` where its hidden states are not kept now.
        segments: rows of the pass, those of these sequences first; the first row of each is the root.
        starts: position of each sequence's root.
        verdicts: one a sequence.
        taps: of the pass, all rows.
    """
    reader = tap_reader(drafter)
    if reader is None:
        return
    layers = [taps[layer] for layer in reader.taps]
    for key, segment, start, verdict in zip(keys, segments, starts, verdicts, strict=False):
        if key is not None:
            path = (0, *(node + 1 for node in verdict.path))
            reader.absorb(key, start, _rows_of(layers, [segment.start + row for row in path]))


def _rows_of(layers: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Some rows of all taps, copied: a view would keep those of the whole pass in memory."""
    first, end = rows[0], rows[-1] + 1
    if end - first == len(rows):
        return torch.cat([taps_RD[first:end] for taps_RD in layers], dim=-1)
    return torch.cat([taps_RD[first:end] for taps_RD in layers], dim=-1)[[row - first for row in rows]]
