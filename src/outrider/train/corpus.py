"""From rows of traffic to texts with a loss mask: rendered by the target's own template, trained on assistant tokens only.

Where an assistant turn lies is read off the template itself: the chat up to the turn, rendered with the head of an answer,
must be how the whole rendering begins, and the chat with the turn must end where the turn ends::

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
    -------- chat before, with the answer's head ---------> trained ----->| not: no model is asked for the line break

So no offset is counted and no template is known by name. A turn that the template renders otherwise once more turns
follow (templates that drop old reasoning do so) cannot be found like this and is context only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outrider.errors import ConfigError, DataError, PromptError
from outrider.models.tokenizer import Tokenizer
from outrider.traffic import Inputs, Row

__all__ = ["Corpus", "Text", "Turns", "marked_runs", "read_corpus"]

Turns = Literal["all", "last"]
Messages = Sequence[Mapping[str, Any]]

_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text to train on, or the prompt of one while it waits for its answer.

    Attributes:
        id: of the row; line: its number in the file.
        tokens: token ids, as the engine would be given them.
        trained: for each token, whether an assistant wrote it.
        messages, tools: the chat that an answer is asked for; empty where the tokens are all there is.
    """

    id: str
    line: int
    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    def answered(self, answer: Sequence[int]) -> Text:
        """With the target's answer behind the prompt."""
        return replace(self, tokens=(*self.tokens, *answer), trained=(*self.trained, *[True] * len(answer)))

    def cut(self, max_length: int) -> Text:
        """Without what lies past ``max_length`` tokens, and without what follows the last trained token."""
        trained = self.trained[:max_length]
        end = max((index + 1 for index, flag in enumerate(trained) if flag), default=0)
        return replace(self, tokens=self.tokens[:end], trained=trained[:end])

    def answer_tokens(self) -> list[int]:
        """What an assistant wrote."""
        return [token for token, flag in zip(self.tokens, self.trained, strict=True) if flag]

    @property
    def num_trained(self) -> int:
        """Tokens under the loss."""
        return sum(self.trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Texts, and why other rows were left out: reason to the lines concerned."""

    texts: tuple[Text, ...]
    skipped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_trained(self) -> int:
        """Tokens under the loss, over all texts."""
        return sum(text.num_trained for text in self.texts)


def read_corpus(
    inputs: Inputs, tokenizer: Tokenizer, *, wants_answers: bool, max_length: int, turns: Turns = "all"
) -> Corpus:
    """Render all rows.

    Args:
        inputs: what :func:`outrider.traffic.read_rows` read.
        tokenizer: the target's.
        wants_answers: leave answers at the end of chats off and end each text where the target's answer begins; else
            train on the answers of the file.
        max_length: most tokens of a text. Prompts that fill it are skipped, longer answers cut.
        turns: train on all assistant turns, or on the last alone.

    Raises:
        DataError: a row with tools that the template would ignore (so that thousands of rows do not vanish silently).
    """
    skipped: dict[str, list[int]] = {"not a row": [line.line for line in inputs.broken]}
    seen: set[tuple[int, ...]] = set()
    texts: list[Text] = []
    for row in inputs.rows:
        try:
            text = _render(row, tokenizer, wants_answers=wants_answers, turns=turns)
        except PromptError as error:
            _refuse_tools(row, error)
            skipped.setdefault("refused by the chat template", []).append(row.line)
            continue
        reason = _reason_to_skip(text, seen, wants_answers=wants_answers, max_length=max_length)
        if reason:
            skipped.setdefault(reason, []).append(row.line)
            continue
        seen.add(text.tokens)
        texts.append(text if wants_answers else text.cut(max_length))
    return Corpus(texts=tuple(texts), skipped={name: tuple(lines) for name, lines in skipped.items() if lines})


def marked_runs(text: Text, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The text in runs of trained and untrained tokens, for people to look at."""
    start = 0
    for index in range(1, len(text.tokens) + 1):
        if index == len(text.tokens) or text.trained[index] != text.trained[start]:
            yield tokenizer.decode(text.tokens[start:index], skip_special_tokens=False), text.trained[start]
            start = index


def _reason_to_skip(text: Text, seen: set[tuple[int, ...]], *, wants_answers: bool, max_length: int) -> str:
    if not text.tokens or (not wants_answers and not text.num_trained):
        return "no assistant text"
    if text.tokens in seen:
        return "the same as an earlier row"
    if wants_answers:
        return f"prompt of {max_length} tokens or more" if len(text.tokens) >= max_length else ""
    return "" if any(text.trained[:max_length]) else f"no assistant text within {max_length} tokens"


def _refuse_tools(row: Row, error: PromptError) -> None:
    calls = isinstance(row.prompt, list) and any(isinstance(m, dict) and m.get("tool_calls") for m in row.prompt)
    if row.tools or calls:
        raise DataError(f"row {row.id!r} (line {row.line}): {error} (--tool-rendering system)") from None


def _render(row: Row, tokenizer: Tokenizer, *, wants_answers: bool, turns: Turns) -> Text:
    if isinstance(row.prompt, str) or not row.prompt or isinstance(row.prompt[0], int):
        ids = tokenizer.encode_prompt(row.prompt) if isinstance(row.prompt, str) else row.prompt
        tokens = tuple(token for token in ids if isinstance(token, int))
        return Text(id=row.id, line=row.line, tokens=tokens, trained=(False,) * len(tokens))
    messages = [message for message in row.prompt if isinstance(message, dict)]
    while wants_answers and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        return Text(id=row.id, line=row.line, tokens=(), trained=())
    tools = row.tools or []
    chat = _Chat(messages=messages, tools=tools, tokenizer=tokenizer, is_open=wants_answers)
    tokens_, trained = chat.masked_tokens(turns)
    return Text(id=row.id, line=row.line, tokens=tokens_, trained=trained, messages=tuple(messages), tools=tuple(tools))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    """A chat and its rendering; ``is_open``: it ends with the head of an answer."""

    messages: Messages
    tools: Messages
    tokenizer: Tokenizer
    is_open: bool

    def masked_tokens(self, turns: Turns) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        text = self._rendered(len(self.messages), is_open=self.is_open)
        ids, spans = self.tokenizer.encode_with_spans(text)
        trained = [False] * len(ids)
        for start, end in self._answers(text, turns):
            for index, (first, past) in enumerate(spans):
                if first >= start and past <= end and past > first:
                    trained[index] = True
                    if ids[index] in self.tokenizer.eos_token_ids:
                        break  # what the template puts behind the end of a turn, nobody is asked to predict
        return tuple(ids), tuple(trained)

    def _answers(self, text: str, turns: Turns) -> Iterator[tuple[int, int]]:
        """Where the trained answers lie in the rendered chat, in characters."""
        indexes = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if turns == "last":
            indexes = [] if self.is_open else indexes[-1:]
        for index in indexes:
            content = self.messages[index].get("content") or ""
            if not content and not self.messages[index].get("tool_calls"):
                continue
            closed = self._rendered(index + 1, is_open=False)
            start = self._start(index, closed, content)
            if start is None or not text.startswith(closed):
                continue
            inserted = _EMPTY_THOUGHT.match(closed, start)
            if inserted and not content.lstrip().startswith("<think>"):
                start = inserted.end()
            yield start, len(closed)

    def _start(self, index: int, closed: str, content: str) -> int | None:
        if index > 0:
            head = self._rendered(index, is_open=True)
            return len(head) if closed.startswith(head) else None
        found = closed.rfind(content)  # nothing comes before: no head can be rendered
        return found if found >= 0 else None

    def _rendered(self, num_messages: int, *, is_open: bool) -> str:
        return self.tokenizer.render_chat(
            self.messages[:num_messages], tools=self.tools or None, add_generation_prompt=is_open
        )


def check_any_trained(num_trained: int, skipped: Mapping[str, Sequence[int]], source: str) -> None:
    """Refuse to train on nothing.

    Raises:
        ConfigError: no token is under the loss; the text says where all rows went.
    """
    if num_trained:
        return
    reasons = ", ".join(f"{len(lines)} {reason}" for reason, lines in skipped.items()) or "no rows at all"
    raise ConfigError(f"{source} leaves nothing to train on: {reasons}; outrider train eagle3 --preview 5 shows rows")


def summary_of(corpus: Corpus) -> dict[str, Any]:
    """Counts, as plain values."""
    lengths = Counter[str](texts=len(corpus.texts), tokens=sum(len(text.tokens) for text in corpus.texts))
    return {
        **lengths,
        "trained tokens": corpus.num_trained,
        "skipped": {reason: len(lines) for reason, lines in corpus.skipped.items()},
    }
