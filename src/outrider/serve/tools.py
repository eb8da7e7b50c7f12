"""Finds tool calls in the text of an answer, while it grows.

Two ways of writing calls are known:

``tags``  ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen and SmolLM models write them (SmolLM
          also a list of calls between one pair of tags);
``bare``  ``{"name": ..., "parameters": {...}}`` at the very beginning of the answer, several behind ``;`` or a line break,
          as Llama models write them (their ``<|python_tag|>`` is a special token and not part of the text).

What comes out depends on the text alone, never on how it was cut into pieces: a streamed answer has the calls of the whole
one. A call is handed out when its name is known, is one of the offered tools, and the first of its arguments is complete;
from there on its arguments stream as the model writes them. What looked like a call and turns out to be none (broken JSON,
a tool that was not offered, ``{}`` where arguments are required) is given back as text. Should the JSON break off behind
that, because the output ended there or the model erred, the call stands with the text that there is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from outrider.models.tokenizer import Tokenizer
from outrider.serve.config import ToolFormat

__all__ = ["CLOSE", "LONG", "OPEN", "CallStyle", "ToolDelta", "ToolParser", "call_style"]

CallStyle = Literal["tags", "bare"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LONG = 64
"""Characters of arguments after which a first argument that is a text is not waited for: it may be a whole file."""

_HEAD = re.compile(
    r'\s*\[?\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")
_NEXT_IN_LIST = re.compile(r"\s*\}\s*,\s*(?=\{)")
_END_OF_CALL = re.compile(r"\s*\}?\s*\]?\s*")
_HALF_AN_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")
_BLANKS, _SEPARATORS = re.compile(r"\s*"), re.compile(r"[\s;]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """A piece of an answer with tools.

    Attributes:
        content: text that is no call.
        index: which call ``name`` and ``arguments`` belong to, from 0; ``None`` for text.
        name: the tool's name, once a call, with its first piece.
        arguments: the next piece of the call's arguments (JSON text).
    """

    content: str = ""
    index: int | None = None
    name: str | None = None
    arguments: str = ""


def call_style(chosen: ToolFormat, tokenizer: Tokenizer | None) -> CallStyle:
    """How the model writes calls; ``auto`` goes by its template."""
    if chosen != "auto":
        return "bare" if chosen == "llama" else "tags"
    if tokenizer is None or tokenizer.tool_rendering == "system" or tokenizer.template_mentions(OPEN):
        return "tags"
    return "bare" if tokenizer.template_mentions("<|python_tag|>") else "tags"


class _JsonSpan:
    """Walks through JSON character by character; notices where a member of the outermost object, and it itself, ends."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, character: str) -> Literal["inside", "member", "end"]:
        """Take one character; says what it ended."""
        if self._in_string:
            self._walk_string(character)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return "end" if self._depth == 0 else "inside"
        elif character == "," and self._depth == 1:
            return "member"
        return "inside"

    @property
    def is_in_text(self) -> bool:
        """True within a text (or name) of the outermost object."""
        return self._in_string and self._depth == 1

    def _walk_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False


