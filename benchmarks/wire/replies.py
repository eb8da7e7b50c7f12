"""One answer of the server, whole or put together from a stream, in one form; what a stream must look like is checked here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.load.client import Answer

__all__ = ["Choice", "Reply", "read_reply"]

_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


@dataclass(slots=True)
class Choice:
    """One output.

    Attributes:
        text: content of the message, or text of the completion.
        calls: name and arguments of each tool call, in order.
        logprobs: token, value, and the tokens listed beside it, one entry a token.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[tuple[str, float, tuple[str, ...]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer without what tells the time.

    Attributes:
        status: HTTP status.
        error: OpenAI's error object.
        choices: by index.
        usage: token counts; cached_tokens: those of the prompt that were not read again.
        speculation: ``metrics.outrider``.
    """

    status: int
    error: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()
    usage: Mapping[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> Reply:
        """What must be the same in every answer to one request: how it was computed is left out, and rounding with it."""
        choices = tuple(
            replace(choice, logprobs=[(token, 0.0, ()) for token, _, _ in choice.logprobs]) for choice in self.choices
        )
        return replace(self, choices=choices, cached_tokens=0, speculation={})


def read_reply(answer: Answer) -> Reply:
    """What an answer says.

    Raises:
        AssertionError: it is not of the form that the API promises.
    """
    if answer.status != 200:
        assert isinstance(answer.body, dict) and answer.body["error"]["message"], (answer.status, answer.text[:200])
        return Reply(status=answer.status, error=answer.body["error"])
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _streamed(answer.text)
    choices = []
    for said in answer.body["choices"]:
        choice = Choice(token_ids=said.get("token_ids", []), finish_reason=said["finish_reason"])
        message = said.get("message") or {"content": said.get("text")}
        choice.text = message["content"] or ""
        for index, call in enumerate(message.get("tool_calls", ())):
            choice.calls[index] = [call["function"]["name"], call["function"]["arguments"]]
        choice.logprobs = _entries(said["logprobs"])
        choices.append(choice)
    return _reply(choices, answer.body)


def _reply(choices: list[Choice], last: Mapping[str, Any]) -> Reply:
    usage = last["usage"]
    return Reply(
        status=200,
        choices=tuple(choices),
        usage={name: usage[name] for name in _COUNTS},
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        speculation=last["metrics"]["outrider"],
    )


def _streamed(text: str) -> Reply:
    """Join the chunks; one reason a choice, nothing behind it, then the usage, then the end."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts and parts[-1] == "[DONE]", f"a stream that does not end: {text[-200:]!r}"
    *chunks, last = (json.loads(part) for part in parts[:-1])
    assert last["choices"] == [] and "usage" in last, f"no usage before the end: {last}"
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        [said] = chunk["choices"]
        choice = choices.setdefault(said["index"], Choice())
        assert choice.finish_reason is None, "something came behind the reason of the end"
        _join(choice, said)
    assert all(choice.finish_reason for choice in choices.values()), "a choice without a reason of its end"
    return _reply([choices[index] for index in sorted(choices)], last)


def _join(choice: Choice, said: Mapping[str, Any]) -> None:
    delta = said.get("delta") or {"content": said.get("text")}
    choice.text += delta.get("content") or ""
    for call in delta.get("tool_calls", ()):
        known = choice.calls.setdefault(call["index"], ["", ""])
        known[0] += call["function"].get("name") or ""
        known[1] += call["function"].get("arguments") or ""
    choice.token_ids += said.get("token_ids", [])
    choice.logprobs += _entries(said["logprobs"])
    choice.finish_reason = said["finish_reason"]


def _entries(logprobs: Mapping[str, Any] | None) -> list[tuple[str, float, tuple[str, ...]]]:
    """Entries of a chat's log-probabilities, or of a completion's parallel lists."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            (entry["token"], entry["logprob"], tuple(top["token"] for top in entry["top_logprobs"]))
            for entry in logprobs["content"]
        ]
    tops = logprobs["top_logprobs"] or [{}] * len(logprobs["tokens"])
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    return [(token, value, tuple(top)) for token, value, top in rows]
