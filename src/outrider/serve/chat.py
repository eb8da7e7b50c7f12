"""From messages to the token ids of a prompt, through the tokenizer's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import PromptError, nearest
from outrider.models.tokenizer import Tokenizer
from outrider.serve.errors import bad_request
from outrider.serve.protocol import ChatRequest

__all__ = ["ROLES", "chat_prompt"]

ROLES: Mapping[str, tuple[str, ...]] = {
    "system": ("content", "name"),
    "developer": ("content", "name"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "tool_calls", "refusal", "reasoning_content"),
    "tool": ("content", "name", "tool_call_id"),
}
"""Roles, and the fields that a message of each may have."""

_PART_FIELDS = ("type", "text", "cache_control")
"""``cache_control`` marks how far a prompt is worth caching; here every prompt is."""
_CALL_FIELDS = ("id", "type", "function", "index")


def chat_prompt(request: ChatRequest, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a chat.

    Raises:
        ApiError: 400, a message's field that would be ignored.
        PromptError: no tokenizer or template, tools that the template ignores, a chat that it refuses.
    """
    if tokenizer is None:
        raise PromptError("this target has no tokenizer; use /v1/completions with token ids")
    messages = [_message(index, message, tokenizer) for index, message in enumerate(request.messages)]
    adds_head = request.add_generation_prompt is not False
    text = tokenizer.render_chat(messages, tools=_tools(request), add_generation_prompt=adds_head)
    return tokenizer.encode(text)


def _tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """Tools for the template; with ``tool_choice`` none the model is shown none."""
    if not request.tools or request.tool_choice == "none":
        return None
    return [_shown(tool.raw) for tool in request.tools]


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """As it was sent, without ``strict``, which tells the server what to do and not the model."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _message(index: int, message: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = nearest(str(role), ROLES)
        raise _refused(index, "role", f"{str(role)[:40]!r} is unknown; allowed: {', '.join(ROLES)}{hint}")
    for name, value in message.items():
        if name != "role" and value is not None and name not in ROLES[role]:
            hint = nearest(name, ROLES[role]) or f"; allowed beside {role}: {', '.join(ROLES[role])}"
            if not (name == "annotations" and value == []):  # in answers that OpenAI's own servers gave
                raise _refused(index, name[:40], f"is unknown{hint}")
    _refuse_unread(index, message, tokenizer)
    _refuse_unknown_in_parts(index, message.get("content"))
    out = {name: value for name, value in message.items() if name in ROLES[role] and value is not None}
    if "content" in message:
        out["content"] = message["content"]
    out["role"] = "system" if role == "developer" else role
    if out.get("tool_calls"):
        out["tool_calls"] = _calls(index, out["tool_calls"], is_template=tokenizer.tool_rendering == "template")
    return out


def _refuse_unread(index: int, message: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """A name, a refusal or a reasoning text that the template never reads would be ignored."""
    for name in ("name", "refusal", "reasoning_content"):
        # A tool's answer is tied to its call by id; the name beside it repeats what the call says.
        is_given = message.get(name) is not None and not (name == "name" and message["role"] == "tool")
        if is_given and not tokenizer.template_mentions(name):
            raise _refused(index, name, "is not read by this model's chat template; leave it out")


def _refuse_unknown_in_parts(index: int, content: Any) -> None:
    """Text parts hold a text and nothing that would be ignored; of what else they are the tokenizer's check says."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, Mapping) and part.get("type") == "text":
            for name in part:
                if name not in _PART_FIELDS:
                    hint = nearest(str(name), _PART_FIELDS)
                    raise _refused(index, f"content[{number}].{str(name)[:40]}", f"is unknown{hint}")


def _calls(index: int, calls: Any, *, is_template: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _refused(index, "tool_calls", "must be a list")
    return [_call(f"{index}].tool_calls[{number}", call, is_template) for number, call in enumerate(calls)]


def _call(where: str, call: Any, is_template: bool) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise bad_request(f"messages[{where}] must be an object with a function", param="messages")
    for name in call:
        if name not in _CALL_FIELDS:
            raise _refused(where, str(name)[:40], f"is unknown{nearest(str(name), _CALL_FIELDS)}")
    function = dict(call["function"])
    if set(function) - {"name", "arguments"} or not isinstance(function.get("name"), str):
        raise _refused(where, "function", "must be an object with name and arguments")
    if is_template and isinstance(function.get("arguments"), str):
        # Templates write arguments as JSON themselves, so they want the object, not its text.
        function["arguments"] = _arguments(where, function["arguments"])
    return {**call, "function": function}


def _arguments(where: str, text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise _refused(where, "function.arguments", "is not JSON") from None


def _refused(index: int | str, name: str, why: str) -> Exception:
    return bad_request(f"messages[{index}].{name} {why}", param=f"messages[{index}].{name}")
