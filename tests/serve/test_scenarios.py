"""Acceptance scenarios over HTTP, streamed and not: a server with speculation answers as one without.

In float32, on a tiny random model drafted by an int8 copy of itself, and on the real model where the point is the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from benchmarks.wire.tool_chat import TOOLS, tool_chat

from outrider.drafters.build import make_drafter
from outrider.models.load import load_target
from tests.serve.support import CLIENT, LiveServer, serving, sse

COPY = "Repeat exactly, 5 times: I will never miss any tokens."


def whole(server: LiveServer, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    """Status and what of the response does not tell the time."""
    response = server.post(path, body)
    out = response.json()
    if response.status_code != 200:
        return {"status": response.status_code, "error": out["error"]}
    usage = {name: out["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"status": 200, "choices": out["choices"], "usage": usage}


def streamed(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    """The same, put together from a stream."""
    response = server.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    if response.status_code != 200:
        return {"status": response.status_code, "error": response.json()["error"]}
    *chunks, last, done = sse(response.text)
    assert done == "[DONE]" and last["choices"] == []
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        [said] = chunk["choices"]
        choice = choices.setdefault(said["index"], {"text": "", "entries": [], "ids": [], "reasons": []})
        choice["text"] += said["delta"].get("content") or ""
        choice["entries"] += (said["logprobs"] or {"content": []})["content"]
        choice["ids"] += said.get("token_ids", [])
        choice["reasons"] += [said["finish_reason"]] if said["finish_reason"] else []
    out = []
    for index, choice in sorted(choices.items()):
        [reason] = choice["reasons"]
        made: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": choice["text"], "refusal": None},
            "logprobs": {"content": choice["entries"], "refusal": None} if body.get("logprobs") else None,
            "finish_reason": reason,
        }
        out.append(made | ({"token_ids": choice["ids"]} if body.get("return_token_ids") else {}))
    usage = {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"status": 200, "choices": out, "usage": usage}


def asked(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "return_token_ids": True, **fields}


def same(off: LiveServer, on: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    """Four answers that must be one."""
    plain = whole(off, body)
    assert whole(on, body) == plain
    assert streamed(on, body) == plain
    return plain


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("top", [0, 3])
def test_s5_logprobs(off: LiveServer, on: LiveServer, sampling: dict[str, Any], top: int) -> None:
    body = asked(COPY, max_tokens=24, logprobs=True, top_logprobs=top, ignore_eos=True, **sampling)
    plain, drafted = whole(off, body), whole(on, body)
    assert streamed(on, body) == drafted
    own, other = (reply["choices"][0]["logprobs"]["content"] for reply in (plain, drafted))
    assert len(own) == len(other) == plain["usage"]["completion_tokens"] == 24
    assert [entry["token"] for entry in own] == [entry["token"] for entry in other]
    for left, right in zip(own, other, strict=True):
        assert abs(left["logprob"] - right["logprob"]) < 1e-3 and left["logprob"] < 0
        listed = [entry["token"] for entry in right["top_logprobs"]]
        assert (right["token"] in listed and len(listed) >= top) if top else listed == []


def test_s6_max_tokens_and_n(off: LiveServer, on: LiveServer) -> None:
    longest = whole(off, asked(COPY, max_tokens=20, ignore_eos=True))["choices"][0]["token_ids"]
    for most in (1, 2, 7, 8, 9, 10, 20):  # around one and two steps of eight drafts
        plain = same(off, on, asked(COPY, max_tokens=most, ignore_eos=True))
        assert plain["usage"]["completion_tokens"] == most and plain["choices"][0]["finish_reason"] == "length"
        assert plain["choices"][0]["token_ids"] == longest[:most]
    for most in (0, -1):
        assert same(off, on, asked(COPY, max_tokens=most))["error"]["param"] == "max_tokens"
    many = same(off, on, asked(COPY, max_tokens=9, n=3, temperature=0.8, seed=7, ignore_eos=True))
    texts = [choice["message"]["content"] for choice in many["choices"]]
    assert len(texts) == 3 and len(set(texts)) > 1 and many["usage"]["completion_tokens"] == 27
    assert same(off, on, asked(COPY, n=3))["error"]["param"] == "n"


def test_s7_stops_in_mid_run(off: LiveServer, on: LiveServer) -> None:
    output = whole(off, asked(COPY, max_tokens=40, ignore_eos=True))["choices"][0]["token_ids"]
    tried = 0
    for count in range(1, 19):
        token = output[count - 1]
        if token in output[: count - 1]:
            continue
        tried += 1
        plain = same(off, on, asked(COPY, max_tokens=40, ignore_eos=True, stop_token_ids=[token]))
        assert plain["usage"]["completion_tokens"] == count and plain["choices"][0]["finish_reason"] == "stop"
    assert tried >= 4
    token = output[4]
    body = asked(COPY, max_tokens=40, ignore_eos=True, stop_token_ids=[token], min_tokens=30)
    assert same(off, on, body)["usage"]["completion_tokens"] >= 30


ODD: list[dict[str, Any]] = [
    *({"prompt": text} for text in ("", " ", "a", "\n", "<|im_end|>", "You are", [5] * 300, [1, 2, 3], [])),
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}]},
]


@pytest.mark.parametrize("body", ODD, ids=lambda body: str(body)[:40])
def test_s11_odd_prompts(off: LiveServer, on: LiveServer, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    asked_for = {**body, "temperature": 0, "max_tokens": 4}
    plain, drafted = whole(off, asked_for, path), whole(on, asked_for, path)
    assert plain == drafted and plain["status"] in (200, 400)
    assert CLIENT.get(f"{on.url}/health").status_code == 200


@pytest.fixture(scope="module")
def real(real_target_f32: Any) -> Iterator[tuple[LiveServer, LiveServer]]:
    """The real model without and with speculation. One is idle while the other works."""
    with serving(real_target_f32) as off, serving(real_target_f32, make_drafter("ngram", real_target_f32)) as on:
        yield off, on


@pytest.mark.real_model
def test_s8_on_the_real_model(real: tuple[LiveServer, LiveServer]) -> None:
    off, on = real
    for prompt in ("Reply with exactly: OK", "Repeat: 日本語テスト 👩‍👩‍👧 é ﷽"):
        body = asked(prompt, max_tokens=8)
        plain = whole(off, body)
        assert streamed(on, body) == plain
        text = plain["choices"][0]["message"]["content"]
        assert text and "\ufffd" not in text.rstrip("\ufffd")  # a limit may cut the last character


def told(server: LiveServer, body: dict[str, Any], *, is_streamed: bool) -> tuple[Any, ...]:
    """Text, calls and reason of an answer with tools, through the real client."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    if not is_streamed:
        choice = client.chat.completions.create(model=server.service.model_name, **body).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        return choice.message.content or "", calls, choice.finish_reason
    text, found, ids, reasons = "", dict[int, list[str]](), set[str](), list[str]()
    for chunk in client.chat.completions.create(model=server.service.model_name, stream=True, **body):
        [said] = chunk.choices
        text += said.delta.content or ""
        reasons += [said.finish_reason] if said.finish_reason else []
        for call in said.delta.tool_calls or ():
            if call.index not in found:
                assert call.index == len(found) and call.type == "function" and call.id not in ids
                ids.add(call.id)
                found[call.index] = [call.function.name, ""]
            found[call.index][1] += call.function.arguments
    [reason] = reasons
    return text, [(name, arguments) for name, arguments in found.values()], reason


