"""Requests of every kind: likely ones made from the server's own models, then bent until most of them are wrong.

Each is a function of a seed and its number alone, so what was found can be sent again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.serve.protocol import ChatRequest, CompletionRequest
from outrider.serve.refused import REFUSED

__all__ = ["Sent", "make_request", "request_bytes"]

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_SCHEMAS = {CHAT: ChatRequest.model_json_schema(), COMPLETION: CompletionRequest.model_json_schema()}
NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED})
TEXTS = (
    "",
    "a",
    "hello",
    "\x00",
    "\ud800",
    "<|im_end|>",
    "👩‍👩‍👧",
    "none",
    "auto",
    "self",
    "ma\u202ex",
    "%s{}",
    "../..",
)
NUMBERS = (0, 1, -1, 2, 3, 7, 0.5, 1e-300, 1e308, -0.0, 2**31, 2**63, 2**64, 10**400, 199, float("inf"), float("nan"))
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request as it is sent.

    Attributes:
        number: names it.
        path, data: where it goes, and its body.
        bends: what was done to it.
        method, headers: of the request; ``Content-Length`` is added if it is not among them.
        is_http: False if the request itself breaks the protocol, so that the connection may end without an answer of ours.
    """

    number: int
    path: str
    data: bytes
    bends: tuple[str, ...]
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    is_http: bool = True


def make_request(number: int, *, seed: int = 0) -> Sent:
    """The request of this number."""
    rng = random.Random(f"{seed}/{number}")
    path = rng.choice((CHAT, COMPLETION))
    body = _likely(rng, path)
    bends = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        bend = rng.choice(_BENDS)
        bend(rng, body)
        bends.append(bend.__name__.lstrip("_"))
    sent = Sent(number=number, path=path, data=json.dumps(body).encode(), bends=tuple(bends))
    return rng.choice(_SPOILERS)(rng, sent) if rng.random() < 0.25 else sent


def request_bytes(sent: Sent, host: str) -> bytes:
    """The bytes on the wire."""
    headers = {"Host": host, "Connection": "close", **sent.headers}
    if not {"Content-Length", "Transfer-Encoding"} & set(headers):
        headers["Content-Length"] = str(len(sent.data))
    lines = [f"{sent.method} {sent.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items() if value)]
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + sent.data


# --- likely bodies


def _likely(rng: random.Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 6)}
    body["messages" if path == CHAT else "prompt"] = _messages(rng) if path == CHAT else _prompt(rng)
    properties = _SCHEMAS[path]["properties"]
    for name in rng.sample(sorted(properties), rng.choice((0, 1, 2, 4, 8))):
        if name not in ("messages", "prompt", "max_tokens", "max_completion_tokens", "model"):
            body[name] = _value(rng, name, properties[name], path)
    return body


def _value(rng: random.Random, name: str, schema: Mapping[str, Any], path: str) -> Any:
    """A value that the field may have; by its name where the schema says too little."""
    likely: Mapping[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice((0, 0.7, 1.5, 100)),
        "top_p": lambda: rng.choice((1e-300, 0.3, 1)),
        "top_k": lambda: rng.choice((-1, 0, 1, 9, 2**40)),
        "min_p": lambda: rng.choice((0, 0.2, 1)),
        "n": lambda: rng.randint(1, 3),
        "min_tokens": lambda: rng.randint(0, 3),
        "stop": lambda: rng.choice(("e", ["a", "\n"], ["xy"])),
        "logit_bias": lambda: {str(rng.randint(0, 300)): rng.randint(-100, 100)},
        "bad_words": lambda: rng.choice((["a"], ["he", " the"], [])),
        "stop_token_ids": lambda: [rng.randint(0, 300)],
        "structured_outputs": lambda: _constraint(rng),
        "response_format": lambda: {"type": rng.choice(("text", "json_object"))},
        "tools": lambda: [TOOL],
        "stream_options": lambda: {"include_usage": True},
        "speculation": lambda: rng.choice(({"enabled": False}, {"num_draft_tokens": 2}, {"enabled": True})),
        "prediction": lambda: {"type": "content", "content": "hello " * rng.randint(1, 9)},
    }
    if name in likely:
        return likely[name]()
    return _by_schema(rng, schema, _SCHEMAS[path].get("$defs", {}), 3)


