"""From a file of traffic to requests, one line at a time: whatever the file's size, one line is in memory.

Lines are chats, prompts and ShareGPT conversations (:mod:`outrider.traffic`), or a log of a server::

    {"request": {"messages": [...], "temperature": 0.7}, "response": {"choices": [{"message": {...}}]}}

An answer that the file holds already is a *recorded* answer: the response of a log (of each choice), or each assistant
message of a chat, which is then one request a turn. Every line that yields no request says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, BinaryIO, Literal

from outrider.errors import DataError
from outrider.measure.record import SkippedRow
from outrider.sampling.params import SamplingParams
from outrider.traffic import Row, parse_object, row_of

__all__ = ["AnswerMode", "Ask", "RecordedAnswer", "TrafficReader"]

AnswerMode = Literal["auto", "recorded", "generate"]
"""Whose answers are scored: ``auto`` takes a log's responses and lets the target answer everything else."""

_MAX_LINE_BYTES = 16 * 2**20
_LONGEST_LABEL = 64
_NOT_LABELS = frozenset(
    ("id", "messages", "prompt", "conversations", "request", "response", "tools", "turns", "reference", "metadata")
) | frozenset(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """An answer as the file has it.

    Attributes:
        message: an assistant's message; ``None`` for the bare ``text`` of a completion.
        token_ids, prompt_token_ids: where the log has them; they are believed over the text.
        finish_reason: ``stop``, ``length`` or unknown.
        settings: what the log says of the model and its sampling (ours: ``settings`` of a result).
    """

    message: Mapping[str, Any] | None = None
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: what was asked, what results can be split by, and the answer if one is recorded."""

    row: Row
    labels: Mapping[str, str]
    answer: RecordedAnswer | None = None


class TrafficReader:
    """Reads a file once.

    Args:
        file: JSON Lines, opened for reading bytes.
        answers: whose answers are wanted.
        chat: wrap plain prompts as a user's message.

    Attributes:
        num_lines: lines read so far; num_blank: those of them that hold nothing.
    """

    def __init__(self, file: BinaryIO, *, answers: AnswerMode = "auto", chat: bool = True) -> None:
        self._file = file
        self._answers = answers
        self._chat = chat
        self._digest = hashlib.sha256()
        self._seen: set[int] = set()
        self.num_lines = 0
        self.num_blank = 0

    @property
    def digest(self) -> str:
        """Hash of what was read so far: names the traffic in a result."""
        return self._digest.hexdigest()[:32]

    def __iter__(self) -> Iterator[Ask | SkippedRow]:
        """Requests, and lines that hold none."""
        while line := self._file.readline(_MAX_LINE_BYTES):
            self.num_lines += 1
            self._digest.update(line)
            if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                self._drain()
                yield self._skip(f"line of more than {_MAX_LINE_BYTES >> 20} MiB")
                continue
            if self.num_lines == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                self.num_blank += 1
                yield self._skip("blank line")
                continue
            try:
                yield from self._asks(parse_object(line))
            except DataError as error:
                yield self._skip(str(error))

    def _skip(self, reason: str) -> SkippedRow:
        return SkippedRow(line=self.num_lines, reason=reason)

    def _drain(self) -> None:
        while (rest := self._file.readline(_MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
            self._digest.update(rest)

    def _asks(self, values: dict[str, Any]) -> list[Ask]:
        asks = self._log_asks(values) if "request" in values else self._row_asks(values)
        for ask in asks:
            key = hash(ask.row.id)
            if key in self._seen:
                raise DataError("an id that an earlier line uses")
            self._seen.add(key)
        return asks

    def _row_asks(self, values: dict[str, Any]) -> list[Ask]:
        row = row_of(values, line=self.num_lines, chat=self._chat, keep_answers=self._answers == "recorded")
        labels = labels_of(values)
        if self._answers == "recorded":
            return _recorded_turns(row, labels)
        prompt = _without_answers(row.prompt)
        return [Ask(row=replace(row, prompt=prompt), labels={**labels, "turn": _turn(prompt)})]

    def _log_asks(self, values: dict[str, Any]) -> list[Ask]:
        request = values["request"]
        if not isinstance(request, dict):
            raise DataError("request must be an object")
        row = row_of(
            {**_mapped_request(request), "id": values.get("id", request.get("id"))},
            line=self.num_lines,
            chat="prompt" not in request,  # a completion's prompt is bare text
            keep_answers=True,
        )
        labels = {**labels_of(values), "turn": _turn(row.prompt)}
        if self._answers == "generate":
            return [Ask(row=row, labels=labels)]
        found = _recorded_answers(values.get("response"))
        ids = [row.id, *(f"{row.id}/{choice}" for choice in range(1, len(found)))]
        return [
            Ask(row=replace(row, id=id), labels=labels, answer=answer) for id, answer in zip(ids, found, strict=True)
        ]


def labels_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Short fields of a row, and of its ``metadata``, that results can be split by."""
    metadata = values.get("metadata")
    every = {**(metadata if isinstance(metadata, dict) else {}), **values}
    return {name: str(value) for name, value in every.items() if name not in _NOT_LABELS and _is_label(value)}


def _is_label(value: object) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= _LONGEST_LABEL and "\n" not in value
    return isinstance(value, int)


def _turn(prompt: object) -> str:
    if not isinstance(prompt, list) or not isinstance(prompt[0], dict):
        return "1"
    return str(max(1, sum(message["role"] == "user" for message in prompt)))


def _without_answers(prompt: Any) -> Any:
    """A chat up to the last thing that somebody else than the assistant said."""
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        while prompt and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        if not prompt:
            raise DataError("messages hold nothing to answer")
    return prompt


def _recorded_turns(row: Row, labels: Mapping[str, str]) -> list[Ask]:
    """One request for each assistant message that answers something."""
    messages = row.prompt if isinstance(row.prompt, list) else []
    asks = []
    for index, message in enumerate(messages):
        if index == 0 or not isinstance(message, dict) or message["role"] != "assistant":
            continue
        before = [each for each in messages[:index] if isinstance(each, dict)]
        turn = _turn(before)
        asks.append(
            Ask(
                row=replace(row, id=f"{row.id}/turn {turn}.{index}", prompt=before),
                labels={**labels, "turn": turn},
                answer=RecordedAnswer(message=message),
            )
        )
    if not asks:
        raise DataError("no recorded answer")
    return asks


def _mapped_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """A server's request with our names. A null is a field that was not set."""
    mapped = {name: value for name, value in request.items() if value is not None}
    if "max_completion_tokens" in mapped:
        mapped["max_tokens"] = mapped.pop("max_completion_tokens")
    if mapped.get("tool_choice") == "auto":
        del mapped["tool_choice"]
    for name in ("logprobs", "top_logprobs", "n"):  # they change no token of a choice
        mapped.pop(name, None)
    return mapped


def _recorded_answers(response: object) -> list[RecordedAnswer]:
    if isinstance(response, str) and response:
        return [RecordedAnswer(text=response, message={"role": "assistant", "content": response})]
    if not isinstance(response, dict):
        raise DataError("no recorded answer: response is missing or empty")
    choices = response.get("choices")
    if isinstance(choices, list) and choices:
        return [_recorded_choice(choice, response) for choice in choices]
    if isinstance(response.get("token_ids"), list) or isinstance(response.get("text"), str):
        return [_recorded_choice(response, response)]
    if response.get("role") == "assistant":
        return [_recorded_choice({"message": response}, response)]
    raise DataError("no recorded answer: response has no choices")


def _recorded_choice(choice: object, response: Mapping[str, Any]) -> RecordedAnswer:
    if not isinstance(choice, dict):
        raise DataError("no recorded answer: a choice must be an object")
    message = choice.get("message")
    text = choice.get("text")
    if isinstance(text, str) and message is None:
        message = {"role": "assistant", "content": text}
    token_ids = _token_ids(choice.get("token_ids"))
    if not token_ids and not _says_something(message):
        raise DataError("the recorded answer is empty")
    settings = response.get("settings")
    return RecordedAnswer(
        message=message,
        text=text if isinstance(text, str) else "",
        token_ids=token_ids,
        prompt_token_ids=_token_ids(choice.get("prompt_token_ids", response.get("prompt_token_ids"))),
        finish_reason=choice.get("finish_reason"),
        settings=settings if isinstance(settings, dict) else {},
    )


def _says_something(message: object) -> bool:
    return isinstance(message, dict) and bool(message.get("content") or message.get("tool_calls"))


def _token_ids(given: object) -> tuple[int, ...] | None:
    if isinstance(given, Sequence) and given and all(isinstance(token, int) for token in given):
        return tuple(given)
    return None
