"""A chat in which tools were called before, so that a model that was not trained to call tools does so of its own will."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["PLACES", "TOOLS", "tool_chat"]

_CITY: Mapping[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Sequence[Mapping[str, Any]] = tuple(
    {"type": "function", "function": {"name": name, "description": f"{name} of a city", "parameters": _CITY}}
    for name in ("weather", "clock")
)
PLACES = ("Oslo", "Lima", "Cairo", "Hanoi", "Quito")

_SHOWN = (
    ("weather", "Rome", "sunny"),
    ("clock", "Paris", "12:00"),
    ("weather", "Madrid", "rain"),
    ("clock", "Kyoto", "8"),
)


def tool_chat(question: str) -> list[dict[str, Any]]:
    """Four calls with their results, then the question."""
    out: list[dict[str, Any]] = []
    for index, (tool, city, result) in enumerate(_SHOWN):
        function = {"name": tool, "arguments": json.dumps({"city": city})}
        out += [
            {"role": "user", "content": f"{tool} in {city}?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call_{index}", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": f"call_{index}", "content": result},
            {"role": "assistant", "content": f"{result}."},
        ]
    return [*out, {"role": "user", "content": question}]
