"""What an answer must look like where calls of tools are asked for, or must fit their schemas.

``tool_choice`` ``required`` or a named function: nothing but calls. A tool with ``strict``, where the model decides: any
text, but what begins as a call is a whole one that fits. Tools beside ``response_format``: calls, or an answer of that form.

Arguments hold only what their schema declares, unless it says ``additionalProperties``: a model that may invent names does,
and the function behind a tool has no parameter for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.serve.errors import bad_request
from outrider.serve.protocol import ChatRequest, ChosenTool
from outrider.serve.sampling import constraint_of
from outrider.serve.tools import CLOSE, OPEN, CallStyle

__all__ = ["call_grammar", "tool_constraint"]

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a tool that declares no parameters, which in OpenAI's API means that it takes none."""
_SUBSCHEMAS = ("properties", "$defs", "definitions")
_COMBINING = ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties")
_VALUES = ("const", "enum", "default", "examples")
_OPEN = ("additionalProperties", "patternProperties", "anyOf", "oneOf", "$ref")


def tool_constraint(request: ChatRequest, style: CallStyle) -> dict[str, Any] | None:
    """The constraint that a request's tools ask for, in the form of ``structured_outputs``; ``None`` for free answers.

    Raises:
        ApiError: 400, the answer is constrained otherwise already.
    """
    choice, tools = request.tool_choice, [tool.raw for tool in request.tools or ()]
    if not tools or choice == "none":
        return None
    is_parallel = request.parallel_tool_calls is not False
    if choice not in (None, "auto"):
        if constraint_of(request) is not None:
            message = "tool_choice asks for calls, so response_format and structured_outputs must be left out"
            raise bad_request(message, param="tool_choice")
        if isinstance(choice, ChosenTool):
            tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
            is_parallel = False
        return {"grammar": call_grammar(tools, style=style, is_parallel=is_parallel)}
    if request.structured_outputs is not None:
        return None  # it says what the whole answer is
    form = constraint_of(request)
    if form is not None:
        answer = form.get("json", {"type": "object"})
        return {"grammar": call_grammar(tools, style=style, is_parallel=is_parallel, otherwise=answer)}
    if any(tool.function.strict for tool in request.tools or ()):
        return {"grammar": call_grammar(tools, style=style, is_parallel=is_parallel, otherwise="text")}
    return None


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    *,
    style: CallStyle,
    is_parallel: bool,
    otherwise: Mapping[str, Any] | str | None = None,
) -> str:
    """A Lark grammar (llguidance's dialect) of answers with calls of these tools, in the model's own way.

    The parser (:mod:`outrider.serve.tools`) reads what comes out as it reads free answers.

    Args:
        tools: in OpenAI's form.
        style: how the model writes calls.
        is_parallel: several calls, or one.
        otherwise: what the answer may be instead: ``None`` for nothing, ``"text"``, or JSON of this schema.
    """
    key = "arguments" if style == "tags" else "parameters"
    schema = _calls_schema([tool["function"] for tool in tools], key)
    # One way of writing blanks: a model that may write any could write nothing else.
    tight = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    body = f"body: %json {_json({**schema, 'x-guidance': tight})}\n"
    if otherwise == "text":
        return _text_or_calls(style, is_parallel) + body
    call, more = ('"' + OPEN + '" rest', '"\\n" call') if style == "tags" else ("body", '"; " call')
    calls = f"call ({more})*" if is_parallel else "call"
    lines = f'start: {calls}\ncall: {call}\nrest: "\\n" body "\\n{CLOSE}"\n' + body
    if otherwise is None:
        return lines
    assert isinstance(otherwise, Mapping)
    return lines.replace("start: ", "start: answer | ", 1) + f"answer: %json {_json(otherwise)}\n"


def _text_or_calls(style: CallStyle, is_parallel: bool) -> str:
    if style == "bare":
        # What begins with a brace is read as a call, so a text begins with anything else.
        calls = 'body ("; " body)*' if is_parallel else "body"
        return f"start: {calls} | TEXT\nTEXT: /(\\s*[^{{\\s](.|\\n)*)?/\n"
    several = "(begun rest)* TEXT" if is_parallel else "TEXT | begun rest"
    begun = f'begun[lazy]: TEXT "{OPEN}"\n'  # lazy: a text ends with the first tag
    return f'start: {several}\n{begun}rest: "\\n" body "\\n{CLOSE}"\nTEXT: /(.|\\n)*/\n'


def _calls_schema(functions: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """JSON schema of a call of one of these functions."""
    if len(functions) == 1:
        return _call_schema(functions[0], key, at="#")
    return {"anyOf": [_call_schema(function, key, at=f"#/anyOf/{i}") for i, function in enumerate(functions)]}


def _call_schema(function: Mapping[str, Any], key: str, *, at: str) -> dict[str, Any]:
    """JSON schema of one function's call, which stands at this place of the whole."""
    given = function.get("parameters")
    arguments = (
        NO_ARGUMENTS if given is None else _moved(_closed(given or {"type": "object"}), f"{at}/properties/{key}")
    )
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema with its references to parts of itself (``#/$defs/Place``) as they read from where it stands now."""
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if str(value.get("$ref", "")).startswith("#"):
                value["$ref"] = place + value["$ref"][1:]
            waiting += [each for name, each in value.items() if name not in _VALUES]
        elif isinstance(value, list):
            waiting += value
    return schema


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, its objects without members that it does not declare, where it leaves that open.

    Left alone where schemas are combined: each part would forbid what the other declares.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    objects, waiting = [], [copy]
    while waiting:
        value = waiting.pop()
        if any(word in value for word in _COMBINING):
            return copy
        if isinstance(value.get("properties"), dict) and not any(word in value for word in _OPEN):
            objects.append(value)
        waiting += _subschemas(value)
    for value in objects:
        value["additionalProperties"] = False
    return copy


def _subschemas(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    named = [schema[name].values() for name in _SUBSCHEMAS if isinstance(schema.get(name), dict)]
    lists = [schema[name] for name in ("anyOf", "oneOf", "prefixItems") if isinstance(schema.get(name), list)]
    found = [each for group in (*named, *lists, [schema.get("items")]) for each in group]
    return [each for each in found if isinstance(each, dict)]


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
