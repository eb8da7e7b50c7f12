"""Tool calls in a growing text: the three formats, what is no call, and that cutting into pieces changes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.serve.tools import LONG, CallStyle, ToolParser, call_style
from tests.models import _files
from tests.serve.support import CLOCK, TWO_CALLS, WEATHER

TOOLS = [WEATHER, CLOCK]


def parse(
    text: str, style: CallStyle, pieces: list[str] | None = None, **more: bool
) -> tuple[str, list[tuple[str, str]]]:
    """Content and (name, arguments) of a text handed over in pieces."""
    parser = ToolParser(TOOLS, style=style, **more)
    deltas = [delta for piece in pieces or [text] for delta in parser.add(piece)] + parser.finish()
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.index is None:
            assert delta.name is None and delta.content and not delta.arguments
            continue
        assert (delta.index in calls) == (delta.name is None), "a name comes once, first"
        call = calls.setdefault(delta.index, [delta.name or "", ""])
        call[1] += delta.arguments
    assert list(calls) == list(range(len(calls))) and parser.num_calls == len(calls)
    return "".join(delta.content for delta in deltas), [(name, arguments) for name, arguments in calls.values()]


LONG_TEXT = '{"code": "' + "print(1)\\n\\u00e9" * 9
OSLO = ("weather", '{"city": "Oslo"}')
CASES: list[tuple[CallStyle, str, str, list[tuple[str, str]]]] = [
    ("tags", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "", [OSLO]),
    (
        "tags",
        TWO_CALLS,
        "Let me see.",
        [("weather", '{"city": "Oslo", "days": [1, 2]}'), ("clock", '{"city": "Lima"}')],
    ),
    # SmolLM's list between one pair of tags
    (
        "tags",
        '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]</tool_call>',
        "",
        [OSLO, ("clock", "{}")],
    ),
    ("tags", 'a </tool_call> "<tool_call"', 'a </tool_call> "<tool_call"', []),
    ("tags", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', "", [OSLO]),
    ("tags", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', "", [OSLO]),
    (
        "tags",
        '<tool_call>{"name": "clock", "arguments": {"a": "</tool_call> }"}}</tool_call>',
        "",
        [("clock", '{"a": "</tool_call> }"}')],
    ),
    ("tags", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}', "", [OSLO]),
    (
        "tags",
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "x": "br',
        "",
        [("weather", '{"city": "Oslo", "x": "br')],
    ),
    # the only argument, long: cut by a limit, and broken behind its text
    ("tags", f'<tool_call>{{"name": "clock", "arguments": {LONG_TEXT}', "", [("clock", LONG_TEXT)]),
    ("bare", f'{{"name": "clock", "parameters": {LONG_TEXT}" oops}}}}', "", [("clock", f'{LONG_TEXT}" oops}}')]),
    # a name that is long, a list that is long
    (
        "tags",
        f'<tool_call>{{"name": "clock", "arguments": {{"{"k" * 99}',
        f'<tool_call>{{"name": "clock", "arguments": {{"{"k" * 99}',
        [],
    ),
    ("tags", " plain text, \n", " plain text, \n", []),
    ("tags", "", "", []),
    ("bare", '{"name": "weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
    (
        "bare",
        ' {"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "clock", "parameters": {}}\n',
        "",
        [OSLO, ("clock", "{}")],
    ),
    ("bare", '{"parameters": {"city": "Oslo"}, "name": "weather"}', "", [OSLO]),
    ("bare", '{"name": "weather", "parameters": {"city": "Oslo"}} done', " done", [OSLO]),
    (
        "bare",
        'Sure: {"name": "weather", "parameters": {"city": "Oslo"}}',
        'Sure: {"name": "weather", "parameters": {"city": "Oslo"}}',
        [],
    ),
    ("bare", '{"city": "Oslo"}', '{"city": "Oslo"}', []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_formats(style: CallStyle, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(text, style) == (content, calls)


@pytest.mark.parametrize("style", ["tags", "bare"])
@pytest.mark.parametrize(
    "call",
    [
        "nothing like JSON",
        '{"name": "weather", "arguments": {city: Oslo}}',
        '{"name": "weather", "arguments": {"city": Oslo, "x": 1}}',
        '{"name": "weather", "arguments": {}}',
        '{"name": "unheard_of", "arguments": {"city": "Oslo"}}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather"}',
        '{"name": "weather", "arguments": {"city": "Os',
    ],
)
def test_what_is_no_call_stays_text(style: CallStyle, call: str) -> None:
    text = f"<tool_call>{call}</tool_call>" if style == "tags" else call
    assert parse(text, style) == (text, [])


def test_a_good_call_behind_a_broken_one_is_found() -> None:
    text = '<tool_call>oops</tool_call><tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    assert parse(text, "tags") == ("<tool_call>oops</tool_call>", [("clock", "{}")])


@given(st.sampled_from(CASES), st.data())
@settings(deadline=None, max_examples=150)
def test_cutting_changes_nothing(case: tuple[CallStyle, str, str, list[tuple[str, str]]], data: st.DataObject) -> None:
    style, text, content, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[left:right] for left, right in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(text, style, pieces) == (content, calls)


@given(
    st.text(alphabet='<tool_cal>/{}[]"name:gumets,; \\x\n', max_size=60), st.sampled_from(["tags", "bare"]), st.data()
)
@settings(deadline=None, max_examples=200)
def test_any_text_survives_any_cut(text: str, style: CallStyle, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    whole = parse(text, style)
    assert parse(text, style, [text[:cut], text[cut:]]) == whole
    if not whole[1]:
        assert whole[0] == text


def test_a_tag_in_two_pieces() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert parse(text, "tags", [text[:5], text[5:]]) == ("", [OSLO])


def test_arguments_stream_once_the_first_is_complete() -> None:
    parser = ToolParser(TOOLS, style="tags")
    assert parser.add('<tool_call>{"name": "weather", "arguments": {"city": "Os') == []
    [begun] = parser.add('lo", "note"')
    assert (begun.index, begun.name, begun.arguments) == (0, "weather", '{"city": "Oslo", "note"')
    [more] = parser.add(': "a long')
    assert (more.index, more.name, more.arguments) == (0, None, ': "a long')


@pytest.mark.parametrize("ahead", range(14))
def test_a_long_text_streams_before_it_is_complete(ahead: int) -> None:
    """As a file's content does, its tool's only argument. Wherever the mark falls, within an escape as well."""
    arguments = '{"city": "' + "x" * ahead + "a\\n\\u00e9\\\\b" * 20 + '"}'
    parser = ToolParser(TOOLS, style="tags")
    assert parser.add('<tool_call>{"name": "weather", "arguments": ') == []
    pieces = [delta.arguments for character in arguments for delta in parser.add(character)]
    assert len(pieces) > len(arguments) - LONG and "".join(pieces) == arguments


def test_a_long_text_in_what_is_no_call_stays_text() -> None:
    for head in ('{"name": "unheard_of", "arguments": {"a": "', '{"name": "weather", "arguments": {a: "'):
        text = f"<tool_call>{head}{'x' * 99}"
        assert parse(text, "tags") == (text, [])


def test_only_the_first_call_without_parallel_calls() -> None:
    content, calls = parse(TWO_CALLS, "tags", is_parallel=False)
    assert content == "Let me see." and [name for name, _ in calls] == ["weather"]
    assert json.loads(calls[0][1]) == {"city": "Oslo", "days": [1, 2]}


def test_the_style_goes_by_the_template() -> None:
    llama = _files.tokenizer(chat_template="{{ '<|python_tag|>' }}{{ tools }}")
    qwen = _files.tokenizer(chat_template="{{ '<tool_call>' }}{{ tools }}")
    assert call_style("auto", llama) == "bare" and call_style("auto", qwen) == "tags"
    assert call_style("auto", _files.tokenizer(tool_rendering="system")) == "tags"
    assert call_style("llama", qwen) == "bare" and call_style("smollm", llama) == "tags"
