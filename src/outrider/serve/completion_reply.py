"""Responses of ``/v1/completions``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from outrider.engine.result import GenerationResult, StreamEvent
from outrider.serve.replies import ReplyContext, StepPainter, finish_word, metrics_of, token_text, usage_of
from outrider.types import TokenLogprobs

__all__ = ["CompletionReply"]

_KIND = "text_completion"


class CompletionReply:
    """See :class:`outrider.serve.replies.Reply`.

    Args:
        context: what every part says.
    """

    def __init__(self, context: ReplyContext) -> None:
        self.context = context
        self._offsets: Counter[int] = Counter()
        self._painters: dict[int, StepPainter] = {}
        self._begun: set[int] = set()

    def whole(self, results: Sequence[tuple[int, GenerationResult]]) -> dict[str, Any]:
        """The response, from (choice, result) in order of the choices."""
        only = [result for _, result in results]
        out = self.context.head(_KIND)
        out["choices"] = [self._choice(choice, result) for choice, result in results]
        out["usage"] = usage_of(only)
        out["metrics"] = metrics_of(only, self.context.num_draft_tokens)
        return out

    def _choice(self, choice: int, result: GenerationResult) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": choice,
            "text": result.text,
            "logprobs": None if result.logprobs is None else self._logprobs(choice, result.logprobs),
            "finish_reason": finish_word(result),
        }
        if self.context.returns_token_ids:
            out["token_ids"] = list(result.token_ids)
            out["prompt_token_ids"] = list(self._prompt(choice))
        return out

    def chunks(self, choice: int, event: StreamEvent) -> list[dict[str, Any]]:
        """Chunks for one event; the last one of a choice says why it ended."""
        is_wanted = event.text or event.logprobs or self.context.returns_token_ids or self.context.includes_steps
        if not is_wanted and event.result is None:
            return []
        said: dict[str, Any] = {
            "index": choice,
            "text": event.text,
            "logprobs": self._logprobs(choice, event.logprobs) if event.logprobs else None,
            "finish_reason": None if event.result is None else finish_word(event.result),
        }
        if self.context.returns_token_ids:
            said["token_ids"] = list(event.token_ids)
            if choice not in self._begun:
                self._begun.add(choice)
                said["prompt_token_ids"] = list(self._prompt(choice))
        chunk = {**self.context.head(_KIND), "choices": [said]}
        if self.context.includes_usage:
            chunk["usage"] = None
        if self.context.includes_steps:
            painter = self._painters.setdefault(choice, StepPainter(self.context.tokenizer))
            chunk["outrider"] = painter.paint(event)
        return [chunk]

    def usage_chunk(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The chunk without choices that ends a stream."""
        return {
            **self.context.head(_KIND),
            "choices": [],
            "usage": usage_of(results),
            "metrics": metrics_of(results, self.context.num_draft_tokens),
        }

    def _prompt(self, choice: int) -> Sequence[int]:
        return self.context.prompts[choice // self.context.num_choices]

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """OpenAI's older form: parallel lists. Offsets count characters of the tokens' own texts."""
        texts = [token_text(entry.token, self.context.tokenizer)[0] for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(text)
        top = [{token_text(t, self.context.tokenizer)[0]: lp for t, lp in entry.top} for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": top if self.context.top_logprobs else None,
            "text_offset": offsets,
        }
