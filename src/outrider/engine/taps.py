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
    """Give the drafter the taps of each sequence's kept rows. Every step does so: the rows are taken out all at once.

    Args:
        drafter: does nothing unless it is a :class:`TapDrafter`.
        keys: one a sequence; what the drafter knows it by, ``None`` where its hidden states are not kept now.
        rows: of the pass; the first of each segment is the root, and what lies behind these sequences' is not looked at.
        verdicts: one a sequence.
        taps: of the pass, all rows.
    """
    reader = tap_reader(drafter)
    heard = [index for index, key in enumerate(keys) if key is not None]
    if reader is None or not heard:
        return
    segments = rows.segments
    paths = [(0, *(node + 1 for node in verdicts[index].path)) for index in heard]
    kept = [segments[index].start + row for index, path in zip(heard, paths, strict=True) for row in path]
    taken_RD = _rows_of(taps, reader.taps, kept)
    positions = rows.positions_R[: segments[heard[-1]].start + 1].tolist()
    for index, taps_RD in zip(heard, torch.split(taken_RD, [len(path) for path in paths]), strict=True):
        reader.absorb(cast(int, keys[index]), positions[segments[index].start], taps_RD)


def _rows_of(taps: Mapping[int, Tensor], layers: Sequence[int], kept: Sequence[int]) -> Tensor:
    """Some rows of all taps in memory of their own, so that those of nobody are not held for a neighbour's sake."""
    if list(kept) == list(range(len(kept))):
        return torch.cat([taps[layer][: len(kept)] for layer in layers], dim=-1)
    place_R = torch.tensor(kept, device=taps[layers[0]].device)
    return torch.cat([taps[layer][place_R] for layer in layers], dim=-1)
