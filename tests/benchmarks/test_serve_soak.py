"""The soak against a server of known answers: it finds nothing, goes on where it stopped, and says what is wrong."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from benchmarks.load.soak import SoakPlan, SoakState, check_alone, resident_bytes, soak

from tests.benchmarks.load_support import ROWS, client_of
from tests.serve.support import LiveServer


def test_a_soak_finds_nothing_and_goes_on_where_it_stopped(server: LiveServer) -> None:
    client, plan = client_of(server), SoakPlan(requests=60, concurrency=6, rows=ROWS)
    state = SoakState()
    assert not asyncio.run(soak(client, plan, state, pid=None, until=0.0)) and state.done == 0

    async def interrupted() -> None:
        work = asyncio.create_task(soak(client, plan, state, pid=None))
        while state.done < 20:
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(interrupted())
    state = SoakState.from_json(json.loads(json.dumps(state.to_json())))
    assert 20 <= state.done < 60 and asyncio.run(soak(client, plan, state, pid=None)) and state.done == 60
    asyncio.run(check_alone(client, plan, state))
    assert resident_bytes(os.getpid()) > 1 << 24
    assert state.problems == [] and len(state.checked) > 5 and server.is_idle
    assert 60 <= sum(state.statuses.values()) <= 60 + plan.concurrency  # what was under way is sent again
    refused = [name for name in state.statuses if name.startswith(("bad_body", "refused"))]
    assert refused and all(name.endswith((" 400", " 413")) for name in refused)


def test_a_soak_that_found_something_says_so() -> None:
    grown = [(10 * count, 100 if count < 60 else 150) for count in range(100)]
    bad = SoakState(memory=[grown], faults=["number 3 (plain): 500"], differing=["7"], left_bytes=5)
    assert bad.memory_growth == pytest.approx(0.5)
    assert [problem.split()[0] for problem in bad.problems] == ["1", "answers", "left", "memory"]
    assert SoakState(memory=[grown[:50]]).memory_growth is None  # too few to say
    assert SoakState().memory_growth is None and SoakState().problems == []
    filling = [(10 * count, 100 + min(count, 15)) for count in range(100)]
    assert SoakState(memory=[filling]).memory_growth == 0.0  # what fills up in the warm-up is no leak