def _by_schema(rng: random.Random, schema: Mapping[str, Any], defs: Mapping[str, Any], depth: int) -> Any:
    if "$ref" in schema:
        schema = defs[schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        return _by_schema(rng, rng.choice(schema["anyOf"]), defs, depth)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum") or [schema.get("const")])
    kind = schema.get("type")
    if kind == "object" and depth and "properties" in schema:
        wanted = set(schema.get("required", ()))
        names = [name for name in schema["properties"] if name in wanted or rng.random() < 0.4]
        return {name: _by_schema(rng, schema["properties"][name], defs, depth - 1) for name in names}
    if kind == "array" and depth:
        return [_by_schema(rng, schema.get("items", {}), defs, depth - 1) for _ in range(rng.randint(0, 2))]
    plain: Mapping[Any, Any] = {
        "string": rng.choice(("hello", "x")),
        "integer": rng.randint(0, 5),
        "number": rng.choice((0, 0.5, 1)),
        "boolean": rng.random() < 0.5,
        "object": {},
        "array": [],
        "null": None,
    }
    return plain.get(kind)


def _messages(rng: random.Random) -> list[dict[str, Any]]:
    texts = [rng.choice(("hello", "Say hello", "日本語", "x" * 40)) for _ in range(rng.randint(1, 3))]
    out: list[dict[str, Any]] = [{"role": "user", "content": text} for text in texts]
    if rng.random() < 0.2:
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        out += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        out += [{"role": "tool", "tool_call_id": "c", "content": "rain"}]
    return out


def _prompt(rng: random.Random) -> Any:
    return rng.choice(("hello", ["hello", "you"], [5, 6, 7], [[5, 6], [7]], "x" * 60))


def _constraint(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        (
            {"regex": "[a-c]{1,4}"},
            {"choice": ["yes", "no"]},
            {"json_object": True},
            {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
            {"grammar": 'start: "a" | "b" start'},
        )
    )


# --- bends of the body


def _strange(rng: random.Random, depth: int = 3) -> Any:
    """Any JSON value."""
    kind = rng.randrange(7 if depth else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice((None, True, False))
    values = [_strange(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return values if kind == 5 else {rng.choice((*TEXTS, *NAMES)): value for value in values}


def _another_value(rng: random.Random, body: dict[str, Any]) -> None:
    body[rng.choice(sorted(body) if body else NAMES)] = _strange(rng)


def _another_field(rng: random.Random, body: dict[str, Any]) -> None:
    body[rng.choice(NAMES)] = _strange(rng)


def _unknown_field(rng: random.Random, body: dict[str, Any]) -> None:
    name = rng.choice(NAMES)
    body[rng.choice((name + "s", name[:-1], "x" * 100_000, "\ud800", ""))] = 1


def _deep_inside(rng: random.Random, body: dict[str, Any]) -> None:
    """Change a value somewhere within a value."""
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.2:
            place[key] = _strange(rng)
            return
        place = place[key]


def _missing_field(rng: random.Random, body: dict[str, Any]) -> None:
    if body:
        del body[rng.choice(sorted(body))]


def _contradiction(rng: random.Random, body: dict[str, Any]) -> None:
    body |= rng.choice(
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            {"top_logprobs": 3},
            {"stream_options": {"include_usage": True}, "stream": False},
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            {"speculation": {"enabled": False, "num_draft_tokens": 3}},
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            {"tools": [TOOL, TOOL]},
            {"tool_choice": {"type": "function", "function": {"name": "nobody"}}, "tools": [TOOL]},
            {"min_tokens": 9, "max_tokens": 3},
            {"n": 2, "temperature": 0},
        )
    )


def _long_list(rng: random.Random, body: dict[str, Any]) -> None:
    count = rng.choice((65, 1001, 20_000, 100_000))
    body |= rng.choice(
        (
            {"stop": [f"stop {i}" for i in range(count)]},
            {"stop": "x" * count},
            {"bad_words": [f"word {i}" for i in range(count)]},
            {"stop_token_ids": list(range(count))},
            {"logit_bias": {str(i): 1 for i in range(count)}},
            {"logit_bias": {str(i): "x" for i in range(count)}},
            {"metadata": {str(i): 1 for i in range(count)}},
            {"prompt": [None] * count},
            {"prompt": [5] * count},
            {"prompt": ["hello"] * count},
            {"messages": [{"role": "user", "content": "x"}] * count},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * count}]},
            {"prediction": {"type": "content", "content": "x y " * count}},
            {"tools": [TOOL] * count},
            {"structured_outputs": {"choice": [f"choice {i}" for i in range(count)]}},
        )
    )


def _bomb(rng: random.Random, body: dict[str, Any]) -> None:
    """A constraint that is meant to be dear."""
    depth = rng.choice((50, 200, 900, 5000))
    body.pop("response_format", None)
    body["structured_outputs"] = rng.choice(
        (
            {"regex": "(" * depth + "a" + ")" * depth},
            {"regex": "((((a{100}){100}){100}){100})"},
            {"regex": "(a|aa|aaa)*" * min(depth, 200)},
            {"regex": r"(\w\d?){" + str(depth) + "}"},
            {"regex": "a**"},
            {"regex": "(?=a)b"},
            {"regex": r"[^\x00-\u{10FFFF}]"},
            {"grammar": "start: " + "(" * depth + '"a"' + ")" * depth},
            {"grammar": 'start: start | start start | "a"'},
            {"grammar": 'start: A\nA: A "x"'},
            {"grammar": "start: %json " + '{"a":' * depth + "1" + "}" * depth},
            {"grammar": "start: missing"},
            {"json": _nested(depth, {}, "not")},
            {"json": {"$ref": "#"}},
            {"json": {"$ref": "https://example.org/schema.json"}},
            {"json": {"type": "string", "pattern": "(" * depth + ")" * depth}},
            {"json": {"type": "string", "minLength": 10**9}},
            {"json": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}}},
            {"json": {"anyOf": [{"const": str(i)} for i in range(depth)]}},
            {"json": {"enum": []}},
            {"json": {"type": "integer", "minimum": 5, "maximum": 4}},
            {"json": {"type": "object", "properties": {str(i): {} for i in range(depth)}}},
        )
    )


