"""Grammars of answers with tools: what they let through, that the parser reads it, and what a server does with them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from outrider.engine.constraints import compiler_for
from outrider.errors import SamplingError
from outrider.sampling.constraint import StructuredOutputs
from outrider.serve.protocol import ChatRequest, parse_body
from outrider.serve.tool_grammar import tool_constraint
from outrider.serve.tools import CallStyle, ToolParser
from tests.serve.support import CLOCK, SCRIPTS, TWO_CALLS, WEATHER, LiveServer, ScriptedModel, serving

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LIMA = '<tool_call>\n{"name": "clock", "arguments": {"city": "Lima"}}\n</tool_call>'
BARE = '{"name": "weather", "parameters": {"city": "Oslo"}}'
JSON_ANSWER = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}

TARGET = ScriptedModel()
COMPILER = compiler_for(TARGET.spec, TARGET.tokenizer)


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def constraint(style: CallStyle, **fields: Any) -> dict[str, Any] | None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER, CLOCK], **fields}
    return tool_constraint(parse_body(json.dumps(body).encode(), ChatRequest), style)


def fits(text: str, style: CallStyle, **fields: Any) -> bool:
    """True if a whole answer is one that the request's grammar lets through."""
    found = constraint(style, **fields)
    assert found is not None
    matcher = COMPILER.compile(StructuredOutputs.from_dict(found)).new_matcher()
    tokens = TARGET.tokenizer.encode(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


REQUIRED: dict[str, Any] = {"tool_choice": "required"}
NAMED: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
STRICT: dict[str, Any] = {"tools": [strict(WEATHER), CLOCK]}
FORMAT: dict[str, Any] = {"response_format": JSON_ANSWER}
ONE: dict[str, Any] = {"parallel_tool_calls": False}
LATE = "Let me see.\n" + OSLO

CASES: list[tuple[str, CallStyle, dict[str, Any], bool]] = [
    (OSLO, "tags", REQUIRED, True),
    (f"{OSLO}\n{LIMA}", "tags", REQUIRED, True),
    (f"{OSLO}\n{LIMA}", "tags", REQUIRED | ONE, False),
    (f"{OSLO}\n{LIMA}", "tags", NAMED, False),
    (LIMA, "tags", NAMED, False),
    (LATE, "tags", REQUIRED, False),
    (BARE, "bare", REQUIRED, True),
    (f"{BARE}; {BARE}", "bare", REQUIRED, True),
    # what no schema declares
    (OSLO.replace('"}}', '", "mood": 1}}'), "tags", REQUIRED, False),
    ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "tags", REQUIRED | {"tools": [NOW]}, True),
    ('<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>', "tags", REQUIRED | {"tools": [NOW]}, False),
    # strict where the model decides: any text, but no call that does not fit
    ("", "tags", STRICT, True),
    ("Just a < text, {with} <tool_cal and \n lines.", "tags", STRICT, True),
    (LATE, "tags", STRICT, True),
    (f"{LATE} and {LIMA} done", "tags", STRICT, True),
    (f"{OSLO}\n{LIMA}", "tags", STRICT | ONE, False),
    (OSLO, "tags", STRICT | ONE, True),
    ("<tool_call>", "tags", STRICT, False),
    (OSLO.replace('"Oslo"', "5"), "tags", STRICT, False),
    (LATE.replace("city", "town"), "tags", STRICT, False),
    (BARE, "bare", STRICT, True),
    (f" text {BARE}", "bare", STRICT, True),
    ("", "bare", STRICT, True),
    (BARE.replace('"Oslo"', "5"), "bare", STRICT, False),
    ('{"ok": 1}', "bare", STRICT, False),
    # a form of the answer: that, or calls
    ('{"ok": true}', "tags", FORMAT, True),
    (f"{OSLO}\n{LIMA}", "tags", FORMAT, True),
    (f'{OSLO}\n{{"ok": true}}', "tags", FORMAT, False),
    ("plainly", "tags", FORMAT, False),
    (BARE, "bare", FORMAT, True),
    ('{"ok": true}', "bare", FORMAT, True),
    ('{"any": [1]}', "tags", {"response_format": {"type": "json_object"}}, True),
]


@pytest.mark.parametrize(("text", "style", "fields", "is_possible"), CASES)
def test_what_an_answer_may_be(text: str, style: CallStyle, fields: dict[str, Any], is_possible: bool) -> None:
    assert fits(text, style, **fields) == is_possible


@pytest.mark.parametrize(("text", "style", "fields", "is_possible"), CASES)
def test_what_may_come_is_read_as_calls(text: str, style: CallStyle, fields: dict[str, Any], is_possible: bool) -> None:
    parser = ToolParser(fields.get("tools", [WEATHER, CLOCK]), style=style)
    parser.add(text)
    parser.finish()
    calls = text.count('"arguments"') if style == "tags" else text.count('"parameters"') * (text[:1] == "{")
    assert not is_possible or parser.num_calls == calls


def test_without_a_wish_the_answer_is_free() -> None:
    assert constraint("tags") is None and constraint("tags", tool_choice="auto") is None
    assert constraint("tags", tools=[strict(WEATHER)], tool_choice="none") is None
    assert constraint("tags", tools=[strict(WEATHER)], structured_outputs={"regex": "a"}) is None


