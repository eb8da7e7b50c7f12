"""What off-policy variants of the ablations train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.ablations import Study

from benchmarks import ablations

MODEL = "smollm2-135m-instruct"


@pytest.mark.parametrize(("share", "expected"), [(100, "one\u2028two"), (0, "Paris")])
def test_rows_with_a_reference_are_taken_with_it_or_with_the_targets_answer(
    tmp_path: Path, share: int, expected: str
) -> None:
    """Rows without one, and rows that the target did not answer, are left out; strings may hold separators of lines."""
    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "Where?"}], "reference": "one\u2028two"},
        {"id": "b", "messages": [{"role": "user", "content": "Who?"}]},
        {"id": "c", "messages": [{"role": "user", "content": "When?"}], "reference": "now"},
    ]
    traffic, answers = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    traffic.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    tokenizer = ablations.load_checkpoint(MODEL).tokenizer
    assert tokenizer is not None
    given = [{"id": id, "tokens": tokenizer.encode("Paris")} for id in ("a", "b")]
    answers.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    study = Study(traffic=traffic, answers=answers, taps=None, work=tmp_path, positions=1, model=MODEL, common=())
    mixed = ablations._traffic(study, f"off-policy {share}", tmp_path)
    found = [json.loads(line) for line in mixed.read_text(encoding="utf-8").split("\n") if line]
    assert [row["id"] for row in found] == ["a"]
    assert found[0]["messages"][-1] == {"role": "assistant", "content": expected}
