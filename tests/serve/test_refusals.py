"""What a client may get wrong and a server must not take for a fault of its own."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

from benchmarks.load.client import Client

from outrider.engine.config import EngineConfig
from outrider.errors import ConfigError, MissingExtra
from outrider.serve.auth import KeyRing
from outrider.serve.config import ServeConfig
from outrider.serve.errors import api_error
from outrider.serve.run import listener_settings
from tests.serve.support import CLIENT, LiveServer, ScriptedModel, serving


def test_an_odd_host_or_a_slash_too_many_is_no_fault(scripted: LiveServer) -> None:
    with serving(ScriptedModel(), keys=KeyRing([("ann", "secret-of-ann")])) as server:
        port = int(server.url.rsplit(":", 1)[1])
        for path in ("/nothing", "/v1/chat/completions/"):
            head = f"GET {path} HTTP/1.1\r\nHost: [\r\nAuthorization: Bearer secret-of-ann\r\nConnection: close\r\n\r\n"
            answer = asyncio.run(Client("127.0.0.1", port).send(head.encode()))
            assert answer.status == 404 and answer.body["error"]["code"] == "not_found", answer
    assert CLIENT.get(f"{scripted.url}/v1/models/{scripted.service.model_name}").status_code == 200


def test_a_body_that_is_too_large_is_told_though_the_client_still_sends() -> None:
    with serving(ScriptedModel(), config=ServeConfig(port=0, max_body_bytes=1 << 20)) as server:
        client = Client("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        answer = asyncio.run(client.post("/v1/completions", b'{"prompt": "' + b"x" * (6 << 20) + b'"}'))
        assert answer.status == 413 and "1048576" in answer.body["error"]["message"]
        head = client.request("/v1/completions", b"").replace(b"Content-Length: 0", b"Content-Length: 999999999")
        assert asyncio.run(client.send(head)).status == 413  # far too large: not even read


def test_an_early_refusal_of_a_large_body_arrives() -> None:
    """A wrong key, path, method or type is known before the body is there; the client still hears of it."""
    with serving(ScriptedModel(), keys=KeyRing([("ann", "a-long-enough-key")])) as server:
        client = Client("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        raw = client.request("/v1/completions", b'{"prompt": "' + b"x" * (3 << 20) + b'"}')
        key = b"Authorization: Bearer a-long-enough-key\r\nContent-Length"
        known = raw.replace(b"Content-Length", key, 1)
        for sent, status in (
            (raw, 401),
            (known.replace(b"/v1/completions", b"/v1/completion", 1), 404),
            (known.replace(b"POST", b"PUT", 1), 405),
            (known.replace(b"application/json", b"text/plain", 1), 415),
        ):
            assert asyncio.run(client.send(sent)).status == status


def test_a_request_that_the_cache_could_never_hold_is_the_clients_to_change(tiny_target: Any) -> None:
    with serving(tiny_target, engine=EngineConfig(schedule="fixed", cache_memory_gb=2e-4)) as server:
        response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 400})
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "capacity_exceeded" and error["param"] == "max_tokens"
        fits = server.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
        assert fits.status_code == 200, fits.text


def test_a_missing_extra_is_told_and_no_fault() -> None:
    told = api_error(MissingExtra("structured_outputs needs llguidance, which is not installed"))
    assert told.status == 400 and "structured_outputs needs llguidance" in told.message


def test_no_message_is_as_long_as_what_was_sent() -> None:
    told = api_error(ConfigError("seed " + "9" * 5000)).message
    assert len(told) == 2000 and told.endswith("9...")


def test_more_messages_than_the_window_has_tokens(off: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": ""}] * 513}
    error = off.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "messages" and "513 entries" in error["message"]


def test_what_is_looked_at_may_be_asked_for_by_head(scripted: LiveServer) -> None:
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/table", "/outrider/status"):
        head = CLIENT.head(scripted.url + path)
        assert head.status_code == 200 and head.content == b""
        assert head.headers["content-type"] == CLIENT.get(scripted.url + path).headers["content-type"]


def test_a_method_that_is_not_possible_is_told_which_are(scripted: LiveServer) -> None:
    for method, path, allowed in (("GET", "/v1/chat/completions", {"POST"}), ("DELETE", "/v1/models", {"GET", "HEAD"})):
        answer = CLIENT.request(method, scripted.url + path)
        assert answer.status_code == 405 and set(answer.headers["allow"].split(", ")) == allowed
        assert answer.json()["error"]["message"].startswith(f"{method} is not possible at {path}; allowed: ")


def test_a_packed_body_is_refused_by_its_coding(scripted: LiveServer) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = CLIENT.post(f"{scripted.url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 415 and "content encoding 'gzip'" in answer.json()["error"]["message"]


def test_answers_of_other_servers_may_stand_in_a_chat(scripted: LiveServer) -> None:
    """As OpenAI's own client writes them out, fields that hold nothing included."""
    said = {"role": "assistant", "content": "hello", "refusal": None, "annotations": [], "audio": None}
    said |= {"function_call": None, "tool_calls": None}
    user = {"role": "user", "content": "x"}
    bodies = [{"messages": [user, each, user]} for each in (said, {"role": "assistant", "content": "hello"})]
    counts = [scripted.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] for body in bodies]
    assert counts[0] == counts[1]
    full = {"messages": [user, {**said, "annotations": [{"type": "url_citation"}]}, user]}
    error = scripted.post("/v1/chat/completions", full).json()["error"]
    assert error["param"] == "messages[1].annotations"


def test_a_part_of_a_content_holds_nothing_that_would_be_ignored(scripted: LiveServer) -> None:
    def ask(**more: Any) -> Any:
        parts = [{"type": "text", "text": "Reply with "}, {"type": "text", "text": "exactly: OK", **more}]
        body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
        return scripted.post("/v1/chat/completions", body).json()

    assert ask()["choices"][0]["message"]["content"] == "OK"
    assert ask(cache_control={"type": "ephemeral"})["choices"][0]["message"]["content"] == "OK"
    assert ask(texts="x")["error"]["param"] == "messages[0].content[1].texts"


def test_what_changes_nothing_passes_and_what_would_is_refused(scripted: LiveServer) -> None:
    user = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    wishes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "low"}, "reasoning_effort"),
        ({"prompt_cache_retention": "in-memory"}, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        (
            {"stream_options": {"include_obfuscation": False}},
            {"stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ]
    for taken, refused, param in wishes:
        assert scripted.post("/v1/chat/completions", {**user, **taken}).status_code == 200
        answer = scripted.post("/v1/chat/completions", {**user, **refused})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_no_character_of_an_answer_ends_a_line_of_the_stream() -> None:
    """Clients that read a stream by lines cut at more characters than line breaks."""
    text = "a\u2028b\u2029c\x85d\u2028"
    with serving(ScriptedModel(scripts={"odd lines": text})) as server:
        body = {"messages": [{"role": "user", "content": "odd lines"}], "temperature": 0}
        said = server.chat("odd lines", temperature=0)["choices"][0]["message"]["content"]
        found = ""
        with CLIENT.stream("POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        assert found == said == text


def test_an_idle_connection_outlives_what_proxies_keep() -> None:
    """Proxies keep idle connections for a minute; if the server ends them earlier, their next request is lost."""
    assert listener_settings(lambda: None).timeout_keep_alive > 60