def _nested(depth: int, inner: Any, name: str) -> Any:
    for _ in range(min(depth, 600)):  # deeper than that Python itself writes no JSON
        inner = {name: inner}
    return inner


def _odd_tools(rng: random.Random, body: dict[str, Any]) -> None:
    parameters: Sequence[Any] = (
        {"type": "string"}, {"type": "object", "properties": 3}, {"$ref": "#/nowhere"}, {"type": "nothing"}, {},
        {"type": "object", "properties": {"x" * 5000: {"type": "string"}}}, _nested(300, {}, "not"), None, [],
        {"type": "object", "properties": {"a": {"enum": [float("inf")]}}},
    )  # fmt: skip
    names = ("weather", "a.b-c", "", "x" * 64, "x" * 65, "naïve", "a\nb", 3)
    function = {"name": rng.choice(names), "parameters": rng.choice(parameters)}
    body["tools"] = [{"type": "function", "function": function}]
    body["tool_choice"] = rng.choice(
        ("auto", "required", "none", {"type": "function", "function": {"name": "weather"}})
    )


_BENDS: Sequence[Callable[[random.Random, dict[str, Any]], None]] = (
    _another_value, _another_value, _another_field, _unknown_field, _deep_inside, _deep_inside, _missing_field,
    _contradiction, _contradiction, _long_list, _bomb, _odd_tools,
)  # fmt: skip


