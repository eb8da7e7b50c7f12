"""Every field is honoured or refused by name."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from outrider.serve import protocol
from outrider.serve.errors import ApiError
from outrider.serve.protocol import ChatRequest, CompletionRequest, parse_body
from outrider.serve.refused import REFUSED
from outrider.serve.sampling import constraint_of, most_tokens, sampling_of
from tests.serve.support import CLOCK, WEATHER

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}


def refusal(body: Any, kind: Any = ChatRequest) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse_body(raw, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"prompt": "x"}, "prompt", "/v1/completions"),
        ({"top_logprobs": 3}, None, "top_logprobs belongs to logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"logprobs": 3}, "logprobs", "bool"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, "max_tokens and max_completion_tokens differ"),
        ({"max_tokens": "7"}, "max_tokens", "integer"),
        ({"max_tokens": 7.0}, "max_tokens", "integer"),
        ({"temperature": True}, "temperature", "number"),
        ({"n": 0}, "n", "1"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options belongs to stream"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag", "include_usage"),
        ({"tool_choice": "required"}, None, "tool_choice needs tools"),
        ({"tools": [WEATHER, WEATHER]}, None, "two functions of one name"),
        (
            {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": 1}}]},
            "tools[0].function.strict",
            "boolean",
        ),
        ({"tools": [{**WEATHER, "function": {"nam": "x"}}]}, "tools[0].function", "nam"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            None,
            "a function that tools does not hold",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            None,
            "response_format and structured_outputs are both given",
        ),
        ({"speculation": {"enabled": False, "num_draft_tokens": 3}}, "speculation", "enabled is false"),
        ({"speculation": {"num_draft_tokens": 129}}, "speculation.num_draft_tokens", "128"),
        ({"speculation": {"k": 3}}, "speculation.k", "num_draft_tokens"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content", "string"),
        ({"messages": "hi"}, "messages", "list"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], param: str | None, words: str) -> None:
    error = refusal({**CHAT, **fields})
    assert words in error.message, error.message
    if param is not None:
        assert error.param is not None and error.param.startswith(param), (error.param, error.message)


def test_a_missing_field_is_named() -> None:
    assert refusal({}).param == "messages" and "missing" in refusal({}).message
    assert refusal({}, CompletionRequest).param == "prompt"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_known_fields_that_are_not_honoured(name: str) -> None:
    for kind, base in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        error = refusal({**base, name: {"anything": 1}}, kind)
        assert error.param == name and name in error.message and error.code == "unsupported_field"
        for harmless in (None, *REFUSED[name][0]):
            parse_body(json.dumps({**base, name: harmless}).encode(), kind)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "object"),
        (b"{", "not JSON"),
        (b'{"messages": [], "temperature": NaN}', "NaN"),
        (b'{"messages": [], "temperature": -Infinity}', "Infinity"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"messages": ' + b"[" * 100_000, "deep"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_bodies_that_are_no_json(raw: bytes, words: str) -> None:
    assert words in refusal(raw).message


def test_sampling_fields_arrive_under_their_names() -> None:
    given = {
        "top_k": 5, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.2, "bad_words": ["x"], "min_tokens": 2, "stop_token_ids": [7], "ignore_eos": True,
        "seed": 3, "n": 2, "temperature": 0.5, "logprobs_mode": "processed",
    }  # fmt: skip
    raw = json.dumps(
        {**CHAT, **given, "logit_bias": {"4": -5}, "stop": ["a", "b"], "logprobs": True, "top_logprobs": 2}
    )
    params = sampling_of(parse_body(raw.encode(), ChatRequest), max_tokens=9)
    for name, value in given.items():
        assert getattr(params, name) == value, name
    assert (
        params.logit_bias == {4: -5} and params.stop == ["a", "b"] and params.logprobs == 2 and params.max_tokens == 9
    )
    plain = sampling_of(parse_body(json.dumps(TEXT).encode(), CompletionRequest), max_tokens=9)
    assert plain.temperature == 1.0 and plain.logprobs is None


def test_how_many_tokens() -> None:
    chat, text = (
        parse_body(json.dumps(CHAT).encode(), ChatRequest),
        parse_body(json.dumps(TEXT).encode(), CompletionRequest),
    )
    assert most_tokens(chat, room=500, window=512) == 500 and most_tokens(text, room=500, window=512) == 16
    asked = parse_body(json.dumps({**CHAT, "max_completion_tokens": 501}).encode(), ChatRequest)
    with pytest.raises(
        ApiError, match="max_completion_tokens 501 does not fit: the window has 512 tokens, the prompt 12"
    ):
        most_tokens(asked, room=500, window=512)
    for wrong in (0, -1):
        with pytest.raises(ApiError, match=f"max_tokens {wrong}"):
            most_tokens(
                parse_body(json.dumps({**TEXT, "max_tokens": wrong}).encode(), CompletionRequest), room=9, window=9
            )


def test_both_spellings_of_a_constraint() -> None:
    schema = {"type": "object"}

    def of(**fields: Any) -> Any:
        return constraint_of(parse_body(json.dumps({**CHAT, **fields}).encode(), ChatRequest))

    assert of() is None and of(response_format={"type": "text"}) is None
    assert of(response_format={"type": "json_object"}) == {"json_object": True}
    assert of(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}) == {
        "json": schema
    }
    assert of(structured_outputs={"regex": "a+"}) == {"regex": "a+"}


def test_a_tool_is_shown_to_the_model_as_it_was_sent() -> None:
    odd = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    [tool] = parse_body(json.dumps({**CHAT, "tools": [odd]}).encode(), ChatRequest).tools or []
    assert json.dumps(tool.raw) == json.dumps(odd)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": ["x"] * 65}, "stop is not possible: list should have at most 64 items"),
        ({"stop": "x" * 1001}, "stop is not possible"),
        ({"bad_words": ["x"] * 1001}, "bad_words is not possible"),
        ({"stop_token_ids": [1] * 1001}, "stop_token_ids is not possible"),
        ({"logit_bias": {str(i): "x" for i in range(5000)}}, "logit_bias has 5000 entries; allowed: at most 4096"),
        ({"metadata": {str(i): "x" for i in range(65)}}, "metadata has 65 entries; allowed: at most 64"),
    ],
)
def test_what_would_take_time_at_every_token_is_limited(fields: dict[str, Any], words: str) -> None:
    error = refusal(json.dumps({**CHAT, **fields}).encode())
    assert error.message.startswith(words) and error.param == next(iter(fields))


def test_a_body_of_nothing_but_mistakes_is_refused_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    first = protocol._first_mistake
    monkeypatch.setattr(protocol, "_first_mistake", lambda e: (counts.append(e.error_count()), first(e))[1])
    for raw in (b'{"prompt": [' + b"null," * 2000 + b"null]}", b'{"prompt": "x", "stop": [' + b"1," * 60 + b"1]}"):
        with pytest.raises(ApiError, match=r"(prompt|stop)\[0\] is not possible"):
            parse_body(raw, CompletionRequest)
    with pytest.raises(ApiError, match=r"messages\[0\] is not possible"):
        parse_body(b'{"messages": [' + b"1," * 2000 + b"1]}", ChatRequest)
    assert len(counts) == 3 and max(counts) < 9


def test_one_name_twice_in_an_object_is_refused() -> None:
    message = refusal(b'{"messages": [], "temperature": 0, "temperature": 1}').message
    assert "'temperature' is given twice" in message
    inner = b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
    assert "'content' is given twice" in refusal(inner).message


def test_a_long_unknown_name_is_not_compared() -> None:
    begun = time.perf_counter()
    message = refusal(json.dumps({**CHAT, "temperatur" * 100_000: 1}).encode()).message
    assert "did you mean" not in message and len(message) < 300 and time.perf_counter() - begun < 2
