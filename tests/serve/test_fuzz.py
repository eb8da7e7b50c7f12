"""Bodies of every kind: never a fault of the server, and afterwards it answers as before."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from benchmarks.http_fuzz import fuzz
from benchmarks.load.client import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.serve.protocol import ChatRequest, CompletionRequest
from outrider.serve.refused import REFUSED
from tests.serve.support import CLIENT, CLOCK, WEATHER, LiveServer, sse

NUMBERS = st.one_of(st.integers(-3, 200), st.floats(allow_nan=False, width=32), st.just(2**70))
TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["\ud800", "<|im_end|>", "\x00", "👩‍👩‍👧", "none", "auto", "self"])
)
JSON: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
ROLES = st.one_of(st.sampled_from(["user", "assistant", "system", "tool", "x"]), JSON)
FUNCTIONS = st.fixed_dictionaries({"name": st.one_of(TEXTS, JSON), "arguments": st.one_of(st.just('{"a": 1}'), JSON)})
CALLS = st.one_of(st.lists(st.fixed_dictionaries({"function": FUNCTIONS}), max_size=2), JSON)
# What a field may really be, so that many bodies get far.
LIKELY: dict[str, Any] = {
    "max_tokens": st.integers(1, 6),
    "max_completion_tokens": st.integers(1, 6),
    "temperature": st.sampled_from([0, 0.7, 1.5, 1e-300, 100]),
    "top_p": st.sampled_from([1e-300, 0.3, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 9, 2**40, 2**70]),
    "min_p": st.sampled_from([0, 0.2, 1]),
    "repetition_penalty": st.sampled_from([1e-300, 0.5, 1.3, 100]),
    "presence_penalty": st.sampled_from([-2, 2]),
    "n": st.integers(1, 3),
    "seed": st.integers(-5, 5),
    "stop": st.one_of(st.just("e"), st.lists(st.sampled_from(["a", "\n", "xy"]), max_size=2)),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=2),
    "logit_bias": st.dictionaries(st.sampled_from(["3", "70", "9999", "x"]), st.integers(-100, 100), max_size=2),
    "bad_words": st.lists(st.sampled_from(["a", "he", ""]), max_size=2),
    "logprobs": st.sampled_from([True, False, 0, 2]),
    "top_logprobs": st.integers(0, 3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "tools": st.sampled_from([[WEATHER], [WEATHER, CLOCK], []]),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "truncate_prompt_tokens": st.integers(-1, 9),
    "return_token_ids": st.booleans(),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": ROLES, "content": st.one_of(TEXTS, st.none(), JSON)},
            optional={"tool_calls": CALLS, "name": JSON, "tool_call_id": JSON},
        ),
        max_size=3,
    ),
    "prompt": st.one_of(TEXTS, st.lists(st.integers(-1, 280), max_size=4), st.lists(TEXTS, max_size=2)),
}
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED, "unknown", "ma\ud800x"})
FIELDS = st.sampled_from(NAMES).flatmap(
    lambda name: st.tuples(st.just(name), st.one_of(LIKELY.get(name, JSON), LIKELY.get(name, JSON), JSON))
)


@st.composite
def bodies(draw: Any) -> dict[str, Any]:
    kind = draw(st.sampled_from(["messages", "prompt"]))
    base = {kind: draw(LIKELY[kind]), "max_tokens": 3}
    return base | dict(draw(st.lists(FIELDS, max_size=5)))


@given(bodies(), st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
@settings(
    derandomize=True,
    deadline=None,
    max_examples=70,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def check(on: LiveServer, client: httpx.Client, body: dict[str, Any], path: str) -> None:
    raw = json.dumps(body).encode()
    response = client.post(on.url + path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (response.status_code, body, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error"), error
    elif response.headers["content-type"].startswith("text/event-stream"):
        *chunks, last = sse(response.text)
        assert last == "[DONE]" and not any("error" in chunk for chunk in chunks)
    else:
        usage = response.json()["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_no_body_makes_a_fault(on: LiveServer) -> None:
    before = on.chat("hello", temperature=0, max_tokens=8)["choices"]
    with httpx.Client(timeout=60) as client:
        check(on, client)  # type: ignore[call-arg]
        assert client.get(f"{on.url}/health").json() == {"status": "ok"}
    assert on.chat("hello", temperature=0, max_tokens=8)["choices"] == before
    assert on.service.worker.tally.faults == 0 and on.is_idle


@given(st.binary(max_size=60))
@settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_make_a_fault(scripted: LiveServer, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = CLIENT.post(f"{scripted.url}/v1/chat/completions", content=raw, headers=headers, timeout=20)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_bent_requests_fault_nothing(on: LiveServer) -> None:
    host, _, port = on.url.removeprefix("http://").partition(":")
    found = asyncio.run(fuzz(Client(host, int(port)), range(150), limit_s=20, every=75))
    assert found.problems == [] and found.statuses[200] > 20 and found.statuses[400] > 50
    assert on.service.worker.tally.faults == 0 and on.is_idle
