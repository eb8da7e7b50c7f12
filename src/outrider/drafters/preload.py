"""Past answers from a JSON Lines file, for drafters that learn from text.

A row's answer is the first of these that it has: ``token_ids`` (what ``outrider generate --json`` writes), ``text``,
the assistant messages of ``messages``, the ``gpt`` turns of ShareGPT ``conversations``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import DataError, PromptError
from outrider.models.tokenizer import Tokenizer

__all__ = ["read_answers"]


def read_answers(path: Path, tokenizer: Tokenizer | None, *, vocab_size: int) -> list[list[int]]:
    """Token ids of every answer in the file, in order.

    Args:
        path: JSON Lines, UTF-8.
        tokenizer: of the target; may be ``None`` if all rows have ``token_ids``.
        vocab_size: of the target.

    Raises:
        DataError: a file that cannot be read, a broken line (named by number), or no answer at all.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"file of past answers {path} cannot be read: {error.strerror}") from None
    answers = [
        answer
        for number, line in enumerate(lines, start=1)
        if line.strip()
        for answer in _answers(_parse(line, path, number), tokenizer, vocab_size, f"{path}, line {number}")
        if answer
    ]
    if not answers:
        raise DataError(
            f"{path} holds no answers; give rows with token_ids, text, or messages or conversations with assistant turns"
        )
    return answers


def _parse(line: bytes, path: Path, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number} is not a JSON object")
    return row


def _answers(row: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int, where: str) -> Iterator[list[int]]:
    if "token_ids" in row:
        yield _checked_ids(row["token_ids"], vocab_size, where)
        return
    for text in _texts(row, where):
        if tokenizer is None:
            raise DataError(f"{where} holds text, but this target has no tokenizer; give token_ids")
        try:
            yield tokenizer.encode(text)
        except PromptError as error:
            raise DataError(f"{where}: {error}") from None


def _checked_ids(ids: object, vocab_size: int, where: str) -> list[int]:
    if not isinstance(ids, list):
        raise DataError(f"{where}: token_ids is {ids!r}; give a list of token ids")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise DataError(f"{where}: token id {token!r} is not possible; allowed: 0 to {vocab_size - 1}")
    return ids


def _texts(row: Mapping[str, Any], where: str) -> Iterator[str]:
    if isinstance(row.get("text"), str):
        yield row["text"]
        return
    for key, speaker, name, content in (
        ("messages", "role", "assistant", "content"),
        ("conversations", "from", "gpt", "value"),
    ):
        turns = row.get(key, [])
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise DataError(f"{where}: {key} is not a list of objects")
        yield from (t[content] for t in turns if t.get(speaker) == name and isinstance(t.get(content), str))
