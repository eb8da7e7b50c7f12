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
from outrider.models.base import PackedRows
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
    rows: PackedRows,
    verdicts: Sequence[Verdict],
    taps: Mapping[int, Tensor],
) -> None:
    """Give the drafter the taps of each sequence's kept rows.

    Args:
        drafter: does nothing unless it is a :class:`TapDrafter`.
        keys: one a sequence; what the drafter knows it by, ``None`` where its hidden states are not kept now.
        rows: of the pass; the first of each segment is the root.
        verdicts: one a sequence.
        taps: of the pass, all rows.
    """
    reader = tap_reader(drafter)
    if reader is None:
        return
    paths = [(0, *(node + 1 for node in verdict.path)) for verdict in verdicts]
    kept = [segment.start + row for segment, path in zip(rows.segments, paths, strict=True) for row in path]
    kept_RD = joined_taps(taps, reader.taps)[kept]
    starts = rows.positions_R[[segment.start for segment in rows.segments]].tolist()
    for key, start, taps_RD in zip(keys, starts, torch.split(kept_RD, [len(path) for path in paths]), strict=True):
        if key is not None:
            reader.absorb(key, start, taps_RD)