# --- spoiled bytes and headers


def _changed(sent: Sent, what: str, **changes: Any) -> Sent:
    values = {
        "number": sent.number,
        "path": sent.path,
        "data": sent.data,
        "method": sent.method,
        "headers": sent.headers,
        "is_http": sent.is_http,
    }
    return Sent(bends=(*sent.bends, what), **{**values, **changes})


def _cut(rng: random.Random, sent: Sent) -> Sent:
    return _changed(sent, "cut", data=sent.data[: rng.randrange(len(sent.data))])


def _no_text(rng: random.Random, sent: Sent) -> Sent:
    at = rng.randrange(len(sent.data))
    return _changed(sent, "no_text", data=sent.data[:at] + rng.randbytes(3) + sent.data[at:])


def _deep_text(rng: random.Random, sent: Sent) -> Sent:
    depth = rng.choice((900, 5000, 200_000))
    value = b'{"a":' * depth + b"1" + b"}" * depth if rng.random() < 0.5 else b"[" * depth + b"]" * depth
    return _changed(sent, "deep_text", data=b'{"messages": [], "prompt": ' + value + b"}")


def _twice(rng: random.Random, sent: Sent) -> Sent:
    return _changed(sent, "twice", data=b'{"prompt": "a", "prompt": "b", "messages": [], "messages": []}')


def _too_large(rng: random.Random, sent: Sent) -> Sent:
    return _changed(sent, "too_large", data=b'{"prompt": "' + b"x" * (4 << 20) + b'"}')


def _other_type(rng: random.Random, sent: Sent) -> Sent:
    kind = rng.choice(
        ("text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=latin-1", "x/y")
    )
    return _changed(sent, "other_type", headers={"Content-Type": kind})


def _other_method(rng: random.Random, sent: Sent) -> Sent:
    return _changed(sent, "other_method", method=rng.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")))


def _other_path(rng: random.Random, sent: Sent) -> Sent:
    paths = (
        sent.path + "/",
        sent.path + "?a=%00",
        "/v1/" + "x" * 2000,
        "//",
        "/v1/../v1/models",
        "/v1/models/%ff",
        "/%00",
    )
    return _changed(sent, "other_path", path=rng.choice(paths))


def _headers(rng: random.Random, sent: Sent) -> Sent:
    json_type = {"Content-Type": "application/json"}
    more: Sequence[Mapping[str, str]] = (
        {"X-Request-Id": "x" * 3000}, {"X-Request-Id": "\u00e9"}, {"Authorization": "Bearer \u00ff"},
        {"Accept-Encoding": "gzip, br"}, {"Content-Encoding": "gzip"}, {"Expect": "100-continue"},
        {"Accept": "text/html"}, {"Upgrade": "h2c"}, {"X-Long": "y" * 5000}, {"Host": "evil.example"},
    )  # fmt: skip
    return _changed(sent, "headers", headers={**json_type, **rng.choice(more)})


def _broken_http(rng: random.Random, sent: Sent) -> Sent:
    json_type = {"Content-Type": "application/json"}
    more: Sequence[Mapping[str, str]] = (
        {"Content-Length": "-1"}, {"Content-Length": "9" * 30}, {"Content-Length": "x"}, {"Content-Length": "10"},
        {"Transfer-Encoding": "chunked"}, {"Transfer-Encoding": "gzip"}, {"Host": ""},
        {"Content-Length": "5", "Transfer-Encoding": "chunked"}, {"X-Long": "y" * 200_000}, {"Bad Name": "x"},
    )  # fmt: skip
    return _changed(sent, "broken_http", headers={**json_type, **rng.choice(more)}, is_http=False)


_SPOILERS: Sequence[Callable[[random.Random, Sent], Sent]] = (
    _cut, _cut, _no_text, _deep_text, _twice, _too_large, _other_type, _other_method, _other_path, _headers, _broken_http,
)  # fmt: skip
