"""Picking and rendering prompts, installing, and the whole script on arms that can be had in a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.__main__ import by_turns, main, pick
from benchmarks.peers.installs import NotAvailable, run_logged
from benchmarks.peers.weights import write_hf_folder
from benchmarks.prompts import PromptRow, load_group

from benchmarks.peers import __main__ as script


def _row(id: str, group: str, category: str) -> PromptRow:
    return PromptRow(id=id, group=group, category=category, messages=[{"role": "user", "content": id}])


def test_tasks_take_turns() -> None:
    rows = [_row("m1", "spec_bench", "math"), _row("m2", "spec_bench", "math"), _row("q1", "spec_bench", "qa")]
    rows.append(_row("h1", "humaneval", "code"))
    assert [row.id for row in by_turns(rows)] == ["m1", "q1", "h1", "m2"]


def test_the_whole_set_serves_where_the_subset_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(group: str, *, traffic: Path | None = None, full: bool = False) -> list[PromptRow]:
        return [_row(f"{task}{n}", group, task) for task in ("qa", "rag") for n in range(5 if full else 2)]

    monkeypatch.setattr(script, "load_group", load)
    assert [row.id for row in pick("spec_bench", 2, None)] == ["qa0", "qa1", "rag0", "rag1"]
    assert [row.id for row in pick("spec_bench", 3, None)] == ["qa0", "qa1", "qa2", "rag0", "rag1", "rag2"]
    assert [row.id for row in pick("humaneval", 3, None)] == ["qa0", "qa1", "rag0"]


def test_a_failing_command_gives_its_last_error(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "setup.log"
    code = "import sys; print('ERROR: no matching distribution'); print('bye'); sys.exit(4)"
    with pytest.raises(NotAvailable, match=r"status 4: ERROR: no matching distribution \(log: "):
        run_logged([sys.executable, "-c", code], log)
    with pytest.raises(NotAvailable, match="cannot be run"):
        run_logged([tmp_path / "missing"], log)
    run_logged([sys.executable, "-c", "print('fine')"], log)
    assert "fine" in log.read_text(encoding="utf-8")


def test_all_arms_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "llamacpp-q8_0-default  (own plain: llamacpp-q8_0-plain)" in capsys.readouterr().out
    assert main(["--only", "ollama"]) == 2
    assert capsys.readouterr().err.startswith("error: arm 'ollama' is unknown")


@pytest.mark.real_model
def test_outrider_and_transformers_really_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "pick", lambda group, count, traffic: load_group("copy_heavy")[:2])
    arms = ["transformers-bf16-lookup", "outrider-bf16-plain"]
    arguments = ["--only", *arms, "--groups", "humaneval", "--tokens", "8", "--threads", "1"]
    arguments += ["--root", str(tmp_path), "--out", str(tmp_path / "peers.json")]
    assert main(arguments) == 0
    rows = {row["arm"]: row for row in json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))["rows"]}
    assert {name: row["turns"] for name, row in rows.items()} == dict.fromkeys(arms, 2)
    assert rows["outrider-bf16-plain"]["identical"] == "2 of 2"
    assert rows["outrider-bf16-plain"]["tokens_per_pass"] == 1.0
    assert rows["transformers-bf16-lookup"]["agreement"] > 0.5
    assert rows["transformers-bf16-lookup"]["tokens_per_pass"] >= 1.0
    assert "transformers-bf16-lookup" in capsys.readouterr().out


@pytest.mark.real_model
def test_the_exported_folder_is_the_same_model(tmp_path: Path) -> None:
    from outrider.models.load import load_checkpoint

    ours = load_checkpoint("smollm2-135m-instruct")
    theirs: Any = load_checkpoint(write_hf_folder(ours, tmp_path))
    assert theirs.config == ours.config
    assert theirs.tokenizer.vocabulary_hash() == ours.tokenizer.vocabulary_hash()
    for name in ours.tensor_names()[::37]:
        assert (theirs.tensor(name).float() == ours.tensor(name).float()).all(), name
