"""4-bit weights: sixteen levels for each group of inputs.

``int4`` holds a weight as ``scale * level + minimum`` in groups of 32 inputs, which is the grid of GGUF's Q4_1 (and
contains that of Q4_0): a file in those types is taken as it is, nothing is rounded a second time. ``int4-g128`` holds it
as ``scale * (level - 8)`` in groups of 128: a fifth fewer bytes, and a coarser grid. Scales and minimums are float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["GROUP_WIDTHS", "Grid", "GridSource", "combine", "note_of", "quantise_to_grid", "read_grid"]

GROUP_WIDTHS: Mapping[str, int] = MappingProxyType({"int4": 32, "int4-g128": 128})
"""Inputs of a group by precision."""

_MIDDLE = 8
_MOST_HALF = 65504.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A matrix on its grid.

    Attributes:
        levels: uint8 0..15, ``[out, in]``.
        scales: float16 ``[out, groups]``; the last group may be short.
        minimums: float16 ``[out, groups]``; ``None`` stands for -8 scales.
        group: inputs of a group.
    """

    levels: Tensor
    scales: Tensor
    minimums: Tensor | None
    group: int

    def dequantised(self) -> Tensor:
        """The weights, float32 ``[out, in]``."""
        num_in = self.levels.shape[1]

        def spread(values: Tensor) -> Tensor:
            return values.float().repeat_interleave(self.group, dim=1)[:, :num_in]

        if self.minimums is None:
            return (self.levels.float() - _MIDDLE) * spread(self.scales)
        return self.levels.float() * spread(self.scales) + spread(self.minimums)


@runtime_checkable
class GridSource(Protocol):
    """A source of weights whose files may hold matrices in groups of 32."""

    def grid(self, name: str) -> Grid | None:
        """The matrix as the file holds it; ``None`` if that is no such grid."""
        ...


def combine(change: Callable[..., Tensor], *grids: Grid) -> Grid:
    """A grid made of others' rows: ``change`` takes as many tensors as grids, and moves rows only."""
    minimums = [grid.minimums for grid in grids if grid.minimums is not None]
    assert len(minimums) in (0, len(grids)) and len({grid.group for grid in grids}) == 1
    return Grid(
        levels=change(*(grid.levels for grid in grids)),
        scales=change(*(grid.scales for grid in grids)),
        minimums=change(*minimums) if minimums else None,
        group=grids[0].group,
    )


def read_grid(source: object, name: str, precision: str, read: Callable[[str], Tensor]) -> Grid:
    """A matrix on the grid of a 4-bit precision: the file's own where that is it, else quantised.

    Args:
        source: where weights come from; asked first if it is a :class:`GridSource`.
        name: the tensor's Hugging Face name.
        precision: a key of :data:`GROUP_WIDTHS`.
        read: reads the tensor in floating point.
    """
    if precision == "int4" and isinstance(source, GridSource):
        stored = source.grid(name)
        if stored is not None:
            return stored
    return quantise_to_grid(read(name), precision)


def note_of(note: str, precision: str) -> str:
    """A checkpoint's note on its file, as it is true in this precision: int4 keeps Q4_1 and Q4_0 as they are."""
    is_kept = precision == "int4" and ("(Q4_1)" in note or "(Q4_0)" in note)
    return note.replace(", dequantised", ", as stored") if is_kept else note


def quantise_to_grid(weight: Tensor, precision: str) -> Grid:
    """Round ``[out, in]`` to the nearest points of a grid that spans each group's own range.

    A file that is on the ``int4`` grid already comes out nearly as it was, but not exactly: a group need not use its
    lowest or highest level.
    """
    group = GROUP_WIDTHS[precision]
    num_out, num_in = weight.shape
    groups = F.pad(weight.float(), (0, -num_in % group)).view(num_out, -1, group)
    scales, minimums = _symmetric(groups) if precision == "int4-g128" else _asymmetric(groups)
    steps = scales.float().unsqueeze(2)
    start = -_MIDDLE * steps if minimums is None else minimums.float().unsqueeze(2)
    exact = torch.where(steps == 0, 0.0, (groups - start) / torch.where(steps == 0, 1.0, steps))
    levels = exact.round_().clamp_(0, 15).to(torch.uint8).view(num_out, -1)[:, :num_in]
    return Grid(levels=levels, scales=scales, minimums=minimums, group=group)


def _asymmetric(groups: Tensor) -> tuple[Tensor, Tensor | None]:
    low, high = groups.amin(dim=2).clamp(min=-_MOST_HALF), groups.amax(dim=2).clamp(max=_MOST_HALF)
    return ((high - low) / 15).to(torch.float16), low.to(torch.float16)


def _symmetric(groups: Tensor) -> tuple[Tensor, Tensor | None]:
    """The largest weight is level 0, -8 scales, whatever its sign: it is kept exactly."""
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    return (largest / -_MIDDLE).clamp(-_MOST_HALF, _MOST_HALF).to(torch.float16), None
