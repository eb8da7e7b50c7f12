"""Responses of ``/v1/chat/completions``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from outrider.engine.result import GenerationResult, StreamEvent
from outrider.serve.replies import ReplyContext, StepPainter, chat_logprobs, finish_word, metrics_of, usage_of
from outrider.serve.tools import ToolDelta, ToolParser

__all__ = ["ChatReply"]

_CHUNK = "chat.completion.chunk"


class ChatReply:
    """See :class:`outrider.serve.replies.Reply`.

    Args:
        context: what every part says.
        new_parser: makes the reader of one choice's tool calls; ``None`` for a chat without tools.
    """

    def __init__(self, context: ReplyContext, new_parser: Callable[[], ToolParser] | None) -> None:
        self.context = context
        self._new_parser = new_parser
        self._parsers: dict[int, ToolParser] = {}
        self._painters: dict[int, StepPainter] = {}
        self._begun: set[int] = set()

    def whole(self, results: Sequence[tuple[int, GenerationResult]]) -> dict[str, Any]:
        """The response, from (choice, result) in order of the choices."""
        only = [result for _, result in results]
        out = self.context.head("chat.completion")
        if self.context.returns_token_ids:
            out["prompt_token_ids"] = list(self.context.prompts[0])
        out["choices"] = [self._choice(choice, result) for choice, result in results]
        out["usage"] = usage_of(only)
        out["metrics"] = metrics_of(only, self.context.num_draft_tokens)
        return out

    def _choice(self, choice: int, result: GenerationResult) -> dict[str, Any]:
        content, calls = self._split(result.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        out: dict[str, Any] = {
            "index": choice,
            "message": message,
            "logprobs": None if result.logprobs is None else chat_logprobs(result.logprobs, self.context),
            "finish_reason": finish_word(result, num_calls=len(calls)),
        }
        if self.context.returns_token_ids:
            out["token_ids"] = list(result.token_ids)
        return out

    def _split(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Content and calls of a whole answer."""
        if self._new_parser is None:
            return text, []
        parser = self._new_parser()
        content, calls = "", dict[int, dict[str, Any]]()
        for delta in (*parser.add(text), *parser.finish()):
            if delta.index is None:
                content += delta.content
                continue
            if delta.name is not None:
                function = {"name": delta.name, "arguments": ""}
                calls[delta.index] = {"id": _call_id(), "type": "function", "function": function}
            calls[delta.index]["function"]["arguments"] += delta.arguments
        return content or (None if calls else ""), list(calls.values())

    def chunks(self, choice: int, event: StreamEvent) -> list[dict[str, Any]]:
        """Chunks for one event: the role first, then text and calls, the reason of the end last."""
        out = []
        if choice not in self._begun:
            self._begun.add(choice)
            first = self._chunk(choice, {"role": "assistant", "content": ""})
            if self.context.returns_token_ids:
                first["prompt_token_ids"] = list(self.context.prompts[0])
            out.append(first)
        deltas = self._deltas(choice, event)
        says_tokens = event.token_ids and (event.logprobs is not None or self.context.returns_token_ids)
        if not deltas and (says_tokens or (self.context.includes_steps and event.report is not None)):
            deltas = [{}]
        pieces = [self._chunk(choice, delta) for delta in deltas]
        if pieces:
            self._annotate(pieces[0], choice, event)
        out += pieces
        if event.result is not None:
            parser = self._parsers.get(choice)
            word = finish_word(event.result, num_calls=0 if parser is None else parser.num_calls)
            out.append(self._chunk(choice, {}, finish_reason=word))
        return out

    def usage_chunk(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The chunk without choices that ends a stream."""
        return {
            **self.context.head(_CHUNK),
            "choices": [],
            "usage": usage_of(results),
            "metrics": metrics_of(results, self.context.num_draft_tokens),
        }

    def _deltas(self, choice: int, event: StreamEvent) -> list[dict[str, Any]]:
        if self._new_parser is None:
            return [{"content": event.text}] if event.text else []
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._new_parser()
        found = parser.add(event.text)
        if event.result is not None:
            found += parser.finish()
        return [_delta(each) for each in found]

    def _annotate(self, chunk: dict[str, Any], choice: int, event: StreamEvent) -> None:
        """Put what belongs to the event's tokens beside its first piece of text."""
        said = chunk["choices"][0]
        if event.logprobs:
            said["logprobs"] = chat_logprobs(event.logprobs, self.context)
        if self.context.returns_token_ids:
            said["token_ids"] = list(event.token_ids)
        if self.context.includes_steps:
            painter = self._painters.setdefault(choice, StepPainter(self.context.tokenizer))
            chunk["outrider"] = painter.paint(event)

    def _chunk(self, choice: int, delta: dict[str, Any], *, finish_reason: str | None = None) -> dict[str, Any]:
        said = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self.context.head(_CHUNK), "choices": [said]}
        if self.context.includes_usage:
            chunk["usage"] = None
        return chunk


def _delta(found: ToolDelta) -> dict[str, Any]:
    if found.index is None:
        return {"content": found.content}
    function: dict[str, Any] = {"arguments": found.arguments}
    call: dict[str, Any] = {"index": found.index, "function": function}
    if found.name is not None:
        call = {
            "index": found.index,
            "id": _call_id(),
            "type": "function",
            "function": {"name": found.name, **function},
        }
    return {"tool_calls": [call]}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
