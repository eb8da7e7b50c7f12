"""The engine's surface: requests in, events out, nothing lost and nobody hurt."""

from __future__ import annotations

import asyncio

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, PromptError, SamplingError
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason
from tests.engine.support import random_chains, table_model

LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def engine(**settings: object) -> Engine:
    config = EngineConfig.from_dict({"num_draft_tokens": 3, "schedule": "fixed", **settings})
    return Engine(table_model(), drafter=random_chains(1), config=config)


def test_events_join_to_the_result() -> None:
    events = list(engine().stream([1, 2], LONG))
    assert events[-1].result is not None
    assert [e.result for e in events[:-1]] == [None] * (len(events) - 1)
    assert tuple(token for e in events for token in e.token_ids) == events[-1].result.token_ids
    reports = [e.report for e in events]
    assert tuple(reports) == events[-1].result.steps
    assert reports[0] is not None and reports[0].is_prefill


def test_closing_a_stream_cancels_the_request() -> None:
    running = engine()
    stream = running.stream([1, 2], LONG)
    next(stream)
    stream.close()
    assert not running.has_work
    assert running.drafter is not None and not running.drafter.live  # type: ignore[attr-defined]


def test_two_streams_interleave_without_losing_events() -> None:
    running = engine()
    first, second = running.stream([1, 2], LONG), running.stream([3], LONG)
    got: dict[str, list[int]] = {}
    for _ in range(100):
        for stream in (first, second):
            event = next(stream, None)
            if event is not None:
                got.setdefault(event.id, []).extend(event.token_ids)
    assert {id: tuple(tokens) for id, tokens in got.items()} == {
        "request-0": engine().generate([[1, 2]], LONG)[0].token_ids,
        "request-1": engine().generate([[3]], LONG)[0].token_ids,
    }


def test_cancelled_while_running_keeps_what_it_has() -> None:
    running = engine()
    id = running.submit([1, 2], LONG)
    running.step()
    running.step()
    running.cancel(id)
    [event] = running.step()
    assert event.result is not None and event.result.finish_reason is FinishReason.CANCELLED
    assert len(event.result.token_ids) >= 2
    assert not running.has_work


def test_cancelled_while_waiting_has_an_empty_result() -> None:
    running = engine(max_batch_size=1)
    running.submit([1, 2], LONG, id="a")
    waiting = running.submit([1, 2], SamplingParams(max_tokens=5, temperature=1, n=2), id="b")
    running.step()
    running.cancel(waiting)
    results = [e.result for e in running.step() if e.id == "b"]
    assert [(r.index, r.token_ids, r.finish_reason) for r in results if r] == [
        (0, (), FinishReason.CANCELLED),
        (1, (), FinishReason.CANCELLED),
    ]


def test_cancelling_an_unknown_or_finished_request_does_nothing() -> None:
    running = engine()
    running.cancel("nobody")
    running.generate([[1]], LONG)
    running.cancel("request-0")
    assert running.generate([[1]], LONG)[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([99], "99 is outside"),
        ([-1], "-1 is outside"),
        ([1] * 5000, "5000 tokens"),
        ("text", "no tokenizer"),
        ([{"role": "user", "content": "x"}], "no tokenizer"),
    ],
)
def test_impossible_prompts_name_what_was_given(prompt: object, message: str) -> None:
    running = engine()
    with pytest.raises(PromptError, match=message):
        running.generate([[1], prompt], LONG)  # type: ignore[list-item]
    assert not running.has_work, "the good prompt beside it must not be left behind"
    assert len(running.generate([[1]], LONG)) == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=(7,)),
        SamplingParams(logit_bias={7: 1.0}),
        SamplingParams(bad_words_token_ids=[(1, 9)]),
        SamplingParams(stop=("x",)),
        SamplingParams(bad_words=("x",)),
    ],
)
def test_fields_that_the_target_cannot_honour_are_refused(params: SamplingParams) -> None:
    with pytest.raises(SamplingError):
        engine().submit([1], params)


