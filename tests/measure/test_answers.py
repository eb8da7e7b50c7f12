"""Texts from recorded answers and from the target itself, and whether they may be judged by."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import DataError
from outrider.measure.answers import (
    AnsweredText,
    AnswerStore,
    Question,
    answer_all,
    kind_of,
    question_of,
    recorded_text,
)
from outrider.measure.reading import Ask, RecordedAnswer
from outrider.measure.record import SkippedRow
from outrider.measure.target_pass import read_text
from outrider.sampling.params import SamplingParams
from outrider.traffic import Row
from tests.engine.support import table_model
from tests.measure.helpers import decode, questions, text_of
from tests.models import _files

TOKENIZER = _files.tokenizer()
TARGET = table_model()
CHAT = [{"role": "user", "content": "hi"}]


def question(answer: RecordedAnswer, *, max_tokens: int = 50, **row: Any) -> Question:
    ask = Ask(row=Row(**{"id": "x", "line": 4, "prompt": CHAT, **row}), labels={}, answer=answer)
    wide = replace(TARGET.spec, vocab_size=10_000)
    target = type("Wide", (), {"spec": wide})()
    found = question_of(ask, SamplingParams(max_tokens=max_tokens), target, TOKENIZER)
    assert isinstance(found, Question), found
    return found


def recorded(answer: RecordedAnswer, **changes: Any) -> AnsweredText:
    found = recorded_text(question(answer, **changes), TOKENIZER)
    assert isinstance(found, AnsweredText), found
    return found


def test_a_recorded_message_is_read_as_the_template_writes_it() -> None:
    text = recorded(RecordedAnswer(message={"role": "assistant", "content": "hello"}))
    assert TOKENIZER.decode(text.output, skip_special_tokens=False) == "hello<|im_end|>"
    assert TOKENIZER.decode(text.prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert text.limit == 50 and not text.is_generated and text.labels["kind"] == "prose"


def test_an_answer_that_was_cut_has_no_end_and_could_not_go_on() -> None:
    text = recorded(RecordedAnswer(message={"role": "assistant", "content": "hello"}, finish_reason="length"))
    assert TOKENIZER.decode(text.output, skip_special_tokens=False) == "hello"
    assert text.limit == len(text.output)
    short = recorded(RecordedAnswer(message={"role": "assistant", "content": "hello"}), max_tokens=2)
    assert len(short.output) == short.limit == 2


def test_token_ids_are_believed_over_text() -> None:
    answer = RecordedAnswer(message={"role": "assistant", "content": "x"}, token_ids=(5, 6), prompt_token_ids=(1, 2))
    text = recorded(answer)
    assert (text.prompt, text.output) == ((1, 2), (5, 6))


def test_bare_text_is_a_completion() -> None:
    text = recorded(RecordedAnswer(text="hello", finish_reason="length"), prompt="hi")
    assert list(text.prompt) == TOKENIZER.encode_prompt("hi") and list(text.output) == TOKENIZER.encode("hello")


def test_what_cannot_be_asked_says_why() -> None:
    base = SamplingParams()
    long = Ask(row=Row(id="x", line=7, prompt=[1] * 4096), labels={})
    found = question_of(long, base, TARGET, None)
    assert isinstance(found, SkippedRow) and found.line == 7 and "window of 4096" in found.reason
    odd = Ask(row=Row(id="x", line=8, prompt=[1], sampling={"temperature": "hot"}), labels={})
    found = question_of(odd, base, TARGET, None)
    assert isinstance(found, SkippedRow) and found.line == 8
    outside = question_of(Ask(row=Row(id="x", line=9, prompt=[99]), labels={}), base, TARGET, None)
    assert isinstance(outside, SkippedRow) and "99" in outside.reason


def test_tool_calls_are_told_from_prose() -> None:
    assert kind_of(' {"name": "f", "arguments": {}}') == kind_of("<tool_call>{}</tool_call>") == "tool call"
    assert kind_of('a {"name": 1, "arguments": 2}') == kind_of("prose") == "prose"


def test_answers_are_written_once(tmp_path: Path) -> None:
    asked = questions(5, SamplingParams(max_tokens=9), vocab=7)
    path, made_from = tmp_path / "answers.jsonl", {"fingerprint": "f"}
    heard: list[int] = []

    def answers() -> list[AnsweredText]:
        store = AnswerStore(path, made_from)
        return list(answer_all(TARGET, asked, store, batch_size=2, tokenizer=None, on_answer=heard.append))

    first = answers()
    assert len(heard) == 5
    plain = decode(TARGET, None, asked, 0)
    assert [text.output for text in first] == [plain[each.request.id].output for each in asked]
    path.write_bytes(path.read_bytes()[:-10])  # interrupted while the last line was written
    assert answers() == first and len(heard) == 6
    with pytest.raises(DataError, match="fingerprint"):
        AnswerStore(path, {"fingerprint": "other"})


def test_an_answer_is_not_taken_for_another_rows(tmp_path: Path) -> None:
    [one] = questions(1, SamplingParams(max_tokens=9), vocab=7)
    store = AnswerStore(tmp_path / "a.jsonl", {})
    list(answer_all(TARGET, [one], store, batch_size=1, tokenizer=None))
    other = replace(one, request=replace(one.request, prompt=(*one.request.prompt, 1)))
    assert AnswerStore(tmp_path / "a.jsonl", {}).find(other) is None


@pytest.mark.parametrize("seed", [None, 5])
def test_text_of_another_model_is_off_policy(seed: int | None) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0 if seed is None else 0.8, seed=seed)
    [own] = [text_of(run, TARGET) for run in decode(TARGET, None, questions(1, params, vocab=7), 0).values()]
    own = replace(own, is_generated=False)
    other = replace(own, output=tuple((token + 1) % 7 for token in own.output))
    assert read_text(TARGET, own).agreement == 1.0 and read_text(TARGET, own).is_on_policy
    read = read_text(TARGET, other)
    assert read.agreement is not None and read.agreement < 0.9 and not read.is_on_policy


def test_sampled_text_must_say_where_it_comes_from() -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, top_k=3)
    [own] = [text_of(run, TARGET) for run in decode(TARGET, None, questions(1, params, vocab=7), 0).values()]
    assert read_text(TARGET, own).is_on_policy  # written by this target in this run
    logged = replace(own, is_generated=False)
    assert not read_text(TARGET, logged).is_on_policy
    settings = {"fingerprint": "table", "sampling": asdict(params)}
    assert read_text(TARGET, replace(logged, settings=settings)).is_on_policy
    hotter = {**settings, "sampling": {**asdict(params), "temperature": 0.9}}
    assert not read_text(TARGET, replace(logged, settings=hotter)).is_on_policy
    assert not read_text(TARGET, replace(logged, settings={**settings, "fingerprint": "other"})).is_on_policy


def test_a_long_text_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.measure import target_pass

    params = SamplingParams(max_tokens=40, temperature=0.9, repetition_penalty=1.2, seed=3)
    [own] = [text_of(run, TARGET) for run in decode(TARGET, None, questions(1, params, vocab=7), 0).values()]
    whole = read_text(TARGET, own, layers=(0,))
    monkeypatch.setattr(target_pass, "_CHUNK", 3)
    pieces = read_text(TARGET, own, layers=(0,))
    assert pieces.agreement == whole.agreement == 1.0
    assert pieces.taps[0].flatten().tolist() == whole.taps[0].flatten().tolist() == list(map(float, own.tokens[:-1]))