def test_schemas_that_say_more_than_properties_are_left_alone() -> None:
    """Where parts are combined, or more is allowed, closing an object would forbid what its schema allows."""
    city, day = ({"properties": {name: {"type": "string"}}} for name in ("city", "day"))
    for parameters in (
        {"type": "object", "allOf": [city, day], "required": ["city", "day"]},
        {"type": "object", **city, "additionalProperties": {"type": "string"}},
        {
            "type": "object",
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "object", **city, "additionalProperties": True}},
        },
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        text = '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo", "day": "Monday"}}\n</tool_call>'
        assert fits(text, "tags", tools=[tool], **REQUIRED), parameters
    inner = {"type": "object", "properties": {"at": {"type": "array", "items": {"type": "object", **city}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": inner}}
    text = '<tool_call>\n{"name": "f", "arguments": {"at": [{"city": "Oslo"}]}}\n</tool_call>'
    assert fits(text, "tags", tools=[tool], **REQUIRED)
    assert not fits(text.replace('"Oslo"', '"Oslo", "x": 1'), "tags", tools=[tool], **REQUIRED)


def test_references_within_a_schema_hold_wherever_it_stands() -> None:
    """As pydantic writes them for a model within a model."""

    class Place(pydantic.BaseModel):
        city: str
        inside: Place | None

    class Forecast(pydantic.BaseModel):
        place: Place

    tool: Any = openai.pydantic_function_tool(Forecast, name="forecast")
    call = '{"name": "forecast", "arguments": {"place": {"city": "Oslo", "inside": {"city": "x", "inside": null}}}}'
    for tools in ([tool], [WEATHER, tool, CLOCK]):
        for text, is_possible in ((call, True), (call.replace('"Oslo"', "5"), False)):
            assert fits(f"<tool_call>\n{text}\n</tool_call>", "tags", tools=tools, **REQUIRED) == is_possible
    named = {"type": "object", "properties": {"$ref": {"const": {"$ref": "#/x"}}}, "required": ["$ref"]}
    odd = {"type": "function", "function": {"name": "f", "parameters": named}}
    text = '<tool_call>\n{"name": "f", "arguments": {"$ref": {"$ref": "#/x"}}}\n</tool_call>'
    assert fits(text, "tags", tools=[odd], **REQUIRED)


def ask(server: LiveServer, content: str, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = server.chat(content, **{"temperature": 0, "max_tokens": 200, **fields})["choices"][0]
    return said


def test_strict_tools_are_called_and_broken_calls_do_not_come(scripted: LiveServer) -> None:
    loose = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
    weather = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": loose}}
    said = ask(scripted, "weather in Oslo and the time in Lima", tools=[weather, CLOCK])
    assert [call["function"]["name"] for call in said["message"]["tool_calls"]] == ["weather", "clock"]
    assert said["message"]["content"] == TWO_CALLS.partition("\n")[0] and said["finish_reason"] == "tool_calls"
    free = ask(scripted, "broken call", tools=[WEATHER])
    held = ask(scripted, "broken call", tools=[strict(WEATHER)], max_tokens=60)
    assert free["message"]["content"] == SCRIPTS["broken call"]
    assert "{city" not in json.dumps(held["message"])


def test_a_tool_of_pydantics_through_the_client(scripted: LiveServer) -> None:
    class Weather(pydantic.BaseModel):
        is_cold: bool

    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    tool = openai.pydantic_function_tool(Weather)
    assert tool["function"]["strict"] is True
    reply = client.chat.completions.parse(
        model="table",
        messages=[{"role": "user", "content": "x"}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_strict_is_for_the_server_and_not_for_the_model(scripted: LiveServer) -> None:
    counts = [
        scripted.chat("x", tools=[tool], max_tokens=1)["usage"]["prompt_tokens"] for tool in (WEATHER, strict(WEATHER))
    ]
    assert counts[0] == counts[1]


def test_a_call_or_an_answer_of_a_form() -> None:
    """The model decides between them, as it does without a form."""
    with serving(ScriptedModel(scripts={"call it": OSLO, "answer it": '{"ok": true}'})) as server:
        fields: dict[str, Any] = {"tools": [WEATHER, CLOCK], "response_format": JSON_ANSWER}
        called, answered = ask(server, "call it", **fields), ask(server, "answer it", **fields)
        assert called["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
        assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
        assert answered["message"]["content"] == '{"ok": true}' and "tool_calls" not in answered["message"]
        unseen = ask(server, "call it", **fields, tool_choice="none")
        assert unseen["message"]["content"].startswith("{") and "tool_calls" not in unseen["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
         "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
          "tool_choice": "required"}, "tools"),
        ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs.json"),
    ],
)  # fmt: skip
def test_a_bad_schema_is_told_by_the_field_that_holds_it(
    scripted: LiveServer, fields: dict[str, Any], param: str
) -> None:
    response = scripted.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and "objekt" in error["message"], error
    assert "%json" not in error["message"] and ("structured_outputs" in error["message"]) == (
        param == "structured_outputs.json"
    )


def test_what_contradicts_a_constraint_names_fields_that_were_sent(scripted: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [strict(WEATHER)], "min_tokens": 2}
    error = scripted.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "min_tokens" and "contradicts tools" in error["message"]


def test_no_schema_reaches_the_library_unchecked() -> None:
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    found = constraint("tags", tools=[tool], **REQUIRED)
    assert found is not None
    try:
        COMPILER.compile(StructuredOutputs.from_dict(found))
    except SamplingError as error:
        assert "structured_outputs.grammar" in str(error)
