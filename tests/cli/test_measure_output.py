"""What ``outrider measure`` prints and writes, and the exit status of its comparison."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.cli.measure_output import gate, json_values, print_tables, write_outputs
from outrider.errors import ConfigError, DataError
from outrider.measure.profile import read_profile
from outrider.measure.record import MeasureResult
from outrider.measure.report import read_result
from tests.measure.output_support import ARMS, made_up


@pytest.fixture(scope="module")
def result() -> MeasureResult:
    return made_up(40)


def test_tables_name_losses_as_plainly_as_gains(result: MeasureResult, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(replace(result, warnings=("pass times were taken on a busy machine",)))
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line for line in reversed(lines)}  # the first table wins
    assert lines[0] == "note: pass times were taken on a busy machine"
    assert "does not pay" in rows["random, chain 4"]
    assert rows["suffix, chain 4"].rstrip().endswith("pays") and "does not" not in rows["suffix, chain 4"]
    assert sum(" chain " in line or " tree " in line for line in lines) >= len(ARMS)
    assert any(line.startswith("category") for line in lines) and any(line.startswith("rag ") for line in lines)
    assert "intervals are over requests; 120 requests more would halve them" in lines
    assert any(line.split() == ["arm", "kept", *"12345678"] for line in lines)
    assert sum("of those reached" in line for line in lines) == 5
    assert "skipped 1 of 42: not JSON (line 41)" in lines
    assert lines[-1].startswith("Use ")


def test_a_long_name_takes_no_number_away(result: MeasureResult, capsys: pytest.CaptureFixture[str]) -> None:
    long = {
        arm: replace(arm, label=f"merged:{'a-head-with-a-name-' * 8}{index}") for index, arm in enumerate(result.arms)
    }
    records = tuple(replace(record, arm=long[record.arm]) for record in result.records)
    print_tables(replace(result, arms=tuple(long.values()), records=records, samples=()))
    printed = capsys.readouterr().out
    assert "…" not in printed and "speed-up" in printed and "requests tok/pass" in printed


def test_small_groups_are_called_small(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(made_up(9))
    printed = capsys.readouterr().out
    assert "9 small" in printed and "3 small" in printed
    assert "9 requests are too few" in printed


def test_fields_that_no_row_has_are_refused(result: MeasureResult, tmp_path: Path) -> None:
    for output in (
        lambda: print_tables(result, by=["categry"]),
        lambda: write_outputs(result, tmp_path, by=["categry"]),
    ):
        with pytest.raises(ConfigError, match="did you mean 'category'"):
            output()


def test_all_files_are_written_and_can_be_read(result: MeasureResult, tmp_path: Path) -> None:
    paths = write_outputs(result, tmp_path / "new" / "report", by=["category"])
    assert [path.name for path in paths[:3]] == ["result.json", "results.csv", "report.html"]
    assert all(path.stat().st_size > 500 for path in paths)
    assert read_result(paths[0]) == result
    assert json.loads(paths[0].read_text())["summary"]["fields"] == ["category"]
    assert json.loads(json.dumps(json_values(result, by=["category"]))) == json.loads(paths[0].read_text())
    assert [read_profile(path).num_speculative_tokens for path in paths[3:]] == [8, 8, 8, 4, 4]
    write_outputs(result, tmp_path / "new" / "report")  # a second run writes over the first


def test_missing_plots_are_said_once(
    result: MeasureResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    paths = write_outputs(result, tmp_path)
    assert (tmp_path / "report.html") in paths
    assert capsys.readouterr().err.count("outrider[report]") == 1


def test_a_folder_that_cannot_be_made_is_one_sentence(result: MeasureResult, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_outputs(result, tmp_path / "file" / "inside")


def test_gate(result: MeasureResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_outputs(result, tmp_path)
    assert gate(result, tmp_path, 0.99) == 0
    worse = replace(
        result,
        records=tuple(
            replace(each, counts=replace(each.counts, committed=each.counts.passes)) for each in result.records
        ),
        settings={**result.settings, "precision": "bfloat16"},
    )
    capsys.readouterr()
    assert gate(worse, tmp_path, 0.95) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "differs from the baseline: precision was 'int8', is now 'bfloat16'"
    assert sum(line.startswith("BELOW: ") for line in printed) == len(ARMS) - 1  # the random drafter cannot fall
    assert gate(worse, None, 1.5) == 1 and gate(result, None, 1.5) == 0
