"""The table of recorded scenarios: full runs only, in order, with what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.make_docs import render
from benchmarks.report import RESULTS
from benchmarks.scenario_table import scenario_rows

LAW = {
    "seeded calls equal": 40,
    "top_k 2, wrong control": 0.0005,
    "top_k 2, ngram": {"p": 0.857, "drafted": 10, "accepted": 4},
    "top_k 2, suffix": {"p": 0.6, "drafted": 5, "accepted": 4},
}


def entry(seen: dict[str, Any], *drafters: str, verdict: str = "passed") -> dict[str, Any]:
    run = {"git": {"commit": "0123456789abcdef"}}
    return {"verdict": verdict, "seconds": 119.0, "drafters": list(drafters), "run": run, "seen": seen}


def test_full_runs_in_order_with_what_was_seen(tmp_path: Path) -> None:
    result = {
        "S11, float32": entry({}, "ngram"),
        "S2, bfloat16, top_k 2": entry(LAW, "ngram", "suffix"),
        "S1, float32, small": entry({"arms": [1], "ties": []}, "ngram"),
        "S1, float32, ngram": entry({"error": "tokens differ"}, "ngram", verdict="failed"),
        "S1, bfloat16": entry({"arms": [1, 2], "ties": [1]}, "ngram"),
    }
    rows = scenario_rows(result)
    assert [row[0].split()[0] for row in rows] == ["S1", "S1", "S2", "S11"]
    assert [row[1] for row in rows] == ["bfloat16", "float32", "bfloat16, top_k 2", "float32"]
    assert rows[0][4] == "2 arms, 1 numeric ties"
    assert rows[1][3:5] == ("failed", "tokens differ")
    assert rows[2][4] == (
        "40 seeded calls equal; p of each drafter 0.86, 0.60; 15 drafts; wrong temperature p = 0.0005"
    )
    assert rows[2][5:] == ("2", "0123456789")
    (tmp_path / "scenarios.json").write_text(json.dumps(result))
    assert "| S11 odd prompts |" in render("<!-- benchmarks:scenarios -->\n<!-- /benchmarks -->", tmp_path)


def test_what_is_recorded_in_the_repository_can_be_shown() -> None:
    recorded = json.loads((RESULTS / "scenarios.json").read_text(encoding="utf-8"))
    assert all(row[3] == "passed" for row in scenario_rows(recorded))
