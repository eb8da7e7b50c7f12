"""Parts that the responses of both endpoints share: usage, numbers of speculation, log-probabilities, coloured text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.engine.result import GenerationResult, StreamEvent
from outrider.engine.sequence import BROKEN_GRAMMAR
from outrider.metrics import SpeculationStats
from outrider.models.tokenizer import Detokenizer, Tokenizer
from outrider.serve.errors import bad_request, internal_error
from outrider.serve.tally import cached_tokens
from outrider.types import FinishReason, StepReport, TokenLogprobs

__all__ = [
    "Reply",
    "ReplyContext",
    "StepPainter",
    "chat_logprobs",
    "finish_word",
    "metrics_of",
    "token_text",
    "usage_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyContext:
    """What every part of one response says.

    Attributes:
        id, created, model, fingerprint: as in OpenAI's objects.
        tokenizer: of the target, ``None`` if it has none.
        prompts: token ids, one list a prompt.
        num_choices: ``n``, the choices of each prompt.
        num_draft_tokens: most draft tokens a step; ``None`` on a server without a drafter.
        top_logprobs: how many likeliest tokens are listed, ``None`` for no log-probabilities.
        returns_token_ids, includes_usage, includes_steps: what the request asks for.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    tokenizer: Tokenizer | None
    prompts: Sequence[Sequence[int]]
    num_choices: int
    num_draft_tokens: int | None
    top_logprobs: int | None
    returns_token_ids: bool
    includes_usage: bool
    includes_steps: bool

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every response and chunk begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Reply(Protocol):
    """Turns what the engine says into the objects of one endpoint."""

    context: ReplyContext

    def whole(self, results: Sequence[tuple[int, GenerationResult]]) -> dict[str, Any]:
        """The response to a request that is not streamed, from (choice, result) in order of the choices."""
        ...

    def chunks(self, choice: int, event: StreamEvent) -> list[dict[str, Any]]:
        """Chunks of a stream, for one event of one choice."""
        ...

    def usage_chunk(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The chunk behind the last choice."""
        ...


def usage_of(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Token counts of a request: each prompt once, the outputs of all choices."""
    firsts = [result for result in results if result.index == 0]
    prompt = sum(result.usage.prompt_tokens for result in firsts)
    completion = sum(result.usage.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached_tokens(result) for result in firsts)},
    }


def metrics_of(results: Sequence[GenerationResult], num_draft_tokens: int | None) -> dict[str, Any]:
    """The ``metrics`` object: vLLM's numbers of speculation, and Outrider's own (docs/glossary.md).

    ``speculative_decoding`` is null on a server without a drafter.
    """
    stats = SpeculationStats.pooled(result.stats for result in results)
    own = stats.to_json(results[0].drafter if results else "")
    own["timing_ms"] = _longest([result.timing.to_json() for result in results])
    return {
        "speculative_decoding": None if num_draft_tokens is None else _as_vllm(results, stats, num_draft_tokens),
        "outrider": own,
    }


def _longest(timings: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Of each time the longest over the choices, ``None`` where none has it."""
    names = timings[0] if timings else ()
    return {name: max((t for each in timings if (t := each[name]) is not None), default=None) for name in names}


def _as_vllm(results: Sequence[GenerationResult], stats: SpeculationStats, num_draft_tokens: int) -> dict[str, Any]:
    steps = [step for result in results for step in result.steps if step.drafter and not step.is_prefill]
    histogram = [0] * (1 + max((step.accepted for step in steps), default=0))
    for step in steps:
        histogram[step.accepted] += 1
    return {
        "mean_acceptance_length": stats.accepted_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": histogram + [0] * (num_draft_tokens + 1 - len(histogram)),
        "num_spec_steps": stats.steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": num_draft_tokens,
    }


def finish_word(result: GenerationResult, *, num_calls: int = 0) -> str:
    """OpenAI's ``finish_reason``.

    Raises:
        ApiError: 400, its grammar was too dear to be followed; 500, the engine gave the choice up.
    """
    if result.error.startswith(BROKEN_GRAMMAR):
        raise bad_request(result.error, param="structured_outputs", code="constraint_too_costly")
    if result.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise internal_error()
    if num_calls and result.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return result.finish_reason.value


def token_text(token: int, tokenizer: Tokenizer | None) -> tuple[str, list[int] | None]:
    """One token as text and as bytes. Bytes that are no whole character are written as ``\\xNN``."""
    if tokenizer is None:
        return f"token_id:{token}", None
    data = tokenizer.piece(token, skip_special_tokens=False)
    return data.decode("utf-8", errors="backslashreplace"), list(data)


def chat_logprobs(entries: Sequence[TokenLogprobs], context: ReplyContext) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""
    return {"content": [_chat_entry(entry, context) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprobs, context: ReplyContext) -> dict[str, Any]:
    top = entry.top if context.top_logprobs else ()
    listed = [_named(token, logprob, context) for token, logprob in top]
    return {**_named(entry.token, entry.logprob, context), "top_logprobs": listed}


def _named(token: int, logprob: float, context: ReplyContext) -> dict[str, Any]:
    text, data = token_text(token, context.tokenizer)
    return {"token": text, "logprob": logprob, "bytes": data}


class StepPainter:
    """Says of one choice's text which of it was drafted, and of each pass what was proposed and kept.

    Pieces join to the streamed text: what the engine holds back (half a character, the beginning of a stop string) is held
    back here as well.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._held: list[tuple[str, str]] = []

    def paint(self, event: StreamEvent) -> dict[str, Any]:
        """The ``outrider`` object of a chunk."""
        if self._detokenizer is not None:
            kinds = _kinds(event.token_ids, event.report)
            for token, kind in zip(event.token_ids, kinds, strict=True):
                self._held.append((kind, self._detokenizer.add([token])))
            if event.result is not None:
                self._held.append(("plain", self._detokenizer.finish()))
        pieces = self._take(len(event.text))
        return {"pieces": pieces, "step": None if event.report is None else self._step(event.report)}

    def _take(self, num_characters: int) -> list[dict[str, str]]:
        pieces: list[dict[str, str]] = []
        while num_characters > 0 and self._held:
            kind, text = self._held.pop(0)
            if len(text) > num_characters:
                self._held.insert(0, (kind, text[num_characters:]))
                text = text[:num_characters]
            num_characters -= len(text)
            if text:
                pieces.append({"kind": kind, "text": text})
        return pieces

    def _step(self, report: StepReport) -> dict[str, Any]:
        refused = "" if self._tokenizer is None else "|".join(map(self._tokenizer.token_text, report.refused))
        return {
            "is_prefill": report.is_prefill,
            "drafter": report.drafter,
            "drafted": report.drafted,
            "accepted": report.accepted,
            "reached": list(report.reached),
            "kept": list(report.kept),
            "refused": refused,
            "tokens": len(report.tokens),
            "batch_size": report.batch_size,
            "rows": report.rows,
            "ms": round(report.draft_ms + report.verify_ms + report.other_ms, 3),
        }


def _kinds(tokens: Sequence[int], report: StepReport | None) -> list[str]:
    """What each token of a pass is: ``draft``, ``bonus``, ``correction``, or ``plain`` where nothing was drafted."""
    if report is None or not report.drafter:
        return ["plain"] * len(tokens)
    last = "correction" if report.refused else "bonus"
    return ["draft" if index < report.accepted else last for index in range(len(tokens))]
