"""The thread that owns the engine: it sleeps when idle, ends in order, and survives what its engine does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.engine import Engine
from outrider.engine.result import StreamEvent
from outrider.engine.speculation import SpeculationParams
from outrider.errors import PromptError, SamplingError
from outrider.sampling.params import SamplingParams
from outrider.serve.bridge import Bridge, Job
from outrider.serve.errors import ApiError
from outrider.serve.worker import MOST_FAULTS, Worker
from tests.serve.support import ScriptedModel


def job(id: str, prompt: str = "anything", **fields: Any) -> Job:
    target = ScriptedModel()
    tokens = target.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return Job(id=id, prompt=tokens, params=SamplingParams(**{"max_tokens": 1000, **fields}), scope="open")


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(Bridge(Engine(ScriptedModel())), max_waiting=4)
    made.start()
    yield made
    made.stop()
    assert made.join(10)


async def collect(worker: Worker, *jobs: Job) -> list[StreamEvent]:
    stream = await worker.submit(jobs)
    events: list[StreamEvent] = []
    while stream.missing:
        events += await stream.batch()
    return events


def test_events_arrive_at_the_stream_that_they_belong_to(worker: Worker) -> None:
    async def both() -> tuple[list[StreamEvent], list[StreamEvent]]:
        first, second = await asyncio.gather(
            collect(worker, job("a"), job("b", "Reply with exactly: OK")), collect(worker, job("c", "a long story"))
        )
        return first, second

    first, second = asyncio.run(both())
    texts = {event.id: event.result.text for event in [*first, *second] if event.result is not None}
    assert texts["a"] == "hello" and texts["b"] == "OK" and texts["c"].startswith("Once upon a time")
    assert {event.id for event in first} == {"a", "b"} and {event.id for event in second} == {"c"}


def test_an_idle_engine_takes_no_time(worker: Worker) -> None:
    asyncio.run(collect(worker, job("a")))
    steps = 0
    step = worker.bridge.step

    def counted() -> list[StreamEvent]:
        nonlocal steps
        steps += 1
        return step()

    worker.bridge.step = counted  # type: ignore[method-assign]
    before = time.process_time()
    time.sleep(0.3)
    assert steps == 0 and time.process_time() - before < 0.1


def test_all_jobs_of_a_request_or_none(worker: Worker) -> None:
    async def ask() -> None:
        empty = Job(id="b", prompt=[], params=SamplingParams(), scope="open")
        with pytest.raises(PromptError, match="empty"):
            await worker.submit([job("a", "never ends"), empty])
        assert await worker.call(lambda bridge: bridge.step()) is not None
        assert await worker.call(lambda bridge: bridge.has_work) is False

    asyncio.run(ask())


def test_what_was_accepted_is_finished_and_nothing_else_is_taken() -> None:
    worker = Worker(Bridge(Engine(ScriptedModel())), max_waiting=4)
    worker.start()

    async def drain() -> list[StreamEvent]:
        stream = await worker.submit([job("a", "a long story")])
        worker.stop()
        with pytest.raises(ApiError) as caught:
            await worker.submit([job("b")])
        assert caught.value.status == 503
        events: list[StreamEvent] = []
        while stream.missing:
            events += await stream.batch()
        return events

    events = asyncio.run(drain())
    result = events[-1].result
    assert (
        result is not None and result.finish_reason.value == "stop" and "".join(e.text for e in events) == result.text
    )
    assert worker.join(10) and not worker.is_healthy


def test_a_closed_door_is_told_until_the_last_answer_is_out() -> None:
    worker = Worker(Bridge(Engine(ScriptedModel())), max_waiting=4)
    worker.start()

    async def drain() -> None:
        stream = await worker.submit([job("a", "a long story")])
        assert not worker.is_draining and not worker.is_drained
        worker.close()
        assert worker.is_draining
        for name in "bc":
            with pytest.raises(ApiError) as caught:
                await worker.submit([job(name)])
            error = caught.value
            assert error.status == 503 and error.headers() == {"retry-after": "5", "connection": "close"}
        while stream.missing:
            await stream.batch()
        assert worker.is_drained and worker.is_healthy  # the thread still answers
        with pytest.raises(ApiError):
            await worker.submit([job("d")])

    try:
        asyncio.run(drain())
    finally:  # or the thread would outlive a failure
        worker.stop()
        assert worker.join(10)


def test_an_engine_that_keeps_failing_is_not_healthy(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> list[StreamEvent]:
        raise RuntimeError("broken")

    step, worker.bridge.step = worker.bridge.step, fail  # type: ignore[method-assign]

    async def ask() -> None:
        with pytest.raises(ApiError) as caught:
            await collect(worker, job("a"))
        assert caught.value.status == 500
        for _ in range(100):
            if not worker.is_healthy:
                break
            await asyncio.sleep(0.02)
        assert not worker.is_healthy and worker.tally.faults >= MOST_FAULTS
        with pytest.raises(ApiError) as caught:
            await worker.submit([job("b")])
        assert caught.value.status == 503

    asyncio.run(ask())
    worker.bridge.step = step  # type: ignore[method-assign]


def test_whoever_leaves_while_waiting_for_the_answer_is_forgotten(worker: Worker) -> None:
    async def leave() -> None:
        task = asyncio.create_task(worker.submit([job("a", "never ends")]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if not await worker.call(lambda bridge: bridge.has_work):
                return
            await asyncio.sleep(0.01)
        pytest.fail("the job still runs")

    asyncio.run(leave())


def test_wishes_reach_the_engine() -> None:
    seen: list[dict[str, Any]] = []

    class Noted(Engine):
        def submit(self, prompt: Any, params: Any = None, **wishes: Any) -> str:
            seen.append({"structured_outputs": params.structured_outputs, **wishes})
            return super().submit(prompt, params, **wishes)

    bridge, asked = Bridge(Noted(ScriptedModel())), job("a")
    bridge.submit(asked)
    assert seen[0]["speculation"] is None and seen[0]["structured_outputs"] is None and seen[0]["scope"] == asked.scope
    plain = SpeculationParams(enabled=False)
    bridge.submit(
        replace(asked, id="b", scope="x", speculation=plain, structured_outputs={"regex": "a+"}, prediction="OK")
    )
    assert seen[1]["speculation"] == plain and seen[1]["structured_outputs"].regex == "a+"
    assert seen[1]["scope"] == "x" and seen[1]["prediction"] == "OK"
    with pytest.raises(SamplingError, match="regexx"):
        bridge.submit(replace(asked, id="c", structured_outputs={"regexx": "a+"}))
