from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.inputs import Inputs, read_inputs, read_rows
from outrider.errors import ConfigError, DataError


def rows_of(*lines: object, chat: bool = True) -> Inputs:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return read_rows(text.encode(), name="test", chat=chat)


def reason_of(line: object, *, chat: bool = True) -> str:
    inputs = rows_of(line, chat=chat)
    assert not inputs.rows
    [broken] = inputs.broken
    return broken.reason


def test_an_argument_becomes_a_chat_or_stays_raw() -> None:
    assert read_inputs("hi", None).rows[0].prompt == [{"role": "user", "content": "hi"}]
    assert read_inputs("hi", None, chat=False).rows[0].prompt == "hi"


@pytest.mark.parametrize(("prompt", "file"), [(None, None), ("hi", Path("x.txt"))])
def test_exactly_one_source_is_needed(prompt: str | None, file: Path | None) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        read_inputs(prompt, file)


def test_a_text_file_is_one_prompt_and_jsonl_is_many(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"\xef\xbb\xbfline one\nline two\n")
    assert read_inputs(None, text, chat=False).rows[0].prompt == "line one\nline two\n"
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    found = read_inputs(None, rows)
    assert found.is_file
    assert [(row.id, row.line) for row in found.rows] == [("1", 1), ("3", 3)]


def test_the_format_can_be_forced(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "a"}')
    assert read_inputs(None, path, chat=False).rows[0].prompt == '{"prompt": "a"}'
    assert read_inputs(None, path, file_format="jsonl", chat=False).rows[0].prompt == "a"


@pytest.mark.parametrize("content", [b"", b"  \n\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_file_is_an_error(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match="empty"):
        read_inputs(None, path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.txt cannot be read: No such file"):
        read_inputs(None, tmp_path / "nothing.txt")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("ça".encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        read_inputs(None, path)


def test_messages_keep_what_they_carry() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    [row] = rows_of({"id": 7, "messages": messages}).rows
    assert row.id == "7"
    assert row.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "ab"},
    ]


def test_sharegpt_turns_are_renamed_and_answers_at_the_end_left_off() -> None:
    turns = [{"from": who, "value": text} for who, text in (("system", "s"), ("human", "q"), ("gpt", "a"))]
    [row] = rows_of({"conversations": turns}).rows
    assert row.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def test_a_prompt_may_be_token_ids() -> None:
    assert rows_of({"prompt": [3, 4]}).rows[0].prompt == [3, 4]


def test_rows_may_set_sampling_fields() -> None:
    [row] = rows_of({"prompt": "a", "temperature": 0.5, "logit_bias": {"7": -3}, "category": "x"}).rows
    assert row.sampling == {"temperature": 0.5, "logit_bias": {7: -3}}


def test_broken_lines_are_numbered_and_the_others_kept() -> None:
    inputs = rows_of({"prompt": "a"}, "{broken", {"prompt": "b"}, "[1, 2]", {"prompt": "c", "id": "1"})
    assert [row.id for row in inputs.rows] == ["1", "3"]
    assert [broken.line for broken in inputs.broken] == [2, 4, 5]
    assert "not JSON" in inputs.broken[0].reason
    assert "a list" in inputs.broken[1].reason
    assert "used by an earlier line" in inputs.broken[2].reason


def test_a_line_that_is_not_utf8_is_broken_alone() -> None:
    inputs = read_rows(b'{"prompt": "\xff"}\n{"prompt": "ok"}\n', name="test")
    assert [broken.line for broken in inputs.broken] == [1]
    assert [row.id for row in inputs.rows] == ["2"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"promt": "a"}, "did you mean 'prompt'"),
        ({"prompt": "a", "messages": []}, "both messages and prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "a number"),
        ({"prompt": [1, "a"]}, "token ids"),
        ({"prompt": [True]}, "token ids"),
        ({"messages": []}, "at least one"),
        ({"messages": ["a"]}, r"messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "'alien'"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "no question"),
        ({"conversations": [{"from": "human"}]}, "from and value"),
        ({"prompt": "a", "id": []}, "id"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": [1], "tools": [{}]}, "need a chat"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": 3}, "tools"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_reasons_say_what_is_wrong(line: object, words: str) -> None:
    assert words in reason_of(line)


def test_raw_mode_refuses_chats() -> None:
    assert "--raw" in reason_of({"messages": [{"role": "user", "content": "a"}]}, chat=False)
    assert "--raw" in reason_of({"conversations": [{"from": "human", "value": "a"}]}, chat=False)
