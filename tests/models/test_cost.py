"""Timing of passes leaves what it times as it was."""

from __future__ import annotations

from outrider.models.cost import time_passes

from ._tiny import tiny_target


def test_one_time_for_each_number_of_rows_in_order() -> None:
    curve = time_passes(tiny_target(), (4, 1, 16), num_cached=20, repeats=2)
    assert [rows for rows, _ in curve] == [4, 1, 16]
    assert all(0 < milliseconds < 60_000 for _, milliseconds in curve)
