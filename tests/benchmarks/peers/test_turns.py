"""Rounds over arms that cannot be had in a test, played by a counting process: resuming, failing, interleaving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.catalogue import REFERENCE, Arm
from benchmarks.peers.installs import NotAvailable
from benchmarks.peers.setups import Ready
from benchmarks.peers.summary import cells, rows_of
from benchmarks.peers.turns import Plan, make_items, measure
from benchmarks.peers.workfile import WorkFile

from outrider.errors import ConfigError, DataError

SETTINGS = {"tokens": 6}
PROMPTS = [("a", "qa", [5]), ("b", "rag", [7, 8]), ("c", "qa", [3])]


class CountingSetups:
    """Setups of the counting peer; an arm that is named ``missing`` cannot be had."""

    def __init__(self, counting: Any, probe: Ready) -> None:
        self._counting, self._probe = counting, probe

    def prepare(self, arm: Arm) -> Ready:
        if arm.name == "missing":
            raise NotAvailable("pip ended with status 1: no matching distribution")
        ready: Ready = self._counting(**arm.options)
        return ready

    def probe(self) -> Ready:
        return self._probe


def _arm(name: str, **options: Any) -> Arm:
    return Arm(name=name, peer="outrider", weights="own", plain=REFERENCE, options=options)


def _plan(streams: int = 1) -> Plan:
    items = make_items(PROMPTS, streams)
    return Plan(items=items, warm=[1], tokens=6, streams=streams, rounds=1, threads=1, stop_ids=(0,))


def _measure(arms: list[Arm], counting: Any, tmp_path: Path, *, streams: int = 1) -> WorkFile:
    work = WorkFile(tmp_path / "work.jsonl", SETTINGS)
    setups: Any = CountingSetups(counting, counting())
    measure(arms, setups, _plan(streams), work, logs=tmp_path / "logs")
    return work


def _lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "work.jsonl").read_text(encoding="utf-8").splitlines()]


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    """JSON strings may hold characters that end a line elsewhere."""
    path, reply = tmp_path / "work.jsonl", {"text": "one\u2028two\x85three\x0cfour"}
    WorkFile(path, SETTINGS).add(kind="probe", round=0, item="a", reply=reply)
    assert [probe["reply"] for probe in WorkFile(path, SETTINGS).probes] == [reply]


def test_every_arm_decodes_every_item_and_missing_ones_say_why(counting: Any, tmp_path: Path) -> None:
    arms = [_arm(REFERENCE), _arm("other"), _arm("missing"), _arm("broken", fails=True), _arm("dying", dies=True)]
    rows = {row.arm: row for row in rows_of(arms, _measure(arms, counting, tmp_path))}
    assert rows["other"].turns == 3
    assert rows["other"].agreement == 1.0
    assert rows["other"].identical == "3 of 3"
    assert cells(rows["missing"])[1] == "not available: pip ended with status 1: no matching distribution"
    assert "no such weights" in cells(rows["broken"])[1]
    assert "ended without an answer" in cells(rows["dying"])[1]


def test_a_cut_off_run_goes_on_with_what_is_left(counting: Any, tmp_path: Path) -> None:
    arms = [_arm(REFERENCE), _arm("other")]
    _measure(arms, counting, tmp_path)
    path = tmp_path / "work.jsonl"
    turns = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if '"turn"' in line]
    head = path.read_text(encoding="utf-8").splitlines(keepends=True)[0]
    path.write_text(head + "".join(turns[:3]) + turns[3][:20], encoding="utf-8")
    work = _measure(arms, counting, tmp_path)
    assert len(work.turns) == 6
    kept = [line for line in _lines(tmp_path) if line["kind"] == "turn"]
    assert len(kept) == 6
    assert kept[:3] == [json.loads(line) for line in turns[:3]]
    before = path.read_bytes()
    _measure(arms, counting, tmp_path)
    assert path.read_bytes() == before


def test_several_streams_share_an_item(counting: Any, tmp_path: Path) -> None:
    work = _measure([_arm(REFERENCE)], counting, tmp_path, streams=2)
    [row] = rows_of([_arm(REFERENCE)], work)
    assert (row.turns, row.first_token_ms, row.tokens_per_pass) == (1, None, None)
    assert [len(answer["tokens"]) for answer in work.turns[0, "a and 2 more", REFERENCE]["answers"]] == [6, 6, 6]


def test_the_context_fits_the_longest_prompt_and_answer() -> None:
    plan = Plan(
        items=make_items([("a", "qa", list(range(500)))], 1),
        warm=[1],
        tokens=128,
        streams=1,
        rounds=1,
        threads=1,
        stop_ids=(0,),
    )
    assert plan.context == 768


def test_other_settings_and_broken_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    WorkFile(path, SETTINGS).add(kind="probe", round=0, item="a", reply={})
    with pytest.raises(ConfigError, match="tokens 6, not 7"):
        WorkFile(path, {"tokens": 7})
    path.write_text(path.read_text(encoding="utf-8").replace('{"kind": "probe"', "{kind"), encoding="utf-8")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        WorkFile(path, SETTINGS)
