"""The load script: arms and slices against a real server of known answers."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.load.host import PlannerSwitch
from benchmarks.load.slices import SliceResult, parse_arm, run_slice
from benchmarks.serve_load import MIXES, compare_arms

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.planner import Planner
from outrider.sampling.params import SamplingParams
from tests.benchmarks.load_support import ROWS, client_of
from tests.engine.support import random_chains, table_model
from tests.serve.support import LiveServer


def test_arms() -> None:
    assert parse_arm("off").speculation == {"enabled": False} and parse_arm("idle").speculation == {
        "num_draft_tokens": 0
    }
    assert parse_arm("fixed:4").schedule == "fixed" and parse_arm("adaptive").speculation is None
    for wrong in ("on", "fixed", "fixed:x", "adaptive:3"):
        with pytest.raises(ValueError, match="off, idle, fixed:K, adaptive"):
            parse_arm(wrong)
    assert set(MIXES) == {"creative", "code", "tool_calls", "copy"}


def test_a_slice_counts_what_the_server_made(server: LiveServer) -> None:
    made = server.service.worker.tally.generated_tokens
    work = run_slice(
        client_of(server),
        parse_arm("adaptive"),
        ROWS,
        concurrency=3,
        seconds=0.4,
        sampling={"temperature": 0, "max_tokens": 30},
        seed=1,
    )
    found = asyncio.run(work)
    assert 0 < found.tokens <= server.service.worker.tally.generated_tokens - made
    assert found.finished == found.statuses[200] > 0 and found.statuses[0] <= 3 and 0.4 <= found.seconds < 5
    assert found.accepted <= found.drafted and server.is_idle
    assert found.to_json()["tokens_per_s"] == round(found.tokens / found.seconds, 2)


def slice_of(arm: str, speed: float) -> SliceResult:
    return SliceResult(
        arm=arm, tokens=round(speed * 10), seconds=10.0, finished=1, latencies_s=(1.0,), statuses={200: 1},
        client_cpu_s=0.5, drafted=0, accepted=0,
    )  # fmt: skip


def test_arms_are_compared_in_pairs_and_the_best_is_picked_on_other_rounds() -> None:
    # fixed:4 is best on even rounds, fixed:8 on odd ones.
    speeds = {
        "off": [10, 20, 10, 20],
        "adaptive": [12, 24, 12, 24],
        "fixed:4": [15, 12, 15, 12],
        "fixed:8": [5, 30, 5, 30],
    }
    slices = [slice_of(arm, values[turn]) for turn in range(4) for arm, values in speeds.items()]
    found = compare_arms(slices)
    assert found["arms"]["adaptive"]["by_off"]["value"] == pytest.approx(1.2) and "by_off" not in found["arms"]["off"]
    assert found["adaptive_by_best_fixed"]["best"] == "fixed:4"
    assert found["adaptive_by_best_fixed"]["value"] == pytest.approx(2.0)
    assert found["client_cpu_share"] == pytest.approx(0.05)


def test_the_switch_changes_who_decides() -> None:
    engine = Engine(table_model(), drafter=random_chains(1), config=EngineConfig(num_draft_tokens=3))
    own, switch = engine.planner, PlannerSwitch(engine)
    switch.choose("fixed")
    assert isinstance(engine.planner, Planner) and engine.planner is not own
    [result] = engine.generate([[1, 2]], SamplingParams(max_tokens=20))
    assert result.stats.draft_rate is not None and result.stats.passes > 5
    switch.choose("adaptive")
    assert engine.planner is own
    engine.submit([1], SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="requests are running"):
        switch.choose("fixed")
    with pytest.raises(ValueError, match="adaptive, fixed"):
        switch.choose("nothing")
