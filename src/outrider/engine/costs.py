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
_DRIFT_SHARE = 0.05
"""Weight of one observation in the machine's drift."""
_RECENT, _FEW = 9, 3
"""Observations whose median corrects a knot of a curve, and how many it takes at least."""
_REFRESH = 8
"""Observations after which the curves are drawn anew."""


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


class _Lane:
    """Passes of one kind: what the clock said by what the table and the machine's drift said, median by median.

    Medians, since other work on the machine makes single passes several times as long.
    """

    def __init__(self, knots: Sequence[int]) -> None:
        self._knots = knots
        self._near: list[deque[float]] = [deque(maxlen=_RECENT) for _ in knots]
        self._any: deque[float] = deque(maxlen=2 * _RECENT)

    def add(self, rows: int, ratio: float) -> None:
        """One observation."""
        self._any.append(ratio)
        if self._knots:
            self._near[self._nearest(rows)].append(ratio)

    def factor(self, rows: int) -> float:
        """Of a pass over so many rows."""
        return self.factors()[self._nearest(rows)] if self._knots else 1.0

    def factors(self) -> list[float]:
        """Of each knot; one that little is known of is taken for its nearest neighbour that is known."""
        known = {index: median(near) for index, near in enumerate(self._near) if len(near) >= _FEW}
        if not known:
            return [median(self._any) if len(self._any) >= _FEW else 1.0] * len(self._near)
        return [known[min(known, key=lambda other: abs(other - index))] for index in range(len(self._near))]

    def knows(self, rows: int) -> bool:
        """True if passes over about so many rows were seen often enough."""
        return not self._knots or len(self._near[self._nearest(rows)]) >= _FEW

    def _nearest(self, rows: int) -> int:
        right = min(bisect_left(self._knots, rows), len(self._knots) - 1)
        left = max(0, right - 1)
        return left if rows * rows < self._knots[left] * self._knots[right] else right


class LiveCosts:
    """A cost table that follows the machine.

    Args:
        table: as measured.
        names: drafters that may be called; one that was not timed is taken for a lookup.
    """

    def __init__(self, table: CostTable, names: Sequence[str]) -> None:
        self.table = table
        self._drift = 1.0
        self._plain, self._drafted = _Lane(table.passes.rows), _Lane(table.passes.rows)
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
            known, factors = self.table.passes, self._lane(is_drafted).factors()
            bent = RowCosts.monotone({r: ms * f for r, ms, f in zip(known.rows, known.ms, factors, strict=True)})
            curve = self._curves[is_drafted] = [self._drift * ms for ms in bent.curve(size)]
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

    def knows_plain(self, num_sequences: int) -> bool:
        """True if steps without drafts of about so many sequences were seen lately."""
        return self._plain.knows(num_sequences)

    def learn_pass(self, *, num_sequences: int, rows: int, context: float, verify_ms: float, other_ms: float) -> None:
        """A pass took so long."""
        draft_rows = max(0, rows - num_sequences)
        is_drafted, table = draft_rows > 0, self.table.passes
        self._other_ms[is_drafted] += _DRIFT_SHARE * (other_ms / num_sequences - self._other_ms[is_drafted])
        around = self._roots_ms(num_sequences, context) + draft_rows * self.row_ms(context)
        lane, as_measured = self._lane(is_drafted), self._drift * table(rows)
        ratio = _bounded(verify_ms / (as_measured * lane.factor(rows) + around), 4.0)
        lane.add(rows, _bounded(max(0.0, verify_ms - around) / as_measured, 4.0))
        self._drift *= 1 + _DRIFT_SHARE * (ratio - 1)
        self._since += 1
        if self._since >= _REFRESH:
            self._since, self._curves = 0, {}

    def _lane(self, is_drafted: bool) -> _Lane:
        return self._drafted if is_drafted else self._plain

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
            "passes_ms": plain,
            "passes_with_drafts_ms": drafted,
            "other_ms_per_sequence": {
                "plain": round(self._other_ms[False], 4),
                "drafted": round(self._other_ms[True], 4),
            },
            "drafts_ms": {name: asdict(self.drafts(name)) for name in self._drafts},
        }


def _bounded(ratio: float, most: float) -> float:
    """One observation may be wild: others use the machine, too."""
    return min(max(ratio, 1 / most), most)
