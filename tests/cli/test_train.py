"""The command: preview, refusals by name, and a real head from a handful of rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from outrider.cli.main import main

pytestmark = pytest.mark.real_model


@pytest.fixture()
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.jsonl"
    questions = [
        "Name a colour.",
        "Count to three.",
        "Say hello.",
        "What is rain?",
        "Name a fruit.",
        "Why is ice cold?",
    ]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in questions]
    path.write_text("\n".join(map(json.dumps, rows)) + "\nbroken\n")
    return path


def test_preview_marks_trained_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    path.write_text(json.dumps({"messages": chat}) + "\n{\n")
    assert main(["train", "eagle3", str(path), "--preview", "2", "--answers", "keep"]) == 0
    shown = capsys.readouterr().out
    assert "⟦Hello.<|im_end|>⟧" in shown and "<|im_start|>assistant\n⟦" in shown
    assert "left out: 1 not a row (lines 2)" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--answers", "both"], "--answers 'both' is unknown; allowed: target, keep"),
        ([], "--out is missing"),
        (["--out", "x", "--loss", "mse"], "loss 'mse' is unknown"),
        (["--out", "x", "--endpoint", "http://a", "--answers", "keep"], "give one of them"),
        (["--out", "x", "--limit", "0"], "--limit 0 is not possible"),
    ],
)
def test_mistakes_are_named(traffic: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main(["train", "eagle3", str(traffic), *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("given", "then"), [(None, "passive"), ("active", "active")])
def test_threads_rest_unless_told_otherwise(
    traffic: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, then: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert main(["train", "eagle3", str(traffic)]) == 2, "no --out"
    assert os.environ["OMP_WAIT_POLICY"] == then


def test_nothing_to_train_on(traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "eagle3", str(traffic), "--answers", "keep", "--out", str(tmp_path / "head")]) == 2
    assert "leaves nothing to train on: 1 not a row, 6 no assistant text" in capsys.readouterr().err


def test_a_head_from_a_handful_of_rows(traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head"
    small = ["--max-answer-tokens", "12", "--draft-vocab", "512", "--epochs", "1", "--batch-positions", "40"]
    quick = ["--held-out", "1", "--held-out-tokens", "6", "--law-tokens", "16", "--unroll", "2", "--taps", "store"]
    assert main(["train", "eagle3", str(traffic), "--out", str(out), *small, *quick]) == 0
    said = capsys.readouterr().err
    assert "forecast: " in said and "1 not a row" in said and "% of the trained tokens" in said
    config = json.loads((out / "config.json").read_text())
    assert config["head"]["tap_layers"] == [2, 15, 27] and config["acceptance"]["prompts"] == 1
    assert (out / "curves.html").exists() and (out / "training" / "answers.jsonl").read_text().count("\n") == 6
