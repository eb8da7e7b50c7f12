"""One request, for the library and for the server: the library's plain output is what the server must say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from benchmarks.load.client import Client
from benchmarks.wire.replies import Choice, Reply, read_reply
from outrider import Engine, EngineConfig, GenerationResult, SamplingParams
from outrider.errors import OutriderError
from outrider.models.base import LoadedTarget
from outrider.sampling.constraint import StructuredOutputs
from outrider.serve.protocol import ChatRequest, parse_body
from outrider.serve.tool_grammar import tool_constraint

__all__ = ["Ask", "Library", "ask", "compare", "same"]

Message = dict[str, Any]
LOGPROB_TOLERANCE = 1e-3
TIES: Mapping[str, float] = {"pytorch": 1e-4}
"""Gap of the two likeliest tokens below which either may come, by path; the native ones are allowed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request.

    Attributes:
        prompt: a chat, a text, or token ids.
        params: the library's sampling fields; the body's are made of them.
        tools: shown to the model.
        choice: ``tool_choice``; one that asks for calls is a grammar to the library.
        more: further fields of the body, which change no token.
    """

    prompt: str | Sequence[int] | Sequence[Message]
    params: SamplingParams = field(default_factory=SamplingParams)
    tools: Sequence[Mapping[str, Any]] | None = None
    choice: str | Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """True for messages."""
        return not isinstance(self.prompt, str) and not all(isinstance(part, int) for part in self.prompt)

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """What is sent: every sampling field that is not the library's default, under the same name."""
        body: dict[str, Any] = {"messages" if self.is_chat else "prompt": self.prompt, "return_token_ids": True}
        plain = SamplingParams()
        for each in fields(SamplingParams):
            value = getattr(self.params, each.name)
            if each.name in ("temperature", "max_tokens") or value != getattr(plain, each.name):
                body[each.name] = _as_json(value)
        if self.is_chat and self.params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.params.logprobs}
        if self.tools is not None:
            body["tools"] = list(self.tools)
        if self.choice is not None:
            body["tool_choice"] = self.choice
        return {**body, **self.more}

    def decoded(self) -> SamplingParams:
        """The library's fields, with the constraint that the server makes of the tools."""
        if self.choice is None:
            return self.params
        wished = {"messages": [], "tools": list(self.tools or ()), "tool_choice": self.choice}
        found = tool_constraint(parse_body(json.dumps(wished).encode(), ChatRequest), "tags")
        return self.params if found is None else replace(self.params, structured_outputs=StructuredOutputs(**found))


def _as_json(value: Any) -> Any:
    if isinstance(value, StructuredOutputs):
        given = {each.name: getattr(value, each.name) for each in fields(StructuredOutputs)}
        return {name: _as_json(part) for name, part in given.items() if part not in (None, False, ())}
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    return list(value) if isinstance(value, tuple) else value


class Library:
    """Plain decoding by the library itself, each request's answer computed once.

    Args:
        target: the model that the server has.
    """

    def __init__(self, target: LoadedTarget) -> None:
        assert target.tokenizer is not None
        self.target = target
        self.tokenizer = target.tokenizer
        self._engine = Engine(target, config=EngineConfig(num_cached_prefixes=0))
        self._known: dict[str, list[GenerationResult] | OutriderError] = {}

    def plain(self, asks: Sequence[Ask]) -> list[list[GenerationResult] | OutriderError]:
        """The choices of each, or the error that it is refused with."""
        new = {_key(each): each for each in asks if _key(each) not in self._known}
        for key, each in new.items():
            try:
                self._engine.submit(self._tokens(each), each.decoded(), id=key)
                self._known[key] = []
            except OutriderError as error:
                self._known[key] = error
        while self._engine.has_work:
            for event in self._engine.step():
                known = self._known[event.id]
                if event.result is not None and isinstance(known, list):
                    known.append(event.result)
        for known in self._known.values():
            if isinstance(known, list):
                known.sort(key=lambda result: result.index)
        return [self._known[_key(each)] for each in asks]

    def results(self, asks: Sequence[Ask]) -> list[list[GenerationResult]]:
        """The same of requests that are not refused."""
        out = []
        for found in self.plain(asks):
            if isinstance(found, OutriderError):
                raise found
            out.append(found)
        return out

    def draw(self, each: Ask, times: int) -> list[tuple[int, ...]]:
        """Outputs of a request without a seed, asked so many times."""
        results = self._engine.generate([self._tokens(each)] * times, each.params)
        return [result.token_ids for result in results]

    def is_tie(self, each: Ask, tokens: Sequence[int]) -> bool:
        """True if an answer to a greedy request first differs where its token was as likely as the library's."""
        params, tolerance = each.params, TIES.get(self.target.spec.path)
        if tolerance is None or not params.is_greedy or params.has_penalties or params.logit_bias:
            return False
        [[plain]] = self.results([replace(each, params=replace(params, logprobs=2))])
        assert plain.logprobs is not None
        for token, entry in zip(tokens, plain.logprobs, strict=False):
            if token != entry.token:
                return any(other == token and entry.logprob - value <= tolerance for other, value in entry.top)
        return False

    def _tokens(self, each: Ask) -> list[int]:
        if each.is_chat:
            return list(self.tokenizer.encode_chat(list(each.prompt), tools=each.tools))  # type: ignore[arg-type]
        return list(self.tokenizer.encode_prompt(each.prompt) if isinstance(each.prompt, str) else each.prompt)  # type: ignore[arg-type]


