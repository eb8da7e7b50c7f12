"""Prompts as people keep them: JSON Lines of chats, texts, token ids or ShareGPT conversations.

A row is one of

- ``{"messages": [{"role": "user", "content": "..."}]}``: a chat in OpenAI's form, ``tools`` allowed;
- ``{"prompt": "..."}`` or ``{"prompt": [1, 2, 3]}``: text, or token ids;
- ``{"conversations": [{"from": "human", "value": "..."}]}``: ShareGPT; answers at the end are left off, since the last
  question is what the model is to answer, unless the reader asks for them;

each with an optional ``id`` and any sampling field by its name, which then wins over the command's flags for this row.
A broken line is reported with its number and the others are still done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.errors import DataError, nearest
from outrider.sampling.params import SamplingParams

__all__ = ["BrokenLine", "Inputs", "Row", "parse_object", "read_rows", "row_of", "wrap"]

_PROMPT_KEYS = ("messages", "prompt", "conversations")
_SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams))
# Fields of other servers that change the output and that no setting here honours: named, never passed over in silence.
_REFUSED_FIELDS = {
    "best_of": "best_of is not supported; use n",
    "max_completion_tokens": "max_completion_tokens is not supported; use max_tokens",
    "max_new_tokens": "max_new_tokens is not supported; use max_tokens",
    "top_logprobs": "top_logprobs is not supported; give logprobs the number of likeliest tokens",
    "response_format": "response_format is not supported; use structured_outputs",
    "guided_json": "guided_json is not supported; use structured_outputs",
    "guided_regex": "guided_regex is not supported; use structured_outputs",
    "guided_choice": "guided_choice is not supported; use structured_outputs",
    "guided_grammar": "guided_grammar is not supported; use structured_outputs",
    "tool_choice": "tool_choice is not supported",
    "functions": "functions is not supported; use tools",
    "use_beam_search": "use_beam_search is not supported",
    "length_penalty": "length_penalty is not supported",
    "typical_p": "typical_p is not supported",
}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt to answer.

    Attributes:
        id: the row's ``id``, or the number of its line.
        line: number of its line, from 1; 0 for a prompt that did not come from a file of rows.
        prompt: raw text, token ids or chat messages, as :class:`outrider.Engine` takes them.
        tools: OpenAI tool definitions for the chat template.
        sampling: sampling fields that this row sets for itself.
    """

    id: str
    line: int
    prompt: str | list[int] | list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLine:
    """A line that could not be used, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What was read: usable rows, broken lines, and whether it was a file of rows or one prompt."""

    rows: tuple[Row, ...]
    broken: tuple[BrokenLine, ...] = ()
    source: str = "prompt"
    is_file: bool = False


def read_rows(data: bytes, *, name: str, chat: bool = True, keep_answers: bool = False) -> Inputs:
    """Read JSON Lines; blank lines are passed over, broken ones are collected with their numbers.

    Args:
        data: the file. name: what errors call it.
        chat: wrap plain prompts as a user's message.
        keep_answers: leave the answers at the end of ShareGPT conversations in (for training on them).

    Raises:
        DataError: not one usable or broken line, only blank ones.
    """
    rows: list[Row] = []
    broken: list[BrokenLine] = []
    seen: set[str] = set()
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = row_of(parse_object(raw), line=line, chat=chat, keep_answers=keep_answers)
            if row.id in seen:
                raise DataError(f"id {row.id!r} was used by an earlier line; ids must differ")
        except DataError as error:
            broken.append(BrokenLine(line=line, reason=str(error)))
            continue
        seen.add(row.id)
        rows.append(row)
    if not rows and not broken:
        raise DataError(f"{name} is empty; it must hold one JSON object a line")
    return Inputs(rows=tuple(rows), broken=tuple(broken), source=name, is_file=True)


def wrap(prompt: str, chat: bool) -> str | list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if chat else prompt