class ToolParser:
    """Splits one answer into text and calls.

    A state machine over the text so far: between calls, in the head of a call (up to its arguments), in its arguments, in
    its tail. ``_at`` is the first character that has not been handed out or passed over.

    Args:
        tools: the offered tools, in OpenAI's form.
        style: how the model writes calls.
        is_parallel: ``False`` keeps the first call only.

    Attributes:
        num_calls: calls handed out so far.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], *, style: CallStyle, is_parallel: bool = True) -> None:
        self.num_calls = 0
        self._required = {tool["function"]["name"]: _has_required(tool["function"]) for tool in tools}
        self._style = style
        self._is_parallel = is_parallel
        self._text = ""
        self._at = 0
        self._is_over = False
        self._blank = ""
        self._state = self._between_tags if style == "tags" else self._between_bare
        # Of the call that is being read: where it begins, its JSON, its arguments, and how far they have been walked.
        self._begin = self._json = self._arguments_at = self._walked = 0
        self._name = ""
        self._span = _JsonSpan()
        self._is_out = self._is_muted = False

    def add(self, text: str) -> list[ToolDelta]:
        """Take the next piece of the answer."""
        self._text += text
        return _merged(self._run())

    def finish(self) -> list[ToolDelta]:
        """The answer is complete: what was held back is a call or text."""
        self._is_over = True
        deltas = self._run()
        if self._blank and self.num_calls == 0:
            deltas.append(ToolDelta(content=self._blank))
        return _merged(deltas)

    def _run(self) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        before = None
        while before != (self._at, self._state):
            before = (self._at, self._state)
            deltas += self._state()
        return deltas

    # --- between calls

    def _between_tags(self) -> list[ToolDelta]:
        at = self._text.find(OPEN, self._at)
        held_back = 0 if self._is_over else _overlap(self._text, OPEN)
        end = at if at >= 0 else max(self._at, len(self._text) - held_back)
        deltas = self._content(self._text[self._at : end])
        self._at = end
        if at >= 0:
            self._open(at, at + len(OPEN))
        return deltas

    def _between_bare(self) -> list[ToolDelta]:
        """Calls stand at the beginning, or right behind another one."""
        found = (_SEPARATORS if self.num_calls else _BLANKS).match(self._text, self._at)
        assert found is not None
        if found.end() < len(self._text) and self._text[found.end()] == "{":
            self._open(self._at, found.end())
        elif found.end() < len(self._text) or self._is_over:
            self._state = self._rest
        return []

    def _rest(self) -> list[ToolDelta]:
        piece, self._at = self._text[self._at :], len(self._text)
        return self._content(piece)

    def _content(self, piece: str) -> list[ToolDelta]:
        """Text. Blanks at its end wait: before a call, and behind the last one, they are dropped."""
        piece = self._blank + piece
        kept = piece.rstrip()
        self._blank = piece[len(kept) :]
        return [ToolDelta(content=kept)] if kept else []

    # --- the head of a call

    def _open(self, begin: int, json_at: int) -> None:
        self._begin, self._json = begin, json_at
        self._walked, self._span = json_at, _JsonSpan()
        self._is_out = False
        self._state = self._head

    def _head(self) -> list[ToolDelta]:
        found = _HEAD.match(self._text, self._json)
        if found is None:
            return self._whole()
        self._name = str(_loads(found[1]))
        self._arguments_at = self._walked = found.end()
        self._span = _JsonSpan()
        self._state = self._in_arguments
        return []

    def _whole(self) -> list[ToolDelta]:
        """A call in an unusual form (arguments before the name, or as text) is read once it is complete."""
        key = _FIRST_KEY.match(self._text, self._json)
        if key is not None and self._style == "bare" and key[1] not in _CALL_KEYS:
            return self._give_up()  # some other JSON: it need not be held back
        end = self._end_of_whole()
        if end is None:
            return self._give_up() if self._is_over else []
        calls = _calls_of(_loads(self._text[self._json : end].removesuffix(CLOSE)))
        if not calls or not all(self._is_offered(*call) for call in calls):
            return self._give_up()
        deltas: list[ToolDelta] = []
        for name, arguments in calls:
            deltas += self._hand_out(name)
            deltas += self._piece(arguments)
        self._at = end
        self._state = self._between_tags if self._style == "tags" else self._between_bare
        return deltas

    def _end_of_whole(self) -> int | None:
        """Where a complete call ends, ``None`` while it may still grow."""
        if self._style == "tags":
            at = self._text.find(CLOSE, self._json)
            if at >= 0:
                return at + len(CLOSE)
            return len(self._text) if self._is_over else None
        while self._walked < len(self._text):
            self._walked += 1
            if self._span.feed(self._text[self._walked - 1]) == "end":
                return self._walked
        return None

    def _give_up(self) -> list[ToolDelta]:
        """It was no call: its beginning is text, and the search goes on behind it."""
        if self._style == "bare":
            self._at, self._state = self._begin, self._rest
            return []
        deltas = self._content(self._text[self._begin : self._json])
        self._at, self._state = self._json, self._between_tags
        return deltas

    # --- its arguments

    def _in_arguments(self) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        while self._walked < len(self._text):
            event = self._span.feed(self._text[self._walked])
            self._walked += 1
            if event != "inside" and not self._is_out:
                if not self._is_sound(is_whole=event == "end"):
                    return self._give_up()
                deltas += self._begin_arguments()
            elif not self._is_out and self._is_long_and_sound():
                deltas += self._begin_arguments()
            if event == "end":
                self._span = _JsonSpan(depth=1)
                self._state = self._tail
                return deltas + self._take_arguments()
        if not self._is_out:
            return self._give_up() if self._is_over else []
        return deltas + self._take_arguments()

    def _begin_arguments(self) -> list[ToolDelta]:
        self._is_out, self._at = True, self._arguments_at
        return self._hand_out(self._name)

    def _is_long_and_sound(self) -> bool:
        """True at the one place where a text in the first argument is long enough, if all is well so far."""
        if self._walked - self._arguments_at != LONG or not self._span.is_in_text:
            return False
        text = _HALF_AN_ESCAPE.sub(r"\1", self._text[self._arguments_at : self._walked])
        return self._is_offered(self._name, text + '"}')

    def _take_arguments(self) -> list[ToolDelta]:
        piece, self._at = self._text[self._at : self._walked], self._walked
        return self._piece(piece)

    def _is_sound(self, *, is_whole: bool) -> bool:
        """True if what was walked is JSON once it is closed, and the tool was offered."""
        text = self._text[self._arguments_at : self._walked]
        return self._is_offered(self._name, text if is_whole else text[:-1] + "}")

    def _is_offered(self, name: str, arguments: str) -> bool:
        values = _loads(arguments)
        return name in self._required and isinstance(values, dict) and bool(values or not self._required[name])

    def _hand_out(self, name: str) -> list[ToolDelta]:
        self._blank = ""
        self._is_muted = not self._is_parallel and self.num_calls > 0
        if self._is_muted:
            return []
        self.num_calls += 1
        return [ToolDelta(index=self.num_calls - 1, name=name)]

    def _piece(self, arguments: str) -> list[ToolDelta]:
        if self._is_muted or not arguments:
            return []
        return [ToolDelta(index=self.num_calls - 1, arguments=arguments)]

    # --- what stands behind its arguments

    def _tail(self) -> list[ToolDelta]:
        return self._tail_of_tagged() if self._style == "tags" else self._tail_of_bare()

    def _tail_of_tagged(self) -> list[ToolDelta]:
        following = _NEXT_IN_LIST.match(self._text, self._at)
        close = self._text.find(CLOSE, self._at)
        if following is not None:
            self._at = following.end()
            self._open(self._at, self._at)
        elif close >= 0:
            self._at, self._state = close + len(CLOSE), self._between_tags
        elif self._is_over:
            end = _END_OF_CALL.match(self._text, self._at)
            assert end is not None
            self._at, self._state = end.end(), self._rest
        return []

    def _tail_of_bare(self) -> list[ToolDelta]:
        while self._walked < len(self._text):
            event = self._span.feed(self._text[self._walked])
            self._walked += 1
            if event == "end":
                self._at, self._state = self._walked, self._between_bare
                return []
        return []


def _has_required(function: Mapping[str, Any]) -> bool:
    parameters = function.get("parameters")
    return bool(isinstance(parameters, Mapping) and parameters.get("required"))


def _loads(text: str) -> Any:
    """The JSON value, ``None`` for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls_of(value: Any) -> list[tuple[str, str]]:
    """Name and arguments (as JSON text) of a call or a list of calls; empty if it is neither."""
    calls = value if isinstance(value, list) else [value]
    out = []
    for call in calls:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        if not isinstance(name, str) or arguments is None:
            return []
        out.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
    return out


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def _merged(deltas: Sequence[ToolDelta]) -> list[ToolDelta]:
    """Neighbours of one kind as one."""
    out: list[ToolDelta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if last is not None and last.index == delta.index and delta.name is None:
            content, arguments = last.content + delta.content, last.arguments + delta.arguments
            out[-1] = replace(last, content=content, arguments=arguments)
        else:
            out.append(delta)
    return out
