"""One budget of draft nodes over the whole batch: each goes where it gains most, and the last is the last that pays.

A step commits ``tokens`` and takes ``ms``; every draft node adds the chance that it is kept to the one and its share of the
larger pass and of drafting to the other. What is sought is the most tokens a millisecond. Nodes queue up by their chance, the
costs of all prefixes of the queue are added up, and the best prefix wins: costs have steps (a drafter's call, a level of
depth, the end of the flat part of the curve), so that the first node that does not pay need not be the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate

from outrider.engine.costs import DraftCosts

__all__ = ["Bid", "Step", "best_prefix", "share_depths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step before the nodes in question.

    Attributes:
        tokens: what it commits on average.
        ms: what it takes besides its rows.
        rows: packed rows.
        curve: milliseconds of a pass by its rows.
        row_ms: of a draft row besides its place on the curve.
        bare_ms: all of it without the nodes in question, where no other drafts are among its rows; ``None``: as with them.
    """

    tokens: float
    ms: float
    rows: float
    curve: Sequence[float]
    row_ms: float = 0.0
    bare_ms: float | None = None

    def ms_with(self, more_rows: float) -> float:
        """All of it, with more rows."""
        if more_rows == 0 and self.bare_ms is not None:
            return self.bare_ms
        return self.ms + self.curve[int(self.rows + more_rows + 0.5)] + more_rows * self.row_ms

    @property
    def speed(self) -> float:
        """Tokens a millisecond."""
        return self.tokens / self.ms_with(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bid:
    """What a drafter may gain for one sequence.

    Attributes:
        survivals: chance that the first 1, 2, .. drafts are kept.
        rows_each: rows that a level of depth adds on average.
        levels: levels that add rows and take the drafter's time; deeper drafts are free.
        entry_ms: of asking at all, besides the drafter's costs: reading what it missed.
        lost: tokens that were to be gained otherwise, and are not if it is asked; their rows are ``lost_rows``.
    """

    survivals: Sequence[float]
    rows_each: float = 1.0
    levels: int = 1 << 10
    entry_ms: float = 0.0
    lost: float = 0.0
    lost_rows: float = 0.0


def share_depths(bids: Sequence[Bid], step: Step, call: DraftCosts, *, margin: float) -> list[int]:
    """How deep to draft for each sequence; all zero where nothing beats the step as it is.

    Args:
        bids: one a sequence; one without survivals gets nothing.
        step: the step without these drafts.
        call: costs of the drafter that is asked.
        margin: how many times faster than ``step`` the best must be.
    """
    depths, best, taken = [0] * len(bids), step.speed * margin, 0
    waiting = [(-bid.survivals[0] + bid.lost, index) for index, bid in enumerate(bids) if bid.survivals]
    heapify(waiting)
    order: list[int] = []
    tokens, rows, ms, deepest = step.tokens, 0.0, call.fixed, 0
    while waiting:
        _, index = heappop(waiting)
        bid, depth = bids[index], depths[index]
        tokens += bid.survivals[depth]
        if depth < bid.levels:
            rows += bid.rows_each
            ms += call.node
        if depth == 0:
            tokens -= bid.lost
            rows -= bid.lost_rows
            ms += call.sequence + bid.entry_ms
        depths[index] = depth + 1
        if deepest < depth + 1 <= bid.levels:
            deepest, ms = depth + 1, ms + call.level
        if depth + 1 < len(bid.survivals):
            heappush(waiting, (-bid.survivals[depth + 1], index))
        order.append(index)
        speed = tokens / (step.ms_with(rows) + ms)
        if speed > best:
            best, taken = speed, len(order)
    depths = [0] * len(bids)
    for index in order[:taken]:
        depths[index] += 1
    return depths


def best_prefix(gains: Sequence[float], step: Step) -> int:
    """How many of these nodes, ordered by falling gain, to keep: a row each."""
    first, ms, row_ms = int(step.rows + 0.5), step.ms, step.row_ms
    passes_ms = step.curve[first : first + len(gains) + 1]
    tokens = accumulate(gains, initial=step.tokens)
    speeds = [
        each / (ms + pass_ms + count * row_ms)
        for count, (each, pass_ms) in enumerate(zip(tokens, passes_ms, strict=True))
    ]
    speeds[0] = step.speed
    return speeds.index(max(speeds))