def test_ids_are_unique_while_in_use() -> None:
    running = engine()
    running.submit([1], LONG, id="a")
    with pytest.raises(ConfigError, match="'a' is in use"):
        running.submit([1], LONG, id="a")


def test_as_many_params_as_prompts() -> None:
    with pytest.raises(ConfigError, match="2 prompts, 1 params"):
        engine().generate([[1], [2]], [LONG])
    with pytest.raises(ConfigError, match="list of prompts"):
        engine().generate("text", LONG)


def test_each_prompt_has_its_own_params() -> None:
    short, long = SamplingParams(max_tokens=2), LONG
    results = engine().generate([[1], [2]], [short, long], ids=["s", "l"])
    assert [(r.id, len(r.token_ids)) for r in results] == [("s", 2), ("l", 30)]


def test_a_later_turn_reads_only_what_is_new() -> None:
    prompt = [1, 2, 3, 4, 5] * 8
    running = engine()
    [first] = running.generate([prompt], LONG)
    turn = [*prompt, *first.token_ids, 6, 5, 4]
    [second] = running.generate([turn], LONG)
    assert second.steps[0].rows == 4, "the last committed token and the three new ones"
    [fresh] = engine(num_cached_prefixes=0).generate([turn], LONG)
    assert fresh.steps[0].rows == len(turn)
    assert second.token_ids == fresh.token_ids


def test_a_short_common_part_is_copied_and_the_rest_stays() -> None:
    running = engine()
    system = [1, 2, 3, 4, 5] * 4
    [first] = running.generate([[*system, *[6] * 60]], LONG)
    running.generate([[*system, 0, 0]], LONG)
    [again] = running.generate([[*system, *[6] * 60, *first.token_ids, 2]], LONG)
    assert again.steps[0].rows == 2


def test_prompts_are_read_in_chunks() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 0] * 5
    assert (
        engine(prefill_chunk=4).generate([prompt], LONG)[0].token_ids == engine().generate([prompt], LONG)[0].token_ids
    )


def test_timings_add_up() -> None:
    [result] = engine().generate([[1]], LONG)
    timing = result.timing
    parts = timing.prefill + timing.draft + timing.verify + timing.other
    assert 0 < parts <= timing.total


def test_results_become_json() -> None:
    [result] = engine().generate([[1]], SamplingParams(max_tokens=3, logprobs=2))
    out = result.to_json()
    assert out["usage"] == {"prompt_tokens": 1, "completion_tokens": 3}
    assert len(out["logprobs"]) == 3
    assert out["speculation"]["drafter"] == "random"
    assert set(out["timing_ms"]) == {"prefill", "draft", "verify", "other", "queue", "first_token", "total"}
    assert out["settings"]["engine"]["num_draft_tokens"] == 3


def test_many_async_streams_share_one_engine() -> None:
    async def main() -> list[tuple[int, ...]]:
        running = engine()
        results = await asyncio.gather(*(running.agenerate([token], LONG) for token in range(1, 6)))
        assert not running.has_work
        return [result.token_ids for [result] in results]

    alone = [engine().generate([[token]], LONG)[0].token_ids for token in range(1, 6)]
    assert asyncio.run(main()) == alone


def test_leaving_an_async_stream_cancels_it_and_hurts_nobody() -> None:
    async def main() -> tuple[int, ...]:
        running = engine()
        other = asyncio.create_task(running.agenerate([3], LONG))
        stream = running.astream([1], SamplingParams(max_tokens=4000, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        [result] = await other
        while running.has_work:
            await asyncio.sleep(0.001)
        return result.token_ids

    assert asyncio.run(asyncio.wait_for(main(), 30)) == engine().generate([[3]], LONG)[0].token_ids


def test_async_refuses_a_bad_prompt() -> None:
    async def main() -> None:
        await engine().agenerate([], LONG)

    with pytest.raises(PromptError):
        asyncio.run(main())
