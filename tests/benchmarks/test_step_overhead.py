"""The measurement of a step's Python measures what it says: arms that draft, or do not, and parts that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.step_overhead import Cell, measure

from benchmarks import step_overhead
from outrider.engine import step as engine_step


def cell(arm: str, drafter: str = "suffix") -> dict[str, float]:
    where = Cell(arm=arm, batch=2, context=30, drafter=drafter, num_draft_tokens=4)
    return measure(where, steps=20, rounds=1)


def test_without_a_drafter_every_sequence_commits_one_token() -> None:
    found = cell("off")
    assert (found["nodes_a_step"], found["tokens_a_step"]) == (0, 2)


@pytest.mark.parametrize("drafter", ["suffix", "head", "both"])
def test_texts_that_repeat_themselves_are_drafted_and_others_left_alone(drafter: str) -> None:
    assert cell("adaptive", drafter)["tokens_a_step"] > 4
    assert cell("idle", drafter)["nodes_a_step"] < 1


def test_clocks_are_taken_off_again_and_parts_are_told(tmp_path: Path) -> None:
    before = engine_step.judge, engine_step.commit
    out = tmp_path / "found.json"
    grid = ["--arm", "off", "adaptive", "--batch", "1", "--context", "20", "--steps", "5", "--rounds", "1"]
    assert step_overhead.main([*grid, "--out", str(out)]) == 0
    assert (engine_step.judge, engine_step.commit) == before
    text = out.read_text()
    assert all(f'"{part}"' in text for part in step_overhead.PARTS)
