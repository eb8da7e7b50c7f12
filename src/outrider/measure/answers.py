"""From a request to a text that can be scored: the prompt's tokens, the answer's tokens, and how the answer ended.

Recorded answers are read as the target would have written them: where the log has no token ids, the message is rendered
by the target's own chat template behind the prompt, and what the template puts behind the end of the turn is left off.
Answers that are missing are written by the target itself, in large batches without a drafter, once: they are appended to a
file as they finish, and a later run reads them from there.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.request import build_request
from outrider.engine.sequence import Request
from outrider.errors import DataError, OutriderError, PromptError, SamplingError
from outrider.files import append_line, read_lines
from outrider.measure.reading import Ask, RecordedAnswer
from outrider.measure.record import SkippedRow
from outrider.models.base import Target
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.params import SamplingParams

__all__ = [
    "AnswerStore",
    "AnsweredText",
    "Question",
    "answer_all",
    "generated_text",
    "kind_of",
    "limit_of",
    "question_of",
    "recorded_text",
]

_BUCKETS = (256, 512, 1024, 2048, 4096, 8192)
_TOOL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<function=", "<|tool_call|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request that is ready for the engine. ``request.prompt`` holds token ids."""

    ask: Ask
    request: Request
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredText:
    """A prompt and its answer.

    Attributes:
        id, line, labels: of the request.
        prompt, output: token ids; the token that ended the output is the last of it.
        params, seed: how the output was drawn, or is taken to have been.
        limit: most output tokens that were allowed. An output that ends below it was ended by a stop.
        is_generated: the target said it in this very run or in one before it with equal settings.
        settings: what a log says of its model and sampling.
    """

    id: str
    line: int
    labels: Mapping[str, str]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams
    seed: int
    limit: int
    is_generated: bool
    settings: Mapping[str, Any]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output


def question_of(ask: Ask, base: SamplingParams, target: Target, tokenizer: Tokenizer | None) -> Question | SkippedRow:
    """Tokenise a request, or say why it cannot be measured.

    Args:
        ask: from the reader. base: sampling fields of requests that set none.
        target: whose window counts. tokenizer: the target's.
    """
    row, spec = ask.row, target.spec
    try:
        prompt = _prompt_of(ask, tokenizer)
        if len(prompt) >= spec.max_positions:
            return SkippedRow(line=row.line, reason=f"prompt as long as the window of {spec.max_positions} tokens")
        params = _params_of(row.sampling, base)
        request = build_request(prompt, params, id=row.id, seed=params.seed or 0, spec=spec, tokenizer=tokenizer)
    except OutriderError as error:
        return SkippedRow(line=row.line, reason=" ".join(str(error).split()))
    labels = {**ask.labels, "context": _bucket(len(request.prompt))}
    return Question(ask=ask, request=request, labels=labels)


def _prompt_of(ask: Ask, tokenizer: Tokenizer | None) -> Any:
    if ask.answer is not None and ask.answer.prompt_token_ids is not None:
        return list(ask.answer.prompt_token_ids)
    prompt = ask.row.prompt
    if not isinstance(prompt, list) or not isinstance(prompt[0], dict):
        return _text_prompt(prompt, tokenizer)
    if tokenizer is None:
        raise PromptError("this target has no tokenizer; give prompts as token ids")
    return tokenizer.encode_chat([each for each in prompt if isinstance(each, dict)], tools=ask.row.tools)


def _text_prompt(prompt: Any, tokenizer: Tokenizer | None) -> Any:
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise PromptError("this target has no tokenizer; give prompts as token ids")
    return tokenizer.encode_prompt(prompt)


