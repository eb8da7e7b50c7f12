"""Bars and verdicts, result files that survive a cut, the history that is only appended to, tables in documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.make_docs import main as make_docs
from benchmarks.make_docs import render
from benchmarks.provenance import describe_run, peak_rss_bytes
from benchmarks.report import Bar, ResultFile, Section, append_history, write_json
from benchmarks.stats import PairedRatio

HEAD: dict[str, Any] = {
    "kind": "engine_speed",
    "started": "2024-01-01T00:00:00+00:00",
    "command": "python -m benchmarks.engine_speed",
    "git": {"commit": "0123456789abcdef", "changed_files": 0},
    "machine": {"processor": "abacus", "flags": ["avx2"], "threads": 2},
    "versions": {"torch": "2.9", "outrider": "0.1"},
    "settings": {"tokens": 8},
}


def _ratio(value: float, low: float, high: float, pairs: int) -> PairedRatio:
    return PairedRatio(value=value, low=low, high=high, pairs=pairs, kind="median of pairs")


def _section(name: str, value: float) -> Section:
    return Section(name=name, title=name, bars=[Bar.of_ratio(f"{name} speed", _ratio(value, 1.9, 2.4, 20), 2.0)])


@pytest.mark.parametrize(
    ("value", "low", "high", "pairs", "limit", "at_least", "verdict"),
    [
        (2.2, 2.1, 2.3, 10, 2.0, True, "met"),
        (1.9, 1.8, 1.95, 10, 2.0, True, "missed"),
        (2.0, 1.9, 2.1, 10, 2.0, True, "met (interval crosses the bar)"),
        (1.4, 1.38, 1.5, 30, 1.35, False, "missed"),
        (1.3, 1.2, 1.34, 30, 1.35, False, "met"),
        (1.2, 1.1, 1.3, 5, 1.0, True, "met (fewer than 20 pairs)"),
        (1.2, 1.1, 1.3, 20, 1.0, True, "met"),
        (0.98, 0.97, 0.99, 20, 1.0, True, "missed"),
    ],
)
def test_verdicts(
    value: float, low: float, high: float, pairs: int, limit: float, at_least: bool, verdict: str
) -> None:
    assert Bar.of_ratio("x", _ratio(value, low, high, pairs), limit, at_least=at_least).verdict == verdict


def test_a_cut_run_keeps_whole_sections_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ResultFile(path, HEAD).add(_section("first", 2.2))
    resumed = ResultFile.resume(path, HEAD | {"started": "later"})
    assert resumed.has("first")
    assert not resumed.has("second")
    resumed.add(_section("second", 1.0))
    data = json.loads(path.read_text(encoding="utf-8"))
    assert list(data["sections"]) == ["first", "second"]
    assert [bar["verdict"] for bar in resumed.bars()] == [
        "met (interval crosses the bar)",
        "missed (interval crosses the bar)",
    ]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["settings", "git", "machine"])
def test_another_commit_setting_or_machine_is_not_resumed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "result.json"
    ResultFile(path, HEAD).add(_section("first", 2.2))
    with pytest.raises(ValueError, match=f"another {name}"):
        ResultFile.resume(path, HEAD | {name: {"other": 1}})


def test_history_only_grows(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    result = ResultFile(tmp_path / "r.json", HEAD)
    result.add(_section("first", 2.2))
    append_history(HEAD, result.bars(), result="r.json", path=path)
    before = path.read_text(encoding="utf-8")
    append_history(HEAD, [], result="s.json", path=path)
    after = path.read_text(encoding="utf-8")
    assert after.startswith(before)
    lines = [json.loads(line) for line in after.splitlines()]
    assert [line["result"] for line in lines] == ["r.json", "s.json"]
    assert lines[0]["bars"]["first speed"][0] == 2.2


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}


def test_provenance_names_machine_versions_and_command() -> None:
    head = describe_run("benchmarks.engine_speed", ["--only", "a b", "--traffic", "/home/me/prompts"])
    assert head["command"] == "python -m benchmarks.engine_speed --only 'a b' --traffic prompts"
    assert head["versions"]["torch"]
    assert head["machine"]["threads"] >= 1
    assert peak_rss_bytes() > 10_000_000


def test_documents_get_the_newest_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    for started, value in (("2024-01-02", 3.0), ("2024-01-01", 9.0)):
        ResultFile(results / f"engine_speed-{started}.json", HEAD | {"started": started}).add(_section("copy", value))
    document = tmp_path / "doc.md"
    document.write_text(
        "before\n<!-- benchmarks:engine_speed -->\nold\n<!-- /benchmarks -->\nafter\n", encoding="utf-8"
    )
    arguments = [str(document), "--results", str(results)]
    assert make_docs([*arguments, "--check"]) == 1
    assert make_docs(arguments) == 0
    text = document.read_text(encoding="utf-8")
    assert "| copy speed | 3 x | 1.9 to 2.4 | ≥ 2 x | met" in text
    assert "abacus (avx2), 2 threads; outrider 0.1, torch 2.9; commit 0123456789" in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- /benchmarks -->\nafter\n")
    assert make_docs([*arguments, "--check"]) == 0
    capsys.readouterr()


def test_an_unknown_table_or_no_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="table 'speeed' is unknown"):
        render("<!-- benchmarks:speeed -->\n<!-- /benchmarks -->\n", tmp_path)
    with pytest.raises(ValueError, match=r"run python -m benchmarks\.profile_step first"):
        render("<!-- benchmarks:profile -->\n<!-- /benchmarks -->\n", tmp_path)
