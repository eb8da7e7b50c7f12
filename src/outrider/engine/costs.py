"""What passes and drafts cost on this machine: measured at start, then corrected by what is observed.

A pass is timed by its packed rows at a context of :data:`CONTEXT` tokens; what more sequences and longer contexts add is
timed apart. A call of a drafter costs ``fixed + level * depth + sequence * B + node * B * depth`` and reads what it missed.

Corrections use the clock only as a ratio to what was predicted for the very rows that ran, so that they tell of the machine
and never of a draft (law 5).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

__all__ = ["CONTEXT", "LOOKUP_COSTS", "CostTable", "DraftCosts", "LiveCosts", "RowCosts"]

CONTEXT = 256
"""Cached tokens behind which a pass is timed."""
_DRIFT_SHARE, _SHAPE_SHARE = 0.05, 0.05
"""Weight of one observation in the machine's drift, and in the curve's shape."""
_REFRESH = 16
"""Observations after which the curve is drawn anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Milliseconds of a pass by its packed rows, measured; linear in between and beyond.

    Attributes:
        rows: ascending row counts; ms: time of a pass with that many rows. Both empty: a row more costs nothing.
    """

    rows: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()

    def __call__(self, num_rows: float) -> float:
        """Predicted milliseconds of a pass over ``num_rows`` rows."""
        if len(self.rows) < 2:
            return self.ms[0] if self.ms else 1.0
        right = min(max(1, bisect_left(self.rows, num_rows)), len(self.rows) - 1)
        r0, r1 = self.rows[right - 1], self.rows[right]
        slope = (self.ms[right] - self.ms[right - 1]) / (r1 - r0)
        return self.ms[right - 1] + slope * (num_rows - r0)

    def curve(self, num_rows: int) -> list[float]:
        """All of them from 0 rows, which are taken for 1, to ``num_rows``."""
        curve = [self(1)]
        for right in range(1, len(self.rows)):
            start, start_ms, end = self.rows[right - 1], self.ms[right - 1], self.rows[right]
            slope = (self.ms[right] - start_ms) / (end - start)
            last = num_rows if right + 1 == len(self.rows) else min(num_rows, end)
            curve += [start_ms + slope * (rows - start) for rows in range(len(curve), last + 1)]
        return curve + curve[-1:] * (num_rows + 1 - len(curve))

    @staticmethod
    def fastest(timed: Mapping[int, float]) -> RowCosts:
        """From timings, each of which others on the machine can only have made longer: of a pass over more rows that took
        less, the time holds for the smaller pass, too."""
        rows = tuple(sorted(timed))
        return RowCosts(rows=rows, ms=tuple(accumulate((timed[count] for count in reversed(rows)), min))[::-1])

    @staticmethod
    def monotone(timed: Mapping[int, float]) -> RowCosts:
        """A pass over more rows is never cheaper; where the clock says so, it erred."""
        rows = tuple(sorted(timed))
        return RowCosts(rows=rows, ms=tuple(accumulate((timed[count] for count in rows), max)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Milliseconds of a drafter.

    Attributes:
        fixed: of a call; level: of each level of depth, however many sequences; sequence: of each sequence of a call.
        node: of each sequence at each level; row: of a committed token that the drafter has yet to read.
    """

    fixed: float = 0.0
    level: float = 0.0
    sequence: float = 0.0
    node: float = 0.0
    row: float = 0.0

    def __call__(self, num_sequences: int, depth: int) -> float:
        """Predicted milliseconds of a call for that many sequences, all of this depth."""
        return self.fixed + self.level * depth + num_sequences * (self.sequence + self.node * depth)

    def times(self, factor: float) -> DraftCosts:
        """All of it so many times as dear."""
        return DraftCosts(
            fixed=self.fixed * factor,
            level=self.level * factor,
            sequence=self.sequence * factor,
            node=self.node * factor,
            row=self.row * factor,
        )


