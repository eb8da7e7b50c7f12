"""What a pass costs by the number of its rows: the curve that decides whether speculation pays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cache.base import Cache
from outrider.device import synchronize
from outrider.models.base import PackedRows, Target

__all__ = ["PassShape", "time_passes", "time_shapes"]


_LEAST_TURNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """A pass over ``num_sequences`` chains of ``rows_each`` rows, each behind ``num_cached`` cached tokens."""

    num_sequences: int
    rows_each: int
    num_cached: int

    @property
    def rows(self) -> int:
        """Packed rows."""
        return self.num_sequences * self.rows_each


def time_passes(
    target: Target, num_rows: Sequence[int] = (1, 2, 4, 8, 16), *, num_cached: int = 256, repeats: int = 10
) -> list[tuple[int, float]]:
    """Time passes of one sequence, interleaved so that drifts of the machine hit every row count alike.

    Args:
        target: what to time.
        num_rows: rows of a pass, each measured.
        num_cached: tokens cached before each pass.
        repeats: rounds; the fastest of each row count is reported, as others may use the machine meanwhile.

    Returns:
        (rows, milliseconds) in the order given.
    """
    shapes = [PassShape(num_sequences=1, rows_each=rows, num_cached=num_cached) for rows in num_rows]
    timed = time_shapes(target, shapes, seconds=float("inf"), repeats=repeats)
    return [(shape.rows, timed[shape]) for shape in shapes]


def time_shapes(
    target: Target, shapes: Sequence[PassShape], *, seconds: float, repeats: int = 5, num_needed: int = 1
) -> dict[PassShape, float]:
    """Time passes of these shapes in interleaved rounds.

    Args:
        target: what to time.
        shapes: in the order of their worth: those that are left when the time is up are not timed at all.
        seconds: about how long this may take, the fill of the caches not counted.
        repeats: most rounds; the fastest of each shape is reported.
        num_needed: shapes that are timed twice whatever it takes: one timing on a busy machine may say anything.

    Returns:
        Milliseconds by shape.
    """
    cache = target.new_cache()
    slots = _filled(target, cache, shapes)
    began = time.perf_counter()
    best: dict[PassShape, float] = {}
    for turn in range(repeats):
        for place, shape in enumerate(shapes):
            is_needed = turn < _LEAST_TURNS and place < num_needed
            if not is_needed and time.perf_counter() - began > seconds:
                break
            best[shape] = min(best.get(shape, float("inf")), _time_one(target, cache, slots, shape))
    return best


def _filled(target: Target, cache: Cache, shapes: Sequence[PassShape]) -> dict[int, list[int]]:
    """Slots by the tokens that they hold; the first of each is read, the others are copied."""
    slots: dict[int, list[int]] = {}
    for num_cached in dict.fromkeys(shape.num_cached for shape in shapes):
        mine = [shape for shape in shapes if shape.num_cached == num_cached]
        room = num_cached + max(shape.rows_each for shape in mine)
        own = [cache.allocate(room) for _ in range(max(shape.num_sequences for shape in mine))]
        for start in range(0, num_cached, 512):
            tokens = _tokens(target, start, min(512, num_cached - start))
            _run(target, cache, [own[0]], [tokens], start, logit_rows=(0,))
        for slot in own[1:]:
            cache.copy_prefix(own[0], slot, num_cached)
        slots[num_cached] = own
    return slots


def _time_one(target: Target, cache: Cache, slots: dict[int, list[int]], shape: PassShape) -> float:
    used = slots[shape.num_cached][: shape.num_sequences]
    chain = _tokens(target, shape.num_cached, shape.rows_each)
    synchronize(target.spec.device)
    began = time.perf_counter()
    _run(target, cache, used, [chain] * len(used), shape.num_cached)
    synchronize(target.spec.device)
    ms = (time.perf_counter() - began) * 1000
    for slot in used:
        cache.keep(slot, base=shape.num_cached, path=())
    return ms


def _tokens(target: Target, start: int, count: int) -> list[int]:
    return [1 + index % (target.spec.vocab_size - 1) for index in range(start, start + count)]


def _run(
    target: Target,
    cache: Cache,
    slots: Sequence[int],
    tokens: Sequence[Sequence[int]],
    start: int,
    logit_rows: tuple[int, ...] | None = None,
) -> None:
    rows = PackedRows.pack(
        tokens, slots=slots, starts=[start] * len(slots), device=target.spec.device, logit_rows=logit_rows
    )
    target.forward(rows, cache)
