"""A real server on a loopback port, and a target that answers with texts that are known beforehand."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import torch
import uvicorn
from fastapi import FastAPI

from outrider.cache.base import Cache
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.models.base import ForwardResult, GreedyResult, PackedRows, Segment
from outrider.models.table import TableCache, TableModel
from outrider.sampling.draw import argmax_B
from outrider.serve.app import create_app
from outrider.serve.auth import KeyRing
from outrider.serve.config import ServeConfig
from outrider.serve.service import Service
from tests.models import _files

VOCAB = len(_files.TOKENS)
EOS = 2
CERTAIN = 30.0
CLIENT = httpx.Client(timeout=60)
"""One for all: making one reads certificates, which takes longer than most requests here."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {"city": "Lima"}}\n</tool_call>'
)
SCRIPTS: Mapping[str, str] = {
    "weather in Oslo and the time in Lima": TWO_CALLS,
    "broken call": '<tool_call>{"name": "weather", "arguments": {city: Oslo}}</tool_call> so much for that',
    "Reply with exactly: OK": "OK",
    "日本語": "日本語テスト 👩‍👩‍👧 é ﷽ " * 3,
    "long story": "Once upon a time there was a sea, and the sea was calm, and the sea was blue. " * 8,
    "never ends": "and so on " * 400,
}


class ScriptedModel(TableModel):
    """Answers a chat with the script whose key stands in the prompt, else with ``hello``; all else is improbable.

    The law of a row depends on everything before it, so wrong drafts get other laws, as in a model.
    """

    def __init__(self, *, max_positions: int = 8192, scripts: Mapping[str, str] = SCRIPTS) -> None:
        super().__init__(torch.zeros(VOCAB, VOCAB), eos_token_ids=(EOS,), max_positions=max_positions)
        self.tokenizer: Any = _files.tokenizer(tool_rendering="system")
        self._head = self.tokenizer.encode("<|im_start|>assistant\n")
        self._scripts = {key: self.tokenizer.encode(text) for key, text in scripts.items()}

    def forward(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> ForwardResult:
        """One law a wanted row."""
        assert isinstance(cache, TableCache)
        tokens = rows.tokens_R.tolist()
        contexts = [context for s in rows.segments for context in _contexts(s, tokens, cache.tokens(s.slot))]
        for s in rows.segments:
            cache.tokens(s.slot).extend(tokens[s.start : s.start + s.num_rows])
        wanted = range(len(tokens)) if rows.logit_rows is None else rows.logit_rows
        logits = torch.zeros(len(wanted), VOCAB)
        for row, index in enumerate(wanted):
            logits[row, self._next(contexts[index])] = CERTAIN
        return ForwardResult(logits_RV=logits, taps={})

    def forward_greedy(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> GreedyResult:
        """The likeliest tokens."""
        return GreedyResult(tokens_R=argmax_B(self.forward(rows, cache, taps=taps).logits_RV), taps={})

    def _next(self, context: list[int]) -> int:
        width = len(self._head)
        begin = next((at for at in range(len(context), width - 1, -1) if context[at - width : at] == self._head), 0)
        prompt = self.tokenizer.decode(context[:begin])
        found = [script for key, script in self._scripts.items() if key in prompt]
        script = found[0] if found else self.tokenizer.encode("hello")
        done = len(context) - begin
        is_on_script = context[begin:] == script[:done] and done < len(script)
        return script[done] if is_on_script else EOS


def _contexts(segment: Segment, tokens: Sequence[int], cached: Sequence[int]) -> list[list[int]]:
    """All tokens up to and with each row's own, along its path."""
    own = tokens[segment.start : segment.start + segment.num_rows]
    parents = segment.parents or tuple(range(-1, segment.num_rows - 1))
    paths: list[list[int]] = []
    for token, parent in zip(own, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else cached), token])
    return paths


@dataclass(frozen=True)
class LiveServer:
    """A server that runs in a thread of this process."""

    url: str
    app: FastAPI
    engine: Engine

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    @property
    def is_idle(self) -> bool:
        """True if the engine decodes nothing and nothing waits."""
        return not self.engine.has_work

    def post(self, path: str, body: Mapping[str, Any], **more: Any) -> httpx.Response:
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        return CLIENT.post(self.url + path, content=json.dumps(body).encode(), headers=headers, **more)

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        """The response to one user's message."""
        response = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


@contextmanager
def serving(
    target: Any,
    drafter: Any = None,
    *,
    engine: EngineConfig | None = None,
    config: ServeConfig | None = None,
    keys: KeyRing | None = None,
) -> Iterator[LiveServer]:
    """Serve a target on a free port until the block ends."""
    running = Engine(target, drafter=drafter, config=engine or EngineConfig(schedule="fixed"))
    app = create_app(running, config=config or ServeConfig(port=0, drain_timeout_s=20), keys=keys)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    ready = threading.Event()
    settings = uvicorn.Config(app, http="h11", loop="asyncio", log_config=None, timeout_graceful_shutdown=20)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            ready.set()

    server = Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        assert ready.wait(20)
        yield LiveServer(f"http://127.0.0.1:{bound.getsockname()[1]}", app, running)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        bound.close()


def sse(text: str) -> list[Any]:
    """Data of a stream's events; the last one is ``[DONE]``."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]