@pytest.fixture(scope="module")
def real_with_tools() -> Iterator[tuple[LiveServer, LiveServer]]:
    """The real model on the path that users meet, which is the fastest, without and with speculation."""
    target = load_target("smollm2-135m-instruct", dtype="int8", device="cpu", tool_rendering="system")
    with serving(target) as off, serving(target, make_drafter("suffix", target)) as on:
        yield off, on


@pytest.mark.real_model
def test_s9_on_the_real_model(real_with_tools: tuple[LiveServer, LiveServer]) -> None:
    """A call of the model's own will, and one that is asked for."""
    off, on = real_with_tools
    chat = tool_chat("weather in Oslo?")
    free = {"messages": chat, "tools": list(TOOLS), "temperature": 0, "max_tokens": 40}
    forced = {**free, "messages": chat[-1:], "tool_choice": "required", "parallel_tool_calls": False}
    for body in (free, forced):
        plain = told(off, body, is_streamed=False)
        assert told(on, body, is_streamed=False) == told(on, body, is_streamed=True) == plain
        text, [(name, arguments)], reason = plain
        assert (text, reason) == ("", "tool_calls") and name in ("weather", "clock")
        assert list(json.loads(arguments)) == ["city"], arguments


@pytest.mark.real_model
def test_copying_is_drafted_on_the_real_model(real: tuple[LiveServer, LiveServer]) -> None:
    off, on = real
    body = {"messages": asked("Repeat exactly: one two three, one two three, one two three")["messages"]}
    body |= {"temperature": 0, "max_tokens": 14}
    plain, drafted = (server.post("/v1/chat/completions", body).json() for server in (off, on))
    assert plain["choices"] == drafted["choices"] and plain["metrics"]["speculative_decoding"] is None
    numbers = drafted["metrics"]
    assert numbers["speculative_decoding"]["num_accepted_draft_tokens"] > 2
    assert numbers["outrider"]["tokens_per_pass"] > 1.1