def _params_of(own: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    try:
        params = SamplingParams.from_dict({**asdict(base), **own}) if own else base
    except (TypeError, AttributeError) as error:
        raise SamplingError(f"a sampling field has a value of the wrong kind: {error}") from None
    return replace(params, n=1, logprobs=None)


def _bucket(num_tokens: int) -> str:
    below = 0
    for edge in _BUCKETS:
        if num_tokens < edge:
            return f"{below} to {edge - 1} tokens"
        below = edge
    return f"{below} tokens or more"


def recorded_text(question: Question, tokenizer: Tokenizer | None) -> AnsweredText | SkippedRow:
    """The text of a recorded answer, or why there is none."""
    answer = question.ask.answer
    assert answer is not None, "there is a recorded answer"
    try:
        output, has_ended = _recorded_tokens(question, answer, tokenizer)
    except (DataError, PromptError) as error:
        return SkippedRow(line=question.ask.row.line, reason=" ".join(str(error).split()))
    params = question.request.params
    output = output[: params.max_tokens]
    if not output:
        return SkippedRow(line=question.ask.row.line, reason="the recorded answer is empty")
    is_cut = not has_ended or len(output) == params.max_tokens
    calls = isinstance(answer.message, Mapping) and bool(answer.message.get("tool_calls"))
    limit = len(output) if is_cut else params.max_tokens
    text = generated_text(question, output, limit=limit, tokenizer=tokenizer)
    kind = "tool call" if calls else text.labels["kind"]
    return replace(text, labels={**text.labels, "kind": kind}, is_generated=False, settings=answer.settings)


def generated_text(
    question: Question, output: Sequence[int], *, limit: int, tokenizer: Tokenizer | None
) -> AnsweredText:
    """The text of an answer that the target wrote itself; ``limit``: most output tokens that were allowed."""
    kind = "prose" if tokenizer is None else kind_of(tokenizer.decode(output))
    return AnsweredText(
        id=question.request.id,
        line=question.ask.row.line,
        labels={**question.labels, "kind": kind},
        prompt=question.request.prompt,
        output=tuple(output),
        params=question.request.params,
        seed=question.request.seed,
        limit=limit,
        is_generated=True,
        settings={},
    )


def kind_of(text: str) -> str:
    """``tool call`` if an answer looks like one, else ``prose``."""
    text = text.strip()
    is_json = text[:1] in ("{", "[") and '"name"' in text and ('"arguments"' in text or '"parameters"' in text)
    return "tool call" if is_json or any(mark in text for mark in _TOOL_MARKS) else "prose"


def _recorded_tokens(question: Question, answer: RecordedAnswer, tokenizer: Tokenizer | None) -> tuple[list[int], bool]:
    """Output tokens, and whether the output ended by itself."""
    if answer.token_ids is not None:
        return list(answer.token_ids), answer.finish_reason != "length"
    if tokenizer is None:
        raise DataError("this target has no tokenizer; recorded answers need token ids")
    has_ended = answer.finish_reason != "length"
    eos = set(tokenizer.eos_token_ids)
    tokens = tokenizer.encode(_rendered_answer(question, answer, tokenizer))
    end = next((index for index, token in enumerate(tokens) if token in eos), len(tokens))
    closing = tokens[end : end + 1] or list(tokenizer.eos_token_ids[:1])
    return tokens[:end] + (closing if has_ended else []), has_ended


def _rendered_answer(question: Question, answer: RecordedAnswer, tokenizer: Tokenizer) -> str:
    """The answer as the template writes it behind the prompt; bare text where there is no chat."""
    row = question.ask.row
    content = answer.text or str((answer.message or {}).get("content") or "")
    if answer.message is None or not isinstance(row.prompt, list) or not isinstance(row.prompt[0], dict):
        return content
    before = [each for each in row.prompt if isinstance(each, dict)]
    head = tokenizer.render_chat(before, tools=row.tools)
    closed = tokenizer.render_chat([*before, answer.message], tools=row.tools, add_generation_prompt=False)
    if closed.startswith(head):
        return closed[len(head) :]
    if answer.message.get("tool_calls"):
        raise DataError("the chat template renders the recorded call otherwise than behind the prompt")
    return content


class AnswerStore:
    """Answers that are there already, and a file that new ones are appended to.

    Args:
        path: JSON Lines, made or continued; ``None`` keeps nothing.
        made_from: what answers depend on, as plain values.

    Raises:
        DataError: the file holds answers that were made otherwise.
    """

    def __init__(self, path: Path | None, made_from: Mapping[str, Any]) -> None:
        self._path = path
        self._made_from = dict(made_from)
        self._known: dict[str, tuple[list[int], int]] = {}
        for line in read_lines(path) if path is not None else ():
            self._check(line)
            self._known[line["id"]] = line["tokens"], line["limit"]

    def find(self, question: Question) -> tuple[list[int], int] | None:
        """Output tokens and limit of a request that was answered before."""
        return self._known.get(_key_of(question))

    def keep(self, question: Question, tokens: Sequence[int], limit: int) -> None:
        """Remember an answer."""
        if self._path is not None:
            line = {"id": _key_of(question), "tokens": list(tokens), "limit": limit, "made_from": self._made_from}
            append_line(self._path, line)

    def _check(self, line: Mapping[str, Any]) -> None:
        before = line.get("made_from", {})
        for name, value in self._made_from.items():
            if before.get(name) != value:
                raise DataError(
                    f"{self._path} holds answers made with {name} = {before.get(name)!r}, now it is {value!r}; "
                    "delete the file, or give another --out"
                )


def _key_of(question: Question) -> str:
    """Names a request by what it asks, so that an answer is never taken for another row's of the same id."""
    sampling = sorted((name, str(value)) for name, value in question.ask.row.sampling.items())
    digest = hashlib.sha256(repr((question.request.prompt, sampling)).encode()).hexdigest()
    return f"{question.request.id}:{digest[:16]}"


def answer_all(
    target: Target,
    questions: Sequence[Question],
    store: AnswerStore,
    *,
    batch_size: int,
    tokenizer: Tokenizer | None,
    on_answer: Callable[[int], None] = lambda tokens: None,
) -> Iterator[AnsweredText]:
    """Texts in the order of ``questions``; the target writes what the store does not have.

    Args:
        target: who answers. questions: requests, all with their own sampling fields.
        store: of earlier answers. batch_size: requests decoded together.
        tokenizer: the target's. on_answer: told how many tokens each new answer has.
    """
    missing = {q.request.id: q for q in questions if store.find(q) is None}
    written: dict[str, tuple[list[int], int]] = {}
    for id, tokens, limit in _decode(target, missing.values(), batch_size):
        written[id] = tokens, limit
        store.keep(missing[id], tokens, limit)
        on_answer(len(tokens))
    for question in questions:
        output, limit = written.get(question.request.id) or store.find(question) or ([], 0)
        yield generated_text(question, output, limit=limit, tokenizer=tokenizer)


def limit_of(question: Question, target: Target) -> int:
    """Most output tokens of a request: its own limit, or the end of the window."""
    return min(question.request.params.max_tokens, target.spec.max_positions - len(question.request.prompt))


def _decode(target: Target, questions: Iterable[Question], batch_size: int) -> Iterator[tuple[str, list[int], int]]:
    config = EngineConfig(max_batch_size=batch_size, num_draft_tokens=0, num_cached_prefixes=0)
    noise = random.Random(0)
    engine = Engine(target, config=config, entropy=lambda: noise.getrandbits(63))
    limits: dict[str, int] = {}
    for question in questions:
        request = question.request
        limits[request.id] = limit_of(question, target)
        engine.submit(list(request.prompt), request.params, id=request.id)
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                yield event.id, list(event.result.token_ids), limits[event.id]
