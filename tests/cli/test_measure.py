"""``outrider measure`` from the command line; what it prints and writes is looked at in test_measure_output.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli.measure import _lengths
from outrider.errors import ConfigError
from outrider.measure.record import MeasureResult
from tests.cli.conftest import Ran
from tests.cli.test_generate import write_rows

Run = Callable[..., Ran]


@pytest.fixture
def measure(run: Run, tiny_gguf: Path) -> Run:
    """``outrider measure`` with the tiny model, float32, 10 tokens."""

    def call(*argv: object, stdin: str = "") -> Ran:
        return run("measure", *argv, "--target", tiny_gguf, "--dtype", "float32", "-t", "10", stdin=stdin)

    return call


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "t.jsonl", {"prompt": "hello hello", "category": "x"}, "", {"prompt": "more"})


def test_json_is_the_whole_result(measure: Run, traffic: Path) -> None:
    ran = measure(traffic, "--json", "-k", "1-2,4", "-d", "ngram")
    assert ran.status == 0, ran.err
    result = MeasureResult.from_json(json.loads(ran.out))
    assert [arm.num_draft_tokens for arm in result.arms] == [1, 2, 4] and len(result.records) == 6
    assert [(row.line, row.reason) for row in result.skipped] == [(2, "blank line")]


def test_tables_and_files(measure: Run, traffic: Path, tmp_path: Path) -> None:
    ran = measure(traffic, "--out", tmp_path / "report", "-k", "2", "--by", "category")
    assert ran.status == 0, ran.err
    assert "ngram" in ran.out and "suffix" in ran.out and "blank line" in ran.out
    assert (tmp_path / "report" / "answers.jsonl").exists()
    again = measure(traffic, "--baseline", tmp_path / "report", "--fail-under", "0.99", "-k", "2")
    assert again.status == 0, again.err


def test_text_stays_inside(measure: Run, traffic: Path, tmp_path: Path) -> None:
    ran = measure(traffic, "--no-text", "--out", tmp_path / "o", "-k", "2", "--json")
    assert ran.status == 0, ran.err
    written = b"".join(path.read_bytes() for path in (tmp_path / "o").rglob("*") if path.is_file())
    assert "hello" not in ran.out and b"hello" not in written
    assert not (tmp_path / "o" / "answers.jsonl").exists()


def test_live_and_standard_input(measure: Run) -> None:
    ran = measure("-", "--live", "-d", "slice:1", "-k", "2", "--json", stdin='{"prompt": "hello"}\n')
    assert ran.status == 0, ran.err
    assert [record["source"] for record in json.loads(ran.out)["records"]] == ["live"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-k", "8-1"], "holds no length"),
        (["-k", "few"], "1-8"),
        (["--answers", "mine"], "recorded"),
        (["--draft", "nobody"], "nobody"),
        (["--draft", "none"], "baseline"),
    ],
)
def test_mistakes_are_one_line(measure: Run, traffic: Path, flags: list[str], says: str) -> None:
    ran = measure(traffic, *flags)
    assert ran.status == 2 and ran.err.count("\n") == 1 and says in ran.err


def test_a_file_that_is_not_there(measure: Run, tmp_path: Path) -> None:
    ran = measure(tmp_path / "none.jsonl")
    assert ran.status == 2 and "cannot be read" in ran.err


def test_lengths() -> None:
    assert _lengths(["1-3", "8", "2, 5"]) == (1, 2, 3, 5, 8)
    with pytest.raises(ConfigError, match="not possible"):
        _lengths(["-3"])
