"""The scenarios over HTTP on a tiny random model: the scripts' own functions, small, with a drafter and without one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.http_scenarios import SCENARIOS, run_scenario
from benchmarks.load.client import Answer, Client
from benchmarks.wire import asking
from benchmarks.wire.asking import Ask, Library, compare
from benchmarks.wire.replies import read_reply
from benchmarks.wire.setup import SMALL, Wire

from outrider import SamplingParams
from tests.serve.support import CLOCK, LiveServer

SIZES = replace(SMALL, num_tokens=20, max_tokens=10, num_repeats=1, story_tokens=12, laws=())
ROWS = [{"messages": [{"role": "user", "content": "What is the weather?"}], "tools": [CLOCK]}]


@pytest.fixture(scope="module")
def library(tiny_target: Any) -> Library:
    return Library(tiny_target)


def wire_of(server: LiveServer, library: Library, drafter: str) -> Wire:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return Wire(client=Client(host, int(port)), library=library, sizes=SIZES, drafter=drafter, rows=ROWS)


NAMES = ("S2", "S3", "S4", "S5", "S6", "S7", "S9", "S10", "mates", "leaving", "prefixes", "wishes", "refusals")


@pytest.mark.parametrize("name", NAMES)
def test_scenarios_hold_on_a_tiny_model(on: LiveServer, library: Library, name: str) -> None:
    entry = asyncio.run(run_scenario(name, wire_of(on, library, "self")))
    assert entry["verdict"] == "passed", entry


def test_scenarios_hold_without_a_drafter(off: LiveServer, library: Library) -> None:
    wire = wire_of(off, library, "none")
    for name in ("S3", "wishes"):
        entry = asyncio.run(run_scenario(name, wire))
        assert entry["verdict"] == "passed", entry
    assert set(NAMES) < set(SCENARIOS)


def test_a_tie_is_told_from_another_answer(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    each = Ask(prompt="hello", params=SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2))
    [[plain]] = library.results([each])
    assert plain.logprobs is not None
    second = plain.logprobs[3].top[1][0]
    other = [*plain.token_ids[:3], second]
    path = library.target.spec.path
    monkeypatch.setattr(asking, "TIES", {path: 100.0})
    assert library.is_tie(each, other) and not library.is_tie(each, plain.token_ids)
    assert not library.is_tie(replace(each, params=replace(each.params, temperature=1.0, seed=1)), other)
    monkeypatch.setattr(asking, "TIES", {path: 0.0})
    assert not library.is_tie(each, other)
    monkeypatch.setattr(asking, "TIES", {})
    assert not library.is_tie(each, other)


def test_a_scenario_that_does_not_hold_says_what_differs(on: LiveServer, library: Library) -> None:
    wire = wire_of(on, library, "self")
    each = Ask(prompt="hello", params=SamplingParams(max_tokens=6, ignore_eos=True))
    [[plain]] = library.results([each])
    told = [*plain.token_ids[:3], 7, *plain.token_ids[4:]]
    lying = replace(plain, token_ids=tuple(told))
    with pytest.raises(AssertionError, match="tokens differ from position 3 on"):
        compare(read_reply(asyncio.run(wire.client.post(each.path, each.body()))), [lying])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {}\n\n", "does not end"),
        ('data: {"choices": []}\n\ndata: [DONE]\n\n', "no usage"),
    ],
)
def test_a_stream_of_another_form_is_refused(text: str, words: str) -> None:
    answer = Answer(status=200, body=None, seconds=0.1, headers={"content-type": "text/event-stream"}, text=text)
    with pytest.raises(AssertionError, match=words):
        read_reply(answer)
