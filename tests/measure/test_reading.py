"""Traffic as people have it: every line becomes a request or a reason."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from outrider.measure import reading
from outrider.measure.reading import AnswerMode, Ask, TrafficReader
from outrider.measure.record import SkippedRow

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "and?"}]


def read(*lines: Any, answers: AnswerMode = "auto") -> tuple[list[Ask], dict[int, str]]:
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    found = list(TrafficReader(io.BytesIO(data), answers=answers))
    asks = [each for each in found if isinstance(each, Ask)]
    return asks, {each.line: each.reason for each in found if isinstance(each, SkippedRow)}


def test_every_bad_line_has_its_number_and_reason() -> None:
    asks, skipped = read(
        {"id": "a", "prompt": "x"},
        b"",
        b"   ",
        b"{broken",
        b"[1]",
        b"\xff\xfe",
        {"prompt": ""},
        {"id": "a", "prompt": "y"},
        {"request": {"prompt": "x"}},
        {"request": {"prompt": "x"}, "response": {"choices": [{"message": {"content": ""}}]}},
        {"request": {"prompt": "x", "best_of": 3}, "response": "y"},
        {"messages": []},
    )
    assert [ask.row.id for ask in asks] == ["a"]
    assert set(skipped) == set(range(2, 13))
    assert skipped[2] == skipped[3] == "blank line"
    assert "not JSON" in skipped[4] and "a list" in skipped[5] and "UTF-8" in skipped[6]
    assert "id" in skipped[8] and "no recorded answer" in skipped[9] and "empty" in skipped[10]
    assert "best_of" in skipped[11]


def test_a_line_without_end_is_passed_over_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_LINE_BYTES", 100)
    asks, skipped = read({"prompt": "x" * 1000}, {"prompt": "y"})
    assert [ask.row.line for ask in asks] == [2] and "more than" in skipped[1]


def test_labels_are_short_fields_and_never_text() -> None:
    row = {
        "prompt": "x", "category": "qa", "lang": "de", "size": 3, "note": "n" * 65, "reference": "yes",
        "metadata": {"team": "search"}, "temperature": 0.5,
    }  # fmt: skip
    [ask], _ = read(row)
    assert ask.labels == {"category": "qa", "lang": "de", "size": "3", "team": "search", "turn": "1"}
    assert ask.row.sampling == {"temperature": 0.5}


def test_chats_are_asked_again_or_taken_turn_by_turn() -> None:
    closed = [*CHAT, {"role": "assistant", "content": "so"}]
    [again], _ = read({"messages": closed})
    assert again.answer is None and again.row.prompt == CHAT and again.labels["turn"] == "2"
    turns, skipped = read({"id": "c", "messages": closed}, {"messages": CHAT[:1]}, answers="recorded")
    assert [(t.labels["turn"], len(t.row.prompt), t.answer.message["content"]) for t in turns] == [  # type: ignore[union-attr,index]
        ("1", 1, "ho"),
        ("2", 3, "so"),
    ]
    assert len({turn.row.id for turn in turns}) == 2 and skipped == {2: "no recorded answer"}
    share = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    [recorded], _ = read(share, answers="recorded")
    assert recorded.answer is not None and recorded.row.prompt == [{"role": "user", "content": "a"}]


def test_logs_bring_their_answers_settings_and_token_ids() -> None:
    log = {
        "id": "r",
        "category": "chat",
        "request": {"model": "m", "messages": CHAT, "temperature": 0.7, "top_p": None, "max_completion_tokens": 9,
                    "tool_choice": "auto", "tools": [{"type": "function"}], "n": 2},
        "response": {
            "prompt_token_ids": [1, 2],
            "settings": {"fingerprint": "f"},
            "choices": [
                {"message": {"content": "yes"}, "finish_reason": "stop", "token_ids": [5, 6]},
                {"message": {"content": None, "tool_calls": [{"id": "c"}]}, "finish_reason": "length"},
            ],
        },
    }  # fmt: skip
    (first, second), skipped = read(log)
    assert not skipped and (first.row.id, second.row.id) == ("r", "r/1")
    assert first.row.sampling == {"temperature": 0.7, "max_tokens": 9} and first.row.tools
    assert first.labels["category"] == "chat" and first.answer is not None and second.answer is not None
    assert first.answer.token_ids == (5, 6) and first.answer.prompt_token_ids == (1, 2)
    assert first.answer.settings == {"fingerprint": "f"} and second.answer.finish_reason == "length"
    [again], _ = read(log, answers="generate")
    assert again.answer is None


@pytest.mark.parametrize("response", ["yes", {"text": "yes"}, {"role": "assistant", "content": "yes"}])
def test_bare_responses(response: Any) -> None:
    [ask], _ = read({"request": {"prompt": "x"}, "response": response})
    assert ask.answer is not None and ask.answer.message is not None and ask.answer.message["content"] == "yes"
