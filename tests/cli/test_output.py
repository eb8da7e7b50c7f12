from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.output import ResultFile
from outrider.engine.result import GenerationResult, Timing, Usage
from outrider.errors import DataError
from outrider.metrics import SpeculationStats
from outrider.types import FinishReason

SETTINGS: dict[str, Any] = {"target": "t", "drafter": "suffix", "threads": 2, "sampling": {"seed": 1, "stop": ("a",)}}


def result(id: str, index: int = 0) -> GenerationResult:
    return GenerationResult(
        id=id,
        index=index,
        text="é\ud800",
        token_ids=(1, 2),
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=2),
        stats=SpeculationStats(),
        timing=Timing(),
        settings=SETTINGS,
    )


def fill(path: Path, groups: Sequence[Sequence[GenerationResult]]) -> None:
    store = ResultFile(path, num_choices={})
    for group in groups:
        store.write(group)
    store.close()


def test_results_are_whole_lines_and_known_next_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, [[result("a")], [result("b")]])
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", "b"]
    store = ResultFile(path, num_choices={"a": 1, "b": 1, "c": 1})
    assert store.done == {"a", "b"} and store.repaired == 0
    store.close()


@pytest.mark.parametrize("torn", [b'{"id": "b", "te', b"{", b'{"id": "b", "token_ids": [1]}'])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, [[result("a")]])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    store = ResultFile(path, num_choices={})
    store.write([result("b")])
    store.close()
    assert store.done == {"a"} and store.repaired == 1
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", "b"]
    assert path.read_bytes().startswith(whole)


def test_a_request_that_lacks_choices_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, [[result("a", 0), result("a", 1)], [result("b", 0)]])
    store = ResultFile(path, num_choices={"a": 2, "b": 2})
    store.close()
    assert store.done == {"a"} and store.repaired == 1
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", "a"]


@pytest.mark.parametrize("line", [b"some notes\n", b'{"prompt": "x"}\n', b"[1]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(line)
    with pytest.raises(DataError, match="line 1 is not a result"):
        ResultFile(path, num_choices={})
    assert path.read_bytes() == line


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written: No such file"):
        ResultFile(tmp_path / "missing" / "out.jsonl", num_choices={})
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        ResultFile(tmp_path, num_choices={})


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, [[result("a")]])
    store = ResultFile(path, num_choices={})
    store.check_settings("a", SETTINGS)
    store.check_settings("a", {**SETTINGS, "drafter": "none", "threads": 1})
    with pytest.raises(DataError, match="seed = 1, now it is 2"):
        store.check_settings("a", {**SETTINGS, "sampling": {"seed": 2, "stop": ("a",)}})
    with pytest.raises(DataError, match="target = 't', now it is 'u'"):
        store.check_settings("a", {**SETTINGS, "target": "u"})
    store.close()


def test_settings_of_a_real_result_survive_json(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path, [[replace(result("a"), settings={"sampling": {"logit_bias": {7: 1.0}}})]])
    store = ResultFile(path, num_choices={})
    store.check_settings("a", {"sampling": {"logit_bias": {7: 1.0}}})
    store.close()
