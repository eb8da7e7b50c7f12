"""The endpoints over a real connection, by hand and through the real ``openai`` client, with answers that are known."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from outrider.serve.auth import KeyRing
from outrider.serve.config import ServeConfig
from outrider.serve.tools import ToolParser
from tests.serve.support import CLIENT, CLOCK, EOS, SCRIPTS, TWO_CALLS, WEATHER, LiveServer, ScriptedModel, serving, sse

ASK = "weather in Oslo and the time in Lima"
TOOLS: Any = [WEATHER, CLOCK]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def client(scripted: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen within four seconds")


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def test_chat_through_the_client(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="table", messages=user("Reply with exactly: OK"), temperature=0)
    [choice] = reply.choices
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == ("OK", "stop", None)
    assert reply.usage is not None and reply.usage.completion_tokens == 3 and reply.object == "chat.completion"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3
    assert [model.id for model in client.models.list()] == ["table"] and client.models.retrieve("table").id == "table"


def test_completions_take_texts_and_token_ids(client: openai.OpenAI, scripted: LiveServer) -> None:
    head = scripted.engine.tokenizer.encode("<|im_start|>assistant\n")
    by_text = client.completions.create(model="table", prompt="<|im_start|>assistant\n")
    by_ids = client.completions.create(model="table", prompt=head)
    assert by_text.choices[0].text == by_ids.choices[0].text == "hello" and by_ids.choices[0].finish_reason == "stop"
    both = client.completions.create(model="table", prompt=["<|im_start|>assistant\n", "x"], n=2, temperature=1.0)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == ["hello", "hello", "", ""]
    assert both.usage is not None and both.usage.prompt_tokens == len(head) + 1


@pytest.mark.parametrize("prompt", ["Reply with exactly: OK", "say 日本語", "a long story"])
def test_streams_join_to_the_whole_text(scripted: LiveServer, prompt: str) -> None:
    whole = scripted.chat(prompt, temperature=0)
    body = {"messages": user(prompt), "temperature": 0, **USAGE}
    *chunks, usage, done = sse(scripted.post("/v1/chat/completions", body).text)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    [script] = [text for key, text in SCRIPTS.items() if key in prompt]
    assert text == whole["choices"][0]["message"]["content"] == script and "\ufffd" not in text
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert done == "[DONE]" and usage["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == whole["usage"][name]
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


def test_what_was_drafted_is_told(scripted: LiveServer) -> None:
    body = {
        "messages": user("a long story"),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_steps": True},
    }
    scripted.post("/v1/chat/completions", body)  # suffix decoding knows the text from now on
    *chunks, _ = sse(scripted.post("/v1/chat/completions", body).text)
    pieces = [piece for chunk in chunks for piece in chunk.get("outrider", {"pieces": []})["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == SCRIPTS["long story"]
    assert {piece["kind"] for piece in pieces} >= {"plain", "draft", "bonus"}
    steps = [chunk["outrider"]["step"] for chunk in chunks if "outrider" in chunk]
    assert steps[0]["is_prefill"] and steps[0]["drafted"] == 0
    numbers = chunks[-1]["metrics"]["speculative_decoding"]
    assert numbers["num_accepted_draft_tokens"] == sum(step["accepted"] for step in steps) > 50
    assert (
        numbers["num_spec_steps"]
        == sum(numbers["acceptance_histogram"])
        == sum(bool(step["drafter"]) for step in steps)
    )
    assert len(numbers["acceptance_histogram"]) == numbers["num_spec_tokens"] + 1 == 9
    kept = sum(length * count for length, count in enumerate(numbers["acceptance_histogram"]))
    assert kept == numbers["num_accepted_draft_tokens"]
    assert numbers["mean_acceptance_length"] == 1 + kept / numbers["num_spec_steps"]


def test_tool_calls_through_the_client(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="table", messages=user(ASK), tools=TOOLS, temperature=0)
    [choice] = reply.choices
    calls: Any = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Oslo", "days": [1, 2]}),
        ("clock", {"city": "Lima"}),
    ]
    assert len({call.id for call in calls}) == 2
    names, arguments, content = {}, {0: "", 1: ""}, ""
    reasons = []
    for chunk in client.chat.completions.create(
        model="table", messages=user(ASK), tools=TOOLS, temperature=0, stream=True
    ):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for call in delta.tool_calls or ():
            if call.function.name is not None:
                assert call.index not in names and call.id and call.type == "function"
                names[call.index] = call.function.name
            arguments[call.index] += call.function.arguments or ""
    assert names == {0: "weather", 1: "clock"} and content == "Let me see."
    assert [arguments[0], arguments[1]] == [call.function.arguments for call in calls]
    assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_what_is_done_about_tools(scripted: LiveServer) -> None:
    broken = scripted.chat("broken call", tools=TOOLS, temperature=0)["choices"][0]
    assert broken["message"]["content"] == SCRIPTS["broken call"] and broken["finish_reason"] == "stop"
    assert "tool_calls" not in broken["message"]
    one = scripted.chat(ASK, tools=TOOLS, temperature=0, parallel_tool_calls=False)["choices"][0]["message"]
    assert [call["function"]["name"] for call in one["tool_calls"]] == ["weather"]
    none = scripted.chat(ASK, tools=TOOLS, temperature=0, tool_choice="none")
    assert none["choices"][0]["message"]["content"] == TWO_CALLS
    assert none["usage"]["prompt_tokens"] == scripted.chat(ASK, temperature=0)["usage"]["prompt_tokens"]
    history = [
        *user(ASK),
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"},
    ]  # fmt: skip
    answered = scripted.post("/v1/chat/completions", {"messages": history, "tools": TOOLS, "max_tokens": 4})
    assert answered.status_code == 200


@pytest.mark.parametrize("prompt", [ASK, "broken call", "say 日本語"])
def test_a_length_limit_in_the_middle_of_anything(scripted: LiveServer, prompt: str) -> None:
    """Streamed and whole agree at every cut: text, calls, reason, usage."""
    for most in (1, 9, 40, 77):
        fields = {"messages": user(prompt), "tools": TOOLS, "temperature": 0, "max_tokens": most}
        whole = scripted.post("/v1/chat/completions", fields).json()
        *chunks, usage, _ = sse(scripted.post("/v1/chat/completions", {**fields, **USAGE}).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        message = whole["choices"][0]["message"]
        assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
        arguments: dict[int, str] = {}
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
        assert list(arguments.values()) == [c["function"]["arguments"] for c in message.get("tool_calls", ())]
        assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == most


def test_logprobs_and_token_ids(client: openai.OpenAI, scripted: LiveServer) -> None:
    fields: Any = {"model": "table", "messages": user("say 日本語"), "temperature": 0, "max_tokens": 12}
    fields |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.create(**fields)
    entries: Any = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert len(entries) == 12 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.token == entry.top_logprobs[0].token for entry in entries)
    assert bytes(byte for entry in entries for byte in entry.bytes) == "日本語テ".encode()
    assert entries[0].token == "\\xe6"
    streamed, ids = [], []
    for chunk in client.chat.completions.create(**fields, stream=True):
        said: Any = chunk.choices[0]
        streamed += said.logprobs.content if said.logprobs else []
        ids += getattr(said, "token_ids", [])
    assert streamed == entries and ids == whole.choices[0].token_ids  # type: ignore[attr-defined]
    assert whole.prompt_token_ids == scripted.engine.tokenizer.encode_chat(user("say 日本語"))  # type: ignore[attr-defined]
    bare = scripted.chat("say 日本語", temperature=0, max_tokens=3, logprobs=True, top_logprobs=0)
    assert [entry["top_logprobs"] for entry in bare["choices"][0]["logprobs"]["content"]] == [[], [], []]


def test_logprobs_of_completions(scripted: LiveServer) -> None:
    body = {"prompt": "<|im_start|>assistant\n", "logprobs": 1, "temperature": 0}
    whole = scripted.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["hell", "o", "<|im_end|>"] and whole["text_offset"] == [0, 4, 5]
    assert [list(top) for top in whole["top_logprobs"]] == [["hell"], ["o"], ["<|im_end|>"]]
    *chunks, _ = sse(scripted.post("/v1/completions", {**body, "stream": True}).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: [value for part in parts for value in part[name]] for name in whole} == whole


def test_many_choices_stream_side_by_side(scripted: LiveServer) -> None:
    body = {"messages": user("a long story"), "n": 3, "temperature": 1.0, "seed": 1, **USAGE}
    *chunks, usage, _ = sse(scripted.post("/v1/chat/completions", body).text)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == SCRIPTS["long story"]
        assert own[0]["delta"]["role"] == "assistant" and own[-1]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == 3 * (len(SCRIPTS["long story"].encode()) + 1 - _merged_bytes())


def _merged_bytes() -> int:
    """Tokens that the tokenizer's merges save in the story."""
    model = ScriptedModel()
    return len(SCRIPTS["long story"].encode()) - len(model.tokenizer.encode(SCRIPTS["long story"]))


