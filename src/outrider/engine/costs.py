"""What passes and drafts cost on this machine: measured at start, then corrected by what is observed.

A pass is timed by its packed rows at a context of :data:`CONTEXT` tokens; what more sequences and longer contexts add is
timed apart. A call of a drafter costs ``fixed + level * depth + sequence * B + node * B * depth`` and reads what it missed.

Corrections use the clock only as a ratio to what was predicted for the very rows that ran, so that they tell of the machine
and never of a draft (law 5). Steps with drafts and steps without are corrected apart. What a draft costs besides its row
(trees, hidden states, draws) is in no table; were it taken for a slower machine, plain steps would seem as much slower, and
drafting would go on where it loses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

__all__ = ["CONTEXT", "LOOKUP_COSTS", "CostTable", "DraftCosts", "LiveCosts", "RowCosts"]

CONTEXT = 256
"""Cached tokens behind which a pass is timed."""
_DRIFT_SHARE, _SHAPE_SHARE = 0.05, 0.05
"""Weight of one observation in the machine's drift, and in the curve's shape."""
_REFRESH = 8
"""Observations after which the curve is drawn anew."""
_NEIGHBOURS, _FAR = 8, 24
"""Steps of the other kind that one is compared with, and how many steps back they may lie."""
_COMPARED, _DOUBT = 15, 3
"""Comparisons of both kinds that count, and how many without a difference are laid beside them."""


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


class _Excess:
    """What steps with drafts take by what the table says, beside steps without them at about the same time.

    Steps are compared with their neighbours of the other kind, so that a machine that becomes slower does not count, and by
    medians, since other work on the machine makes single passes several times as long.
    """

    def __init__(self) -> None:
        self._recent: dict[bool, deque[tuple[int, float]]] = {kind: deque(maxlen=_NEIGHBOURS) for kind in (False, True)}
        self._compared: deque[float] = deque(maxlen=_COMPARED)
        self._last: bool | None = None
        self._now = 0

    @property
    def factor(self) -> float:
        """Of all steps with drafts."""
        return median([*self._compared, *[1.0] * _DOUBT])

    @property
    def is_known(self) -> bool:
        """True if both kinds were compared often enough."""
        return len(self._compared) > _DOUBT

    def add(self, *, is_drafted: bool, ratio: float) -> None:
        """One step: its time by the table's."""
        self._now += 1
        others = [value for step, value in self._recent[not is_drafted] if self._now - step <= _FAR]
        if others and self._last is not is_drafted:
            self._compared.append(_bounded(ratio / median(others) if is_drafted else median(others) / ratio, 4.0))
        self._last = is_drafted
        self._recent[is_drafted].append((self._now, ratio))


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
        self._excess = _Excess()
        self._curves: dict[bool, list[float]] = {}
        self._size = 0
        self._since = 0
        self._drafts = {name: table.drafts.get(name, LOOKUP_COSTS) for name in names}
        self._live_drafts = dict(self._drafts)
        self._draft_drift = dict.fromkeys(names, 1.0)
        self._other_ms = {False: 0.0, True: 0.0}

    def passes(self, num_rows: int, *, is_drafted: bool = True) -> list[float]:
        """Milliseconds of passes over 0 to (at least) ``num_rows`` rows of few sequences, as corrected so far.

        Args:
            num_rows: the most.
            is_drafted: whether drafts are among the rows.
        """
        curve = self._curves.get(is_drafted)
        if curve is None or len(curve) <= num_rows:
            self._size = size = max(self._size, 1 << max(6, num_rows.bit_length()))
            known, factor = self.table.passes, self._drift * (self._excess.factor if is_drafted else 1.0)
            bent = RowCosts.monotone({r: ms * f for r, ms, f in zip(known.rows, known.ms, self._shape, strict=True)})
            curve = self._curves[is_drafted] = [factor * ms for ms in bent.curve(size)]
        return curve

    def around_ms(self, num_sequences: int, context: float, *, is_drafted: bool = True) -> float:
        """What a step costs besides its rows: further sequences, long contexts of the roots, and the engine's own work."""
        return self._roots_ms(num_sequences, context) + self._other_ms[is_drafted] * num_sequences

    def row_ms(self, context: float) -> float:
        """What a draft row costs besides its place on the curve."""
        return self._drift * max(0.0, context - CONTEXT) * self.table.attended_ms

    def drafts(self, name: str) -> DraftCosts:
        """A drafter's costs, as corrected so far."""
        return self._live_drafts[name]

    @property
    def knows_both(self) -> bool:
        """True if steps with drafts and steps without were compared often enough."""
        return self._excess.is_known

    def learn_pass(self, *, num_sequences: int, rows: int, context: float, verify_ms: float, other_ms: float) -> None:
        """A pass took so long."""
        draft_rows = max(0, rows - num_sequences)
        is_drafted = draft_rows > 0
        self._other_ms[is_drafted] += _DRIFT_SHARE * (other_ms / num_sequences - self._other_ms[is_drafted])
        around = self._roots_ms(num_sequences, context) + draft_rows * self.row_ms(context)
        pass_ms = self.passes(rows, is_drafted=is_drafted)[rows]
        ratio = _bounded(verify_ms / (pass_ms + around), 4.0)
        undrafted_ms = pass_ms / self._excess.factor if is_drafted else pass_ms
        self._excess.add(is_drafted=is_drafted, ratio=self._drift * verify_ms / (undrafted_ms + around))
        self._drift *= 1 + _DRIFT_SHARE * (ratio - 1)
        for index, weight in self._nearest(rows):
            self._shape[index] *= 1 + _SHAPE_SHARE * weight * (ratio - 1)
        # Only the shape is relative: pull it back to 1 on average, or it and the drift would wander apart.
        mean = sum(self._shape) / len(self._shape) if self._shape else 1.0
        self._shape = [_bounded(factor / mean, 3.0) for factor in self._shape]
        self._since += 1
        if self._since >= _REFRESH:
            self._since, self._curves = 0, {}

    def _roots_ms(self, num_sequences: int, context: float) -> float:
        """Further sequences of a pass, and their contexts."""
        attended = num_sequences * max(0.0, context - CONTEXT) * self.table.attended_ms
        return self._drift * (self.table.sequence_ms * max(0, num_sequences - 1) + attended)

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
        plain, drafted = (
            {str(rows): round(self.passes(rows, is_drafted=kind)[rows], 4) for rows in self.table.passes.rows}
            for kind in (False, True)
        )
        return {
            "measured": self.table.to_json(),
            "drift": round(self._drift, 4),
            "excess_with_drafts": round(self._excess.factor, 4),
            "passes_ms": plain,
            "passes_with_drafts_ms": drafted,
            "other_ms_per_sequence": {
                "plain": round(self._other_ms[False], 4),
                "drafted": round(self._other_ms[True], 4),
            },
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
