"""Turns a chat into a prompt with the model's own template.

Messages are validated and brought into one form first: content is text (a list of text parts is joined, null is empty).
Tools given to a template that never mentions them would be ignored silently, so they are refused, unless tool rendering
``system`` was chosen. That rendering is this one and no other:

- the first system message (one is put in front if there is none) ends with a blank line, the sentence
  :data:`TOOL_SENTENCE`, and the tools as JSON, one a line, between ``<tools>`` and ``</tools>``;
- an assistant's tool calls are appended to its text, each as ``{"name": ..., "arguments": ...}`` between ``<tool_call>``
  and ``</tool_call>``;
- a tool's answer becomes a user message with the answer between ``<tool_response>`` and ``</tool_response>``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import PromptError
from outrider.models.chat_sandbox import render_template, uses_variable

__all__ = ["TOOL_SENTENCE", "ChatTemplate", "ToolRendering", "checked_messages"]

ToolRendering = Literal["template", "system"]
Message = dict[str, Any]

TOOL_SENTENCE = (
    "You may call these tools. To call one, answer with a JSON object with its name and arguments "
    "between <tool_call> and </tool_call>."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A model's chat template and how tools are rendered.

    Attributes:
        source: Jinja source, ``None`` if the model has none; tool_source: used instead when tools are given.
        special_tokens: names such as ``bos_token`` to texts.
        tool_rendering: ``template`` or ``system`` (see the module).
    """

    source: str | None
    tool_source: str | None
    special_tokens: Mapping[str, str]
    tool_rendering: ToolRendering

    @property
    def hash(self) -> str:
        """Names everything that turns a chat into a prompt."""
        parts: list[Any] = [self.source, self.tool_source, dict(self.special_tokens), self.tool_rendering]
        if self.tool_rendering == "system":
            parts.append(TOOL_SENTENCE)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a chat; see :meth:`outrider.models.tokenizer.Tokenizer.render_chat`."""
        checked, checked_tools = checked_messages(messages), _checked_tools(tools)
        source = self.tool_source if checked_tools and self.tool_source is not None else self.source
        if source is None:
            raise PromptError("this model has no chat template; give raw text or token ids instead of messages")
        if self.tool_rendering == "system":
            checked, checked_tools = _with_tools_as_text(checked, checked_tools), None
        else:
            _refuse_ignored_tools(source, checked, checked_tools)
        variables = {
            **self.special_tokens,
            "messages": checked,
            "tools": checked_tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return render_template(source, variables)

    def plain_messages(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Message]:
        """See :meth:`outrider.models.tokenizer.Tokenizer.plain_messages`."""
        checked, checked_tools = checked_messages(messages), _checked_tools(tools)
        return _with_tools_as_text(checked, checked_tools) if self.tool_rendering == "system" else checked


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Validate messages and bring their content into the form of plain text.

    Raises:
        PromptError: names the message's index and what is wrong with it.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise PromptError("the chat has no messages; give at least one")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise PromptError(f"message {index} must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(f"message {index} has role {role!r}; allowed: a text such as system, user or assistant")
    if "content" not in message and not message.get("tool_calls"):
        raise PromptError(f"message {index} ({role}) has no content")
    if not isinstance(message.get("tool_calls") or [], list | tuple):
        raise PromptError(f"message {index} ({role}) has tool_calls that are not a list")
    return {**message, "content": _checked_content(index, message.get("content"))}


def _checked_content(index: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "".join(_checked_part(index, part) for part in content)
    raise PromptError(
        f"message {index} has content of type {type(content).__name__}; allowed: text or a list of text parts"
    )


def _checked_part(index: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    given = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PromptError(f'message {index} has a content part of type {given!r}; allowed: {{"type": "text", "text": ...}}')


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise PromptError("tools must be a list of objects")
    return [dict(tool) for tool in tools]


def _refuse_ignored_tools(source: str, messages: Sequence[Message], tools: list[Message] | None) -> None:
    way_out = "choose tool rendering 'system' to describe tools in the system message"
    if tools and not uses_variable(source, "tools"):
        raise PromptError(
            f"this model's chat template knows no tools and would ignore the {len(tools)} given; {way_out}"
        )
    for index, message in enumerate(messages):
        if message.get("tool_calls") and "tool_calls" not in source:
            raise PromptError(
                f"message {index} has tool calls, which this model's chat template would ignore; {way_out}"
            )


def _with_tools_as_text(messages: Sequence[Message], tools: list[Message] | None) -> list[Message]:
    out = [_tool_traffic_as_text(index, message) for index, message in enumerate(messages)]
    if not tools:
        return out
    lines = "\n".join(_json(tool) for tool in tools)
    described = f"{TOOL_SENTENCE}\n<tools>\n{lines}\n</tools>"
    if out[0]["role"] != "system":
        return [{"role": "system", "content": described}, *out]
    return [{**out[0], "content": f"{out[0]['content']}\n\n{described}"}, *out[1:]]


def _tool_traffic_as_text(index: int, message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    texts += [f"<tool_call>\n{_call_text(index, call)}\n</tool_call>" for call in calls]
    return {"role": message["role"], "content": "\n".join(texts)}


def _call_text(index: int, call: object) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"message {index} has a tool call without a function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Models do write broken JSON; their text is shown to them as it was.
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            arguments = json.loads(arguments)
    return _json({"name": function["name"], "arguments": arguments})


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise PromptError(f"tools and tool calls must be JSON values: {error}") from None
