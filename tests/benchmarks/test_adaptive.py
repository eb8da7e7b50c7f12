"""The planner's benchmark: slices of arms, and bars from cells."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.adaptive import FIXED, MIXES, Arm, _best_fixed, bars_of, earlier_cells

from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable
from outrider.engine.engine import Engine
from outrider.sampling.params import SamplingParams
from tests.engine.support import random_chains, table_model


def cell(**ms: float) -> dict[str, Any]:
    """Twenty slices of every arm."""
    values = {"off": 10.0, "idle": 10.0, **{f"k{k}": 12.0 for k in FIXED}, "adaptive": 10.0, **ms}
    return {"mix": "code", "concurrency": 4, "ms_per_token": {name: [value] * 20 for name, value in values.items()}}


def test_an_arm_keeps_its_requests_in_flight_from_slice_to_slice() -> None:
    engine = Engine(table_model(), drafter=random_chains(1), config=EngineConfig(max_batch_size=3), costs=CostTable())
    params = SamplingParams(max_tokens=1000)
    arm = Arm(engine=engine, prompts=itertools.cycle([[1, 2], [3]]), params=params)
    arm.run(3, 0.02)
    assert arm.in_flight == 3 and arm.tokens[0] >= 3 and arm.seconds[0] >= 0.02
    arm.run(3, 0.02)
    assert len(arm.ms_per_token) == 2 and all(0 < ms < 100 for ms in arm.ms_per_token)


def test_bars_are_ratios_of_speeds() -> None:
    bars = {bar.name: bar for bar in bars_of([cell(adaptive=8.0, idle=10.1)])}
    assert bars["code: adaptive to off"].value == pytest.approx(1.25)
    assert bars["code: idle to off"].value == pytest.approx(10 / 10.1)
    assert bars["code: adaptive to best fixed"].value == pytest.approx(10 / 8), "no fixed length beat plain decoding"
    assert all(bar.verdict.startswith("met") for bar in bars.values())


def test_the_best_fixed_length_is_chosen_on_one_half_and_compared_on_the_other() -> None:
    made = cell(k4=7.0)["ms_per_token"]
    made["k4"][1::2] = [9.0] * 10
    assert _best_fixed(made) == [9.0] * 10


def test_a_cell_that_loses_is_named() -> None:
    bars = bars_of([cell(adaptive=10.6), cell(adaptive=10.0)])
    lost = [bar for bar in bars if "at a time" in bar.name]
    assert len(lost) == 1 and "4 at a time" in lost[0].name and lost[0].verdict.startswith("missed")


def test_arms_that_took_no_part_have_no_bars() -> None:
    made = cell()
    made["ms_per_token"] = {name: made["ms_per_token"][name] for name in ("off", "adaptive")}
    assert [bar.name for bar in bars_of([made])] == ["code: adaptive to off"]


def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    path, settings = tmp_path / "adaptive.json", {"slice_s": 5.0, "mixes": ["code"]}
    assert earlier_cells(path, settings) == []
    path.write_text(json.dumps({"settings": settings, "cells": [cell()]}))
    assert earlier_cells(path, {"slice_s": 5.0, "mixes": ["creative"]}) == [cell()]
    with pytest.raises(ValueError, match=r"slice_s 5\.0, not 20\.0"):
        earlier_cells(path, {"slice_s": 20.0, "mixes": ["code"]})


def test_every_mix_names_groups_that_there_are() -> None:
    from benchmarks.prompts import GROUPS

    assert all(set(mix.groups) <= set(GROUPS) for mix in MIXES.values())
