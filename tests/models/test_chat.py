"""Chats become prompts as the model's template says; what a template would ignore is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.errors import PromptError
from outrider.models.chat import TOOL_SENTENCE
from outrider.models.tokenizer import Tokenizer
from tests.models import _files

PLAIN = _files.tokenizer()
AS_TEXT = _files.tokenizer(tool_rendering="system")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"ä": {}}}}}
USER = {"role": "user", "content": "hi"}


def _with_template(source: str, **changes: Any) -> Tokenizer:
    return _files.tokenizer(chat_template=source, **changes)


def test_template_renders_with_and_without_generation_prompt() -> None:
    chat = [{"role": "system", "content": "s"}, USER]
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert PLAIN.render_chat(chat, add_generation_prompt=False) == expected
    assert PLAIN.render_chat(chat) == expected + "<|im_start|>assistant\n"
    assert PLAIN.encode_chat(chat) == PLAIN.encode(expected + "<|im_start|>assistant\n")
    assert PLAIN.encode_chat(chat)[0] == 1


def test_null_content_is_empty_and_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rendered = PLAIN.render_chat([{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    assert rendered.startswith("<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ("hi", "must be a list of messages, not str"),
        ({"role": "user"}, "must be a list of messages, not dict"),
        (["hi"], "message 0 must be an object"),
        ([USER, {"content": "x"}], "message 1 has role None"),
        ([{"role": 3, "content": "x"}], "message 0 has role 3"),
        ([{"role": "user"}], r"message 0 \(user\) has no content"),
        ([USER, USER, {"role": "user", "content": 3}], "message 2 has content of type int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has a content part"),
        ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
        ([{"role": "assistant", "content": "", "tool_calls": 3}], "tool_calls that are not a list"),
    ],
)
def test_malformed_messages_are_named_by_index(messages: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        PLAIN.render_chat(messages)


def test_model_without_template() -> None:
    with pytest.raises(PromptError, match="no chat template"):
        _files.tokenizer(chat_template=None).render_chat([USER])


def test_tools_that_the_template_would_ignore_are_refused() -> None:
    with pytest.raises(
        PromptError, match="knows no tools and would ignore the 1 given; choose tool rendering 'system'"
    ):
        PLAIN.render_chat([USER], tools=[TOOL])
    with pytest.raises(PromptError, match="message 1 has tool calls"):
        PLAIN.render_chat([USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}])
    # A template that has the word in its text, but reads no such variable, ignores tools as well.
    with pytest.raises(PromptError, match="knows no tools"):
        _with_template("{# tools #}You have no tools.").render_chat([USER], tools=[TOOL])
    assert _with_template("{{ tools | length }}").render_chat([USER], tools=[TOOL]) == "1"
    assert PLAIN.render_chat([USER], tools=[]) == PLAIN.render_chat([USER])


def test_tool_template_is_used_for_tools_only() -> None:
    tokenizer = _files.tokenizer(tool_template="{{ tools[0].function.name }}")
    assert tokenizer.render_chat([USER], tools=[TOOL]) == "add"
    assert tokenizer.render_chat([USER]) == PLAIN.render_chat([USER])


def test_system_rendering_describes_tools_in_the_system_message() -> None:
    described = f"{TOOL_SENTENCE}\n<tools>\n{json.dumps(TOOL, ensure_ascii=False)}\n</tools>"
    rendered = AS_TEXT.render_chat([USER], tools=[TOOL])
    assert rendered.startswith(f"<|im_start|>system\n{described}<|im_end|>\n<|im_start|>user\nhi")
    rendered = AS_TEXT.render_chat([{"role": "system", "content": "Be brief."}, USER], tools=[TOOL])
    assert rendered.startswith(f"<|im_start|>system\nBe brief.\n\n{described}<|im_end|>\n")
    assert AS_TEXT.render_chat([USER]) == PLAIN.render_chat([USER])


def test_system_rendering_of_calls_and_answers() -> None:
    calls = [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}, {"name": "sub", "arguments": "{broken"}]
    chat = [
        USER,
        {"role": "assistant", "content": "ok", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    rendered = AS_TEXT.render_chat(chat, tools=[TOOL])
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "sub", "arguments": "{broken"}\n</tool_call>'
    assert f"<|im_start|>assistant\nok\n{called}\n{broken}<|im_end|>\n" in rendered
    assert "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n" in rendered
    with pytest.raises(PromptError, match="without a function name"):
        AS_TEXT.render_chat([{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}])
    with pytest.raises(PromptError, match="must be JSON values"):
        AS_TEXT.render_chat([USER], tools=[{"name": object()}])


def test_template_hash_names_template_special_tokens_and_tool_rendering() -> None:
    hashes = {
        PLAIN.template_hash,
        AS_TEXT.template_hash,
        _with_template("x").template_hash,
        _files.tokenizer(special_tokens={"bos_token": "<s>"}).template_hash,
        _files.tokenizer(tool_template="x").template_hash,
    }
    assert len(hashes) == 5
    assert _files.tokenizer().template_hash == PLAIN.template_hash


def test_who_renders_tools_is_no_other_template() -> None:
    assert PLAIN.is_same_template(AS_TEXT.template_hash) and AS_TEXT.is_same_template(PLAIN.template_hash)
    assert not PLAIN.is_same_template(_with_template("x").template_hash)
    assert not PLAIN.is_same_template("")


@pytest.mark.real_model
def test_the_real_template_refuses_tools_by_name() -> None:
    from outrider.models.load import load_checkpoint

    plain = load_checkpoint("smollm2-135m-instruct").tokenizer
    as_text = load_checkpoint("smollm2-135m-instruct", tool_rendering="system").tokenizer
    assert plain is not None and as_text is not None
    with pytest.raises(PromptError, match="tool rendering 'system'"):
        plain.encode_chat([USER], tools=[TOOL])
    assert "<tools>" in as_text.render_chat([USER, {"role": "assistant", "content": None}], tools=[TOOL])