def test_async_requests_side_by_side(scripted: LiveServer) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
            prompts = ["Reply with exactly: OK", "a long story", "anything"] * 4
            replies = await asyncio.gather(
                *(client.chat.completions.create(model="table", messages=user(p), temperature=0) for p in prompts)
            )
            return [reply.choices[0].message.content for reply in replies]

    assert asyncio.run(ask()) == ["OK", SCRIPTS["long story"], "hello"] * 4


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "tabel"}, 404, "model", "'table'"),
        ({"top_p": 2}, 400, "top_p", "at most 1"),
        ({"temperature": 0, "n": 2}, 400, "n", "temperature 0"),
        ({"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens", "max_tokens (3)"),
        ({"max_tokens": 0}, 400, "max_tokens", "1 or more"),
        ({"max_tokens": 9000}, 400, "max_tokens", "does not fit"),
        ({"stop_token_ids": [99999]}, 400, None, "99999"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "token ids"),
        ({"n": 128, "temperature": 1, "prompt": "x"}, 400, "prompt", "unknown"),
        ({"messages": []}, 400, "messages", "no messages"),
        ({"messages": [{"role": "usr", "content": "x"}]}, 400, "messages[0].role", "did you mean 'user'"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, 400, "messages[0].name", "template"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, 400, "messages[0].role", "unknown"),
        ({"messages": [{"role": "user", "contents": "x"}]}, 400, "messages[0].contents", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "image_url"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "messages", "window"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "surrogate"),
    ],
)
def test_refusals_name_the_field(
    scripted: LiveServer, fields: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    response = scripted.post("/v1/chat/completions", {"messages": user("x"), **fields})
    error = response.json()["error"]
    assert response.status_code == status and words in error["message"], error
    assert param is None or error["param"] == param
    assert "Traceback" not in response.text and response.headers["x-request-id"]


def test_wishes_of_our_own_are_honoured_or_refused_by_name(scripted: LiveServer) -> None:
    fields: dict[str, Any] = {
        "speculation": {"enabled": False},
        "structured_outputs": {"choice": ["OK"]},
        "prediction": {"type": "content", "content": "OK"},
    }
    for name, value in fields.items():
        response = scripted.post("/v1/chat/completions", {"messages": user("Reply with exactly: OK"), name: value})
        assert response.status_code == 200, response.text
    wrong = {
        "speculation.drafter": {"speculation": {"drafter": "nobody"}},
        "structured_outputs": {"structured_outputs": {"regexx": "a"}},
    }
    for param, body in wrong.items():
        response = scripted.post("/v1/chat/completions", {"messages": user("x"), **body})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param, error


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_can_be_forced(scripted: LiveServer, choice: Any) -> None:
    place = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    closed = {**place, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": closed}} for name in ("weather", "clock")]
    body = {"messages": user("anything"), "tools": tools, "tool_choice": choice, "max_tokens": 150}
    body |= {"temperature": 0, "parallel_tool_calls": False}
    response = scripted.post("/v1/chat/completions", body)
    said = response.json()["choices"][0]
    [call] = said["message"]["tool_calls"]
    assert call["function"]["name"] in ("weather", "clock") if choice == "required" else ("weather",)
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"} and said["finish_reason"] == "tool_calls"
    both = scripted.post("/v1/chat/completions", {**body, "response_format": {"type": "json_object"}})
    assert both.status_code == 400 and both.json()["error"]["param"] == "tool_choice"


def test_errors_through_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        client.chat.completions.create(model="table", messages=user("x"), top_p=3)
    assert caught.value.param == "top_p" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=user("x"))


def test_paths_methods_and_bodies(scripted: LiveServer) -> None:
    get = CLIENT.get(f"{scripted.url}/v1/chat/completion")
    assert get.status_code == 404 and "/v1/chat/completions" in get.json()["error"]["message"]
    assert CLIENT.get(f"{scripted.url}/v1/completions").status_code == 405
    assert CLIENT.post(f"{scripted.url}/v1/completions", content=b"{}").status_code == 415
    broken = CLIENT.post(f"{scripted.url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_json"
    assert CLIENT.get(f"{scripted.url}/health").json() == {"status": "ok"}
    named = scripted.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1" and named.json()["id"] == "cmpl-mine-1"
    assert CLIENT.get(f"{scripted.url}/health", headers={"host": "evil.example"}).status_code == 403


def test_the_end_of_a_prompt_is_kept(scripted: LiveServer) -> None:
    head = scripted.engine.tokenizer.encode("<|im_start|>assistant\n")
    body = {"prompt": [9] * 20 + head, "truncate_prompt_tokens": len(head), "return_token_ids": True}
    choice = scripted.post("/v1/completions", body).json()["choices"][0]
    assert choice["prompt_token_ids"] == head and choice["text"] == "hello" and choice["token_ids"][-1] == EOS


def test_metrics_and_status(scripted: LiveServer) -> None:
    scripted.chat("a long story", temperature=0)
    scripted.chat("a long story", temperature=0)
    text = CLIENT.get(f"{scripted.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = 'engine="0",model_name="table"'

    def value(name: str, more: str = "") -> float:
        found = [float(v) for key, v in values.items() if key.startswith(name + "{") and more in key]
        assert len(found) == 1, (name, more, [key for key in values if key.startswith(name)])
        return found[0]

    assert labels.split(",")[0] in text
    drafted, accepted = (
        value("vllm:spec_decode_num_draft_tokens_total"),
        value("vllm:spec_decode_num_accepted_tokens_total"),
    )
    assert drafted >= accepted > 50 and value("vllm:spec_decode_num_drafts_total") > 5
    by_position = [
        float(v) for k, v in values.items() if k.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(by_position) == accepted and value("vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"')
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    assert value("vllm:time_to_first_token_seconds_bucket", 'le="+Inf"') == value(
        "vllm:time_to_first_token_seconds_count"
    )
    assert value("vllm:kv_cache_usage_perc") >= 0 and value("vllm:num_preemptions_total") == 0
    per_token = "vllm:request_time_per_output_token_seconds"
    assert 0 < value(f"{per_token}_sum") < 60 * value(f"{per_token}_count")
    assert value(f"{per_token}_count") <= value("vllm:e2e_request_latency_seconds_count")
    assert value("outrider_http_requests_total", 'path="/v1/chat/completions",status="200"') >= 2
    status = CLIENT.get(f"{scripted.url}/outrider/status").json()
    assert status["load"]["running"] == 0 and status["speculation"]["accepted"] == accepted
    assert sum(status["planner"]["draft_tokens_chosen"].values()) >= status["load"]["passes"] > 0


def test_a_client_that_goes_away_frees_its_place(scripted: LiveServer) -> None:
    cancelled = scripted.service.worker.tally.cancelled
    body = {"messages": user("never ends"), "temperature": 0, "stream": True}
    with CLIENT.stream("POST", f"{scripted.url}/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: scripted.service.worker.tally.cancelled == cancelled + 1)
    with pytest.raises(httpx.ReadTimeout):
        CLIENT.post(f"{scripted.url}/v1/chat/completions", json={**body, "stream": False}, timeout=0.2)
    wait_until(lambda: scripted.service.worker.tally.cancelled == cancelled + 2)
    wait_until(lambda: scripted.is_idle)
    assert scripted.chat("Reply with exactly: OK")["choices"][0]["message"]["content"] == "OK"


def test_keys_open_the_server() -> None:
    keys = KeyRing([("ann", "secret-of-ann"), ("bob", "secret-of-bob")])
    with serving(ScriptedModel(), keys=keys) as server:
        assert CLIENT.get(f"{server.url}/health").status_code == CLIENT.get(server.url).status_code == 200
        for path in ("/metrics", "/outrider/status", "/v1/models", "/nowhere"):
            assert CLIENT.get(server.url + path).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-of-eve", max_retries=0).models.list()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-of-bob", max_retries=0)
        assert client.chat.completions.create(model="table", messages=user("x")).choices[0].message.content == "hello"
        # With keys a name of the host is no way in, so proxies may use their own.
        named = {"host": "api.example", "authorization": "Bearer secret-of-ann"}
        assert CLIENT.get(f"{server.url}/v1/models", headers=named).status_code == 200


def test_limits() -> None:
    config = ServeConfig(
        port=0, max_waiting=1, request_timeout_s=0.4, max_body_bytes=2048, max_prompt_tokens=90, max_choices=2
    )
    with serving(SlowModel(), config=config) as server:
        large = server.post("/v1/completions", {"prompt": "x" * 3000})
        assert large.status_code == 413 and "2048" in large.json()["error"]["message"]
        chunked = CLIENT.post(
            f"{server.url}/v1/completions",
            content=iter([b" " * 1500] * 2),
            headers={"content-type": "application/json"},
        )
        assert chunked.status_code == 413
        assert "at most 90" in server.post("/v1/completions", {"prompt": "x" * 100}).json()["error"]["message"]
        many = server.post("/v1/completions", {"prompt": ["x", "y"], "n": 2, "temperature": 1}).json()["error"]
        assert many["param"] == "n" and "at most 2" in many["message"]
        late = server.post("/v1/chat/completions", {"messages": user("never ends"), "temperature": 0})
        assert late.status_code == 408 and late.headers["x-should-retry"] == "false" and "0.4 s" in late.text
        stream = server.post("/v1/chat/completions", {"messages": user("never ends"), "temperature": 0, "stream": True})
        *chunks, last = sse(stream.text)
        assert chunks and last["error"]["code"] == "timeout"
        wait_until(lambda: server.is_idle)


class SlowModel(ScriptedModel):
    """Takes ten milliseconds a pass."""

    def forward(self, rows: Any, cache: Any, *, taps: Any = ()) -> Any:
        time.sleep(0.01)
        return super().forward(rows, cache, taps=taps)


def test_a_full_queue_says_when_to_come_back() -> None:
    from outrider.engine.config import EngineConfig

    config = ServeConfig(port=0, max_waiting=2)
    with serving(SlowModel(), engine=EngineConfig(max_batch_size=1), config=config) as server:

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=60) as client:
                body = {"messages": user("a long story"), "temperature": 0, "max_tokens": 30}
                posts = (client.post(f"{server.url}/v1/chat/completions", json=body) for _ in range(12))
                return await asyncio.gather(*posts)

        replies = asyncio.run(ask())
        refused = [reply for reply in replies if reply.status_code == 429]
        assert {reply.status_code for reply in replies} == {200, 429} and len(refused) >= 6
        for reply in refused:
            assert int(reply.headers["retry-after"]) >= 1 and reply.json()["error"]["type"] == "rate_limit_error"
        texts = {reply.json()["choices"][0]["message"]["content"] for reply in replies if reply.status_code == 200}
        assert len(texts) == 1


def test_a_fault_of_the_engine_is_500_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(ScriptedModel):
        is_broken = False

        def forward(self, rows: Any, cache: Any, *, taps: Any = ()) -> Any:
            if self.is_broken:
                self.is_broken = False
                raise RuntimeError("secret inside")
            return super().forward(rows, cache, taps=taps)

    target = Faulty()
    with serving(target) as server:
        target.is_broken = True
        response = server.post("/v1/completions", {"prompt": "x"})
        assert response.status_code == 500 and "secret inside" not in response.text
        assert response.json()["error"]["type"] == "server_error" and "secret inside" in caplog.text
        assert server.chat("Reply with exactly: OK")["choices"][0]["message"]["content"] == "OK"
        assert CLIENT.get(f"{server.url}/health").json() == {"status": "ok"}


def test_the_parser_of_the_server_is_the_one_that_was_tested(scripted: LiveServer) -> None:
    from outrider.serve.protocol import ChatRequest, parse_body

    raw = json.dumps({"messages": user("x"), "tools": TOOLS, "parallel_tool_calls": False}).encode()
    parser = scripted.service._tool_parser(parse_body(raw, ChatRequest))
    assert isinstance(parser, ToolParser) and not parser._is_parallel and parser._style == "tags"