def row_of(row: Mapping[str, Any], *, line: int, chat: bool = True, keep_answers: bool = False) -> Row:
    """One row from its object; arguments as for :func:`read_rows`.

    Raises:
        DataError: what is wrong with it.
    """
    for name, reason in _REFUSED_FIELDS.items():
        if row.get(name) is not None:
            raise DataError(reason)
    key = _prompt_key(row)
    tools = row.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError("tools must be a list of objects")
    prompt = _PARSERS[key](row[key], chat, keep_answers)
    if tools is not None and not _is_chat(prompt):
        raise DataError("tools need a chat; give messages")
    return Row(
        id=_row_id(row, line),
        line=line,
        prompt=prompt,
        tools=tools,
        sampling=_row_sampling(row),
    )


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        DataError: it is none.
    """
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError("not JSON that can be read: nested too deep") from None
    if not isinstance(row, dict):
        raise DataError(f"a JSON object is needed, not {_kind(row)}")
    return row


def _prompt_key(row: Mapping[str, Any]) -> str:
    found = [key for key in _PROMPT_KEYS if key in row]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"both {found[0]} and {found[1]} are given; keep one of them")
    close = next((hint for key in row if (hint := nearest(key, _PROMPT_KEYS))), "")
    raise DataError(f"no prompt: one of {', '.join(_PROMPT_KEYS)} is needed{close}")


def _row_id(row: Mapping[str, Any], line: int) -> str:
    given = row.get("id")
    if given is None:
        return str(line)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise DataError(f"id must be a text or an integer, not {_kind(given)}")
    return str(given)


def _row_sampling(row: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: value for name, value in row.items() if name in _SAMPLING_FIELDS}
    bias = sampling.get("logit_bias")
    if isinstance(bias, dict):
        # JSON knows only text as keys.
        if not all(key.isdecimal() for key in bias):
            raise DataError("logit_bias must map token ids to numbers")
        sampling["logit_bias"] = {int(key): value for key, value in bias.items()}
    return sampling


def _parse_prompt(given: Any, chat: bool, keep_answers: bool) -> str | list[int] | list[dict[str, Any]]:
    if isinstance(given, str):
        if not given:
            raise DataError("prompt is empty")
        return wrap(given, chat)
    if isinstance(given, list) and given and all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        return given
    raise DataError(f"prompt must be a text or a list of token ids, not {_kind(given)}")


def _parse_messages(given: Any, chat: bool, keep_answers: bool) -> list[dict[str, Any]]:
    if not chat:
        raise DataError("messages need the chat template; leave --raw out")
    if not isinstance(given, list) or not given:
        raise DataError("messages must be a list with at least one message")
    return [_parse_message(message, index) for index, message in enumerate(given)]


def _parse_message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"messages[{index}] must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": _join_parts(content, index)}
    if content is not None and not isinstance(content, str):
        raise DataError(f"messages[{index}].content must be a text, not {_kind(content)}")
    return {**message, "content": content or ""}


def _join_parts(parts: Sequence[Any], index: int) -> str:
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise DataError(f"messages[{index}].content holds a part of type {kind!r}; only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def _parse_conversations(given: Any, chat: bool, keep_answers: bool) -> list[dict[str, Any]]:
    if not chat:
        raise DataError("conversations need the chat template; leave --raw out")
    if not isinstance(given, list):
        raise DataError("conversations must be a list of turns")
    messages = [_parse_turn(turn, index) for index, turn in enumerate(given)]
    while messages and messages[-1]["role"] == "assistant" and not keep_answers:
        messages.pop()
    if not messages:
        raise DataError("conversations hold no question to answer")
    return messages


def _parse_turn(turn: Any, index: int) -> dict[str, Any]:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f"conversations[{index}] must be an object with from and value")
    role = _SHAREGPT_ROLES.get(str(turn.get("from")))
    if role is None:
        allowed = ", ".join(_SHAREGPT_ROLES)
        raise DataError(f"conversations[{index}].from {turn.get('from')!r} is unknown; allowed: {allowed}")
    return {"role": role, "content": turn["value"]}


_PARSERS = {"messages": _parse_messages, "prompt": _parse_prompt, "conversations": _parse_conversations}


def _is_chat(prompt: str | list[int] | list[dict[str, Any]]) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