LOOKUP_COSTS = DraftCosts(sequence=0.05)
"""What a drafter that runs no model is taken to cost before its first call was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Everything measured at start.

    Attributes:
        passes: of a target pass by its rows, in few sequences at a context of ``CONTEXT``.
        sequence_ms: what a pass costs more for each further sequence of it.
        attended_ms: what a row costs more for each cached token past ``CONTEXT``.
        drafts: by drafter's name.
    """

    passes: RowCosts = field(default_factory=RowCosts)
    sequence_ms: float = 0.0
    attended_ms: float = 0.0
    drafts: Mapping[str, DraftCosts] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` reads them back."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> CostTable:
        """What :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError: values that are no table.
        """
        passes = values["passes"]
        return CostTable(
            passes=RowCosts(rows=tuple(passes["rows"]), ms=tuple(passes["ms"])),
            sequence_ms=float(values["sequence_ms"]),
            attended_ms=float(values["attended_ms"]),
            drafts={name: DraftCosts(**costs) for name, costs in values["drafts"].items()},
        )


class LiveCosts:
    """A cost table that follows the machine.

    Args:
        table: as measured.
        names: drafters that may be called; one that was not timed is taken for a lookup.
    """

    def __init__(self, table: CostTable, names: Sequence[str]) -> None:
        self.table = table
        self._drift = 1.0
        self._shape = [1.0] * len(table.passes.rows)
        self._curve: list[float] = []
        self._size = 0
        self._since = 0
        self._drafts = {name: table.drafts.get(name, LOOKUP_COSTS) for name in names}
        self._live_drafts = dict(self._drafts)
        self._draft_drift = dict.fromkeys(names, 1.0)
        self._other_ms = 0.0

    def passes(self, num_rows: int) -> list[float]:
        """Milliseconds of passes over 0 to (at least) ``num_rows`` rows of few sequences, as corrected so far."""
        if len(self._curve) <= num_rows:
            self._size = size = max(self._size, 1 << max(6, num_rows.bit_length()))
            known = self.table.passes
            bent = RowCosts.monotone({r: ms * f for r, ms, f in zip(known.rows, known.ms, self._shape, strict=True)})
            self._curve = [self._drift * ms for ms in bent.curve(size)]
        return self._curve

    def around_ms(self, num_sequences: int, context: float) -> float:
        """What a step costs besides its rows: further sequences, long contexts of the roots, and the engine's own work."""
        table = self.table
        attended = num_sequences * max(0.0, context - CONTEXT) * table.attended_ms
        return self._drift * (table.sequence_ms * max(0, num_sequences - 1) + attended) + self._other_ms * num_sequences

    def row_ms(self, context: float) -> float:
        """What a draft row costs besides its place on the curve."""
        return self._drift * max(0.0, context - CONTEXT) * self.table.attended_ms

    def drafts(self, name: str) -> DraftCosts:
        """A drafter's costs, as corrected so far."""
        return self._live_drafts[name]

    def learn_pass(self, *, num_sequences: int, rows: int, context: float, verify_ms: float, other_ms: float) -> None:
        """A pass took so long."""
        self._other_ms += _DRIFT_SHARE * (other_ms / num_sequences - self._other_ms)
        draft_rows = max(0, rows - num_sequences)
        around = self.around_ms(num_sequences, context) - self._other_ms * num_sequences
        predicted = self.passes(rows)[rows] + around + draft_rows * self.row_ms(context)
        ratio = _bounded(verify_ms / predicted, 4.0)
        self._drift *= 1 + _DRIFT_SHARE * (ratio - 1)
        for index, weight in self._nearest(rows):
            self._shape[index] *= 1 + _SHAPE_SHARE * weight * (ratio - 1)
        # Only the shape is relative: pull it back to 1 on average, or it and the drift would wander apart.
        mean = sum(self._shape) / len(self._shape) if self._shape else 1.0
        self._shape = [_bounded(factor / mean, 3.0) for factor in self._shape]
        self._since += 1
        if self._since >= _REFRESH:
            self._since, self._curve = 0, []

    def learn_draft(self, name: str, *, num_sequences: int, depth: int, num_read: int, draft_ms: float) -> None:
        """A call for so many sequences of this depth, which read ``num_read`` tokens first, took so long."""
        costs = self.drafts(name)
        predicted = costs(num_sequences, depth) + costs.row * num_read
        if predicted > 0:
            ratio = _bounded(draft_ms / predicted, 4.0)
            self._draft_drift[name] *= 1 + 2 * _DRIFT_SHARE * (ratio - 1)
            self._live_drafts[name] = self._drafts[name].times(self._draft_drift[name])

    def to_json(self) -> dict[str, Any]:
        """The table and what became of it."""
        corrected = {str(rows): round(self.passes(rows)[rows], 4) for rows in self.table.passes.rows}
        return {
            "measured": self.table.to_json(),
            "drift": round(self._drift, 4),
            "passes_ms": corrected,
            "other_ms_per_sequence": round(self._other_ms, 4),
            "drafts_ms": {name: asdict(self.drafts(name)) for name in self._drafts},
        }

    def _nearest(self, rows: int) -> list[tuple[int, float]]:
        """The knots beside a row count, with weights that sum to 1."""
        knots = self.table.passes.rows
        right = bisect_left(knots, rows)
        if right == 0 or right == len(knots):
            return [(min(right, len(knots) - 1), 1.0)] if knots else []
        share = (rows - knots[right - 1]) / (knots[right] - knots[right - 1])
        return [(right - 1, 1 - share), (right, share)]


def _bounded(ratio: float, most: float) -> float:
    """One observation may be wild: others use the machine, too."""
    return min(max(ratio, 1 / most), most)