def _key(each: Ask) -> str:
    return repr((each.prompt, each.params, each.tools, each.choice))


async def ask(client: Client, each: Ask, *, is_streamed: bool = False) -> Reply:
    """Send a request and read its answer."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    return read_reply(await client.post(each.path, {**each.body(), **more}))


def compare(reply: Reply, expected: Sequence[GenerationResult], *, has_tools: bool = False) -> None:
    """Make sure that a reply is the library's output.

    Raises:
        AssertionError: says what differs.
    """
    assert reply.status == 200, reply.error
    assert len(reply.choices) == len(expected)
    assert reply.usage["completion_tokens"] == sum(result.usage.completion_tokens for result in expected)
    for choice, result in zip(reply.choices, expected, strict=True):
        assert choice.token_ids == list(result.token_ids), _difference(choice.token_ids, result.token_ids)
        if not has_tools:
            assert choice.text == result.text, (choice.text, result.text)
            assert choice.finish_reason == result.finish_reason.value
        _compare_logprobs(choice, result)


def _compare_logprobs(choice: Choice, result: GenerationResult) -> None:
    entries = result.logprobs or []
    assert len(choice.logprobs) == len(entries)
    for (_, value, _), entry in zip(choice.logprobs, entries, strict=True):
        assert abs(value - entry.logprob) < LOGPROB_TOLERANCE, (value, entry.logprob)


def _difference(got: Sequence[int], wanted: Sequence[int]) -> str:
    at = next((i for i, (g, w) in enumerate(zip(got, wanted, strict=False)) if g != w), min(len(got), len(wanted)))
    return f"tokens differ from position {at} on: {list(got[at : at + 5])} instead of {list(wanted[at : at + 5])}"


async def same(client: Client, library: Library, asks: Sequence[Ask], *, at_once: int = 8) -> dict[str, int]:
    """Each request, whole and streamed, ``at_once`` of them beside each other, must be answered as by the library.

    Returns:
        Counts of requests, tokens, of draft tokens made and kept, and of answers that differ at a tie.

    Raises:
        AssertionError: names the request.
    """
    expected = library.results(asks)
    gate = asyncio.Semaphore(at_once)
    counts = {"requests": 0, "tokens": 0, "drafted": 0, "accepted": 0, "ties": 0}

    async def one(each: Ask, results: Sequence[GenerationResult], is_streamed: bool) -> Reply | None:
        async with gate:
            reply = await ask(client, each, is_streamed=is_streamed)
        try:
            compare(reply, results, has_tools=bool(each.tools))
        except AssertionError as error:
            if reply.choices and library.is_tie(each, reply.choices[0].token_ids):
                counts["ties"] += 1
                return None
            way = "streamed" if is_streamed else "whole"
            raise AssertionError(f"{error}\n  {way}: {str(each.body())[:400]}") from None
        counts["requests"] += 1
        counts["tokens"] += reply.usage["completion_tokens"]
        counts["drafted"] += reply.speculation.get("drafted", 0)
        counts["accepted"] += reply.speculation.get("accepted", 0)
        return reply

    jobs = [(a, r, way) for a, r in zip(asks, expected, strict=True) for way in (False, True)]
    replies = await asyncio.gather(*(one(*job) for job in jobs))
    for whole, streamed in zip(replies[::2], replies[1::2], strict=True):
        is_one = whole is None or streamed is None or whole.content == streamed.content
        assert is_one, "a stream that joins to something else than the whole answer"
    return counts
