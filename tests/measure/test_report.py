"""Groups, warnings, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, DataError
from outrider.measure.record import Counts, MeasureResult, RequestRecord
from outrider.measure.report import (
    ALL,
    NOT_JUDGED,
    csv_text,
    read_result,
    summarise,
    summary_json,
    write_csv,
    write_result,
)
from tests.measure.output_support import ARMS, chain, made_up, made_up_costs, record

ARM = chain("suffix", 4)
COUNTS = Counts(passes=10, steps=8, committed=20, drafted=32, accepted=10, reached=(8.0, 6.0), kept=(6.0, 4.0))


def result_of(*records: RequestRecord) -> MeasureResult:
    arms = tuple(dict.fromkeys(each.arm for each in records))
    return MeasureResult(arms=arms, records=records, num_rows=len(records), costs=made_up_costs(arms))


def test_every_arm_on_every_group() -> None:
    summary = summarise(made_up(30))
    assert summary.fields == ("category", "context", "turn")
    assert [row.arm for row in summary.overall()] == [arm for arm, *_ in ARMS]
    assert {row.value for row in summary.of("category")} == {"rag", "math", "chat"}
    for field in summary.fields:
        rows = [row for row in summary.of(field) if row.arm == ARM]
        assert sum(row.num_requests for row in rows) == 30
        assert Counts.pooled(row.counts for row in rows).committed == summary.overall()[2].counts.committed
    loser = next(row for row in summary.overall() if row.arm.drafter == "random")
    assert loser.forecast is not None and loser.forecast.judgement == "does not pay"


def test_off_policy_repeated_and_synthetic_requests_decide_nothing() -> None:
    given = [record(ARM, line, COUNTS) for line in range(1, 25)]
    bad = [
        record(ARM, 30, replace(COUNTS, committed=100.0), is_on_policy=False),
        *(record(ARM, line, replace(COUNTS, committed=90.0), labels={"traffic": "repeated"}) for line in (31, 32)),
        record(ARM, 33, replace(COUNTS, committed=80.0), labels={"traffic": "synthetic"}),
    ]
    alone, mixed = summarise(result_of(*given)), summarise(result_of(*given, *bad))
    assert mixed.of(ALL) == alone.of(ALL)
    assert mixed.recommendation == alone.recommendation
    shown = {row.value: row for row in mixed.of(NOT_JUDGED)}
    assert {value: row.num_requests for value, row in shown.items()} == {"off-policy": 1, "repeated": 2, "synthetic": 1}
    assert all(row.forecast is None for row in shown.values())
    assert shown["off-policy"].rates.tokens_per_pass.value == 10.0
    assert "2 of 28 requests are repeated: they are shown, but no verdict rests on them" in mixed.warnings


def test_if_nothing_may_be_judged_the_rest_is_shown_without_a_verdict() -> None:
    summary = summarise(result_of(*(record(ARM, line, COUNTS, is_on_policy=False) for line in range(1, 31))))
    assert [row.field for row in summary.overall()] == [NOT_JUDGED]
    assert summary.recommendation.arm is None
    assert all(row.forecast is None for row in summary.rows)


def test_a_request_that_was_replayed_and_decoded_counts_once() -> None:
    live = record(ARM, 1, replace(COUNTS, committed=21.0), source="live")
    for pair in ((record(ARM, 1, COUNTS), live), (live, record(ARM, 1, COUNTS))):
        summary = summarise(result_of(*pair))
        assert summary.overall()[0].num_requests == 1
        assert summary.overall()[0].counts.committed == 21.0
        assert any("both replayed and decoded" in warning for warning in summary.warnings)


def test_groups_come_in_a_natural_order_and_names_are_no_groups() -> None:
    given = [
        record(ARM, line, COUNTS, labels={"turn": str(1 + line % 12), "user": f"u{line}", "one": "x"} | extra)
        for line, extra in ((line, {"late": "yes"} if line > 50 else {}) for line in range(1, 61))
    ]
    summary = summarise(result_of(*given))
    assert [row.value for row in summary.of("turn")] == [str(turn) for turn in range(1, 13)]
    assert {row.value: row.num_requests for row in summary.of("late")} == {"(none)": 50, "yes": 10}
    assert summary.unsplit == {"user": "60 values"}
    assert summary.fields == ("turn", "late")


def test_fields_can_be_asked_for() -> None:
    given = [record(ARM, line, COUNTS, labels={"user": f"u{line}", "turn": "1"}) for line in range(1, 31)]
    summary = summarise(result_of(*given), by=["user"])
    assert summary.fields == ("user",) and len(summary.of("user")) == 30
    with pytest.raises(
        ConfigError, match=r"--by 'usr' is not possible: no row has such a field; did you mean 'user'\?"
    ):
        summarise(result_of(*given), by=["usr"])


def test_the_result_comes_back_from_its_file(tmp_path: Path) -> None:
    result = made_up(6)
    path = tmp_path / "result.json"
    write_result(result, summarise(result), path)
    assert read_result(path) == result
    values = json.loads(path.read_text(), parse_constant=pytest.fail)
    groups = values["summary"]["groups"]
    assert {"arm", "field", "value", "rates", "forecast", "requests_more_to_halve"} <= set(groups[0])
    assert groups[0]["forecast"]["judgement"] in ("pays", "does not pay", "cannot tell")


def test_without_drafts_rates_are_null_and_never_nan() -> None:
    summary = summarise(result_of(*(record(ARM, line, Counts(passes=4, committed=4)) for line in range(1, 8))))
    values = json.loads(json.dumps(summary_json(summary)), parse_constant=pytest.fail)
    assert values["groups"][0]["rates"]["accepted_length"] == {"value": None, "low": None, "high": None}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{torn", "not JSON"),
        ("[1]", "holds no object"),
        ('{"format": "else"}', "not a result of outrider measure"),
        ('{"format": "outrider measure 1", "arms": [{"wrong": 1}]}', "damaged"),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=said):
        read_result(path)


def test_csv_has_a_row_for_each_arm_and_group(tmp_path: Path) -> None:
    summary = summarise(made_up(30))
    write_csv(summary, tmp_path / "results.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert len(rows) == len(summary.rows)
    first, ours = rows[0], summary.rows[0]
    assert float(first["tokens_per_pass"]) == ours.rates.tokens_per_pass.value
    assert float(first["speedup_low"]) < float(first["speedup"]) < float(first["speedup_high"])
    assert len(rows[3]["unconditional"].split()) == 8
    assert {row["judgement"] for row in rows} >= {"pays", "does not pay"}


def test_csv_words_are_never_formulas() -> None:
    evil: dict[str, Any] = {"category": "=HYPERLINK(1)"}
    given = [record(ARM, line, COUNTS, labels=evil if line % 2 else {"category": "fine"}) for line in range(1, 9)]
    rows = list(csv.DictReader(io.StringIO(csv_text(summarise(result_of(*given))))))
    assert {row["value"] for row in rows} == {"", "fine", "'=HYPERLINK(1)"}
