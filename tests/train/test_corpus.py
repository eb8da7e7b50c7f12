"""Texts and loss masks with the real model's template, on rows of every awkward kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.errors import ConfigError, DataError
from outrider.models.load import load_checkpoint
from outrider.models.tokenizer import Tokenizer
from outrider.traffic import Inputs, read_rows
from outrider.train.corpus import Corpus, Text, check_any_trained, marked_runs, read_corpus, summary_of

pytestmark = pytest.mark.real_model

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    """Turns by the first letter of their role: ``u:``, ``a:``, ``s:``."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns], **more}


ROWS: list[Any] = [
    chat("u:Hi", "a:Hello there."),
    chat("u:One?", "a:First.", "u:Two?", "a:Second.", "u:Three?", "a:Third."),
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            CALL,
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ],
        "tools": [TOOL],
    },
    chat("u:Think.", "a:<think>I ponder.</think>Done."),
    {"messages": []},
    chat("a:I speak first.", "u:Fine.", "a:Good."),
    chat("u:Say nothing.", "a:"),
    chat("u:Only a question."),
    chat("u:" + "word " * 33_000, "a:Too long."),
    chat("u:Hi", "a:Hello there."),
    "broken",
    chat("u:你好，世界", "a:Привет, мир! 🌍"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_checkpoint("smollm2-135m-instruct", tool_rendering="system").tokenizer
    assert found is not None
    return found


def inputs_of(rows: list[Any]) -> Inputs:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return read_rows("\n".join(lines).encode(), name="rows", keep_answers=True)


def corpus_of(rows: list[Any], tokenizer: Tokenizer, **changes: Any) -> Corpus:
    settings: dict[str, Any] = {"wants_answers": False, "max_length": 2048, **changes}
    return read_corpus(inputs_of(rows), tokenizer, **settings)


def trained_parts(text: Text, tokenizer: Tokenizer) -> list[str]:
    return [run for run, is_trained in marked_runs(text, tokenizer) if is_trained]


def test_all_kinds_of_rows(tokenizer: Tokenizer) -> None:
    corpus = corpus_of(ROWS, tokenizer)
    assert [text.line for text in corpus.texts] == [1, 2, 3, 4, 6, 12]
    assert dict(corpus.skipped) == {
        "not a row": (5, 11),
        "no assistant text": (7, 8),
        "no assistant text within 2048 tokens": (9,),
        "the same as an earlier row": (10,),
    }
    parts = [trained_parts(text, tokenizer) for text in corpus.texts]
    end = "<|im_end|>"
    assert parts == [
        [f"Hello there.{end}"],
        [f"First.{end}", f"Second.{end}", f"Third.{end}"],
        [f'<tool_call>\n{{"name": "weather", "arguments": {{}}}}\n</tool_call>{end}', f"It rains.{end}"],
        [f"<think>I ponder.</think>Done.{end}"],
        [f"I speak first.{end}", f"Good.{end}"],
        [f"Привет, мир! 🌍{end}"],
    ]
    assert corpus.num_trained == sum(text.num_trained for text in corpus.texts)
    assert summary_of(corpus)["skipped"]["not a row"] == 2


def test_ids_are_those_of_the_engines_renderer(tokenizer: Tokenizer) -> None:
    for row, text in zip(ROWS[:2], corpus_of(ROWS[:2], tokenizer).texts, strict=True):
        whole = tokenizer.encode(tokenizer.render_chat(row["messages"], add_generation_prompt=False))
        assert list(text.tokens) == whole[: len(text.tokens)]
        assert tokenizer.decode(whole[len(text.tokens) :]).strip() == ""
    [waiting] = corpus_of(ROWS[1:2], tokenizer, wants_answers=True).texts
    assert list(waiting.tokens) == tokenizer.encode_chat(ROWS[1]["messages"][:-1])
    assert trained_parts(waiting, tokenizer) == ["First.<|im_end|>", "Second.<|im_end|>"]
    answered = waiting.answered([5, 6])
    assert answered.tokens[-2:] == (5, 6) and answered.trained[-2:] == (True, True)


def test_only_the_last_turn(tokenizer: Tokenizer) -> None:
    [text] = corpus_of(ROWS[1:2], tokenizer, turns="last").texts
    assert trained_parts(text, tokenizer) == ["Third.<|im_end|>"]
    [waiting] = corpus_of(ROWS[1:2], tokenizer, turns="last", wants_answers=True).texts
    assert waiting.num_trained == 0


def test_an_inserted_empty_thought_is_not_trained() -> None:
    class Thinking:
        """A template that puts an empty thought before every answer."""

        eos_token_ids = (10,)

        def render_chat(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True) -> str:
            parts = {"user": "U{}\n", "assistant": "A<think>\n\n</think>\n\n{}\n"}
            return "".join(parts[m["role"]].format(m["content"]) for m in messages) + "A" * add_generation_prompt

        def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
            return [ord(letter) for letter in text], [(i, i + 1) for i in range(len(text))]

        def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
            return "".join(map(chr, ids))

    thinking: Any = Thinking()
    [text] = read_corpus(inputs_of([chat("u:q", "a:yes")]), thinking, wants_answers=False, max_length=99).texts
    assert [run for run, is_trained in marked_runs(text, thinking) if is_trained] == ["yes\n"]


def test_tools_that_the_template_ignores_are_refused() -> None:
    plain = load_checkpoint("smollm2-135m-instruct").tokenizer
    assert plain is not None
    with pytest.raises(DataError, match=r"line 1.*knows no tools.*--tool-rendering system"):
        corpus_of([ROWS[2]], plain)


def test_long_answers_are_cut_and_long_prompts_skipped(tokenizer: Tokenizer) -> None:
    row = chat("u:Hi", "a:" + "word " * 100)
    [text] = corpus_of([row], tokenizer, max_length=60).texts
    assert len(text.tokens) == 60
    corpus = corpus_of([chat("u:" + "word " * 100)], tokenizer, max_length=60, wants_answers=True)
    assert dict(corpus.skipped) == {"prompt of 60 tokens or more": (1,)}


def test_nothing_to_train_on_is_an_error(tokenizer: Tokenizer) -> None:
    corpus = corpus_of([chat("u:Only a question.")], tokenizer)
    with pytest.raises(ConfigError, match="leaves nothing to train on: 1 no assistant text"):
        check_any_trained(corpus.num_trained, corpus.skipped, "the file")
