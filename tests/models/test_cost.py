"""Timing of passes leaves what it times as it was."""

from __future__ import annotations

import pytest

from outrider.models import cost
from outrider.models.cost import PassShape, time_passes, time_shapes

from ._tiny import tiny_target


def test_one_time_for_each_number_of_rows_in_order() -> None:
    curve = time_passes(tiny_target(), (4, 1, 16), num_cached=20, repeats=2)
    assert [rows for rows, _ in curve] == [4, 1, 16]
    assert all(0 < milliseconds < 60_000 for _, milliseconds in curve)


def test_what_is_needed_is_timed_twice_however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [PassShape(num_sequences=1, rows_each=rows, num_cached=8) for rows in (1, 2, 4, 8)]
    run: list[PassShape] = []
    clock = cost._time_one

    def watched(*args: object) -> float:
        run.append(args[-1])  # type: ignore[arg-type]
        return clock(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cost, "_time_one", watched)
    timed = time_shapes(tiny_target(), shapes, seconds=0.0, num_needed=3)
    assert run == shapes[:3] * 2
    assert list(timed) == shapes[:3]
