"""A whole run: the folder it leaves, exact resumption after a kill, and a head that is served."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.head_folder import load_head
from outrider.errors import ConfigError, DataError
from outrider.files import hold
from outrider.models.llama import LlamaTarget
from outrider.train.corpus import Corpus, Text
from outrider.train.evaluate import decode_held_out, prompt_tokens
from outrider.train.run import train_eagle
from outrider.train.start import Start
from tests.train.tiny_run import CONFIG, Quiet, make_job

ROOT = Path(__file__).parents[2]
SHORT = replace(CONFIG, num_epochs=2, evaluate_every=0)


def log_of(out: Path, kind: str = "update") -> list[dict[str, Any]]:
    lines = (out / "training" / "log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    out = tmp_path_factory.mktemp("whole") / "head"
    train_eagle(make_job(out), Quiet())
    return out


def test_a_killed_run_goes_on_exactly(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    process = subprocess.Popen([sys.executable, "-m", "tests.train.tiny_run", str(out)], cwd=ROOT)
    deadline = time.monotonic() + 60
    state = out / "training" / "state.pt"
    while not state.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert state.exists(), "killed too early"
    report = Quiet()
    train_eagle(make_job(out, is_resumed=True), report)
    assert any(line.startswith("going on behind update") for line in report.lines), report.lines
    for kind in ("update", "evaluation"):
        expected, found = log_of(whole, kind), log_of(out, kind)
        assert [line["update"] for line in expected] == [line["update"] for line in found]
        same = ("loss", "learning_rate", "positions") if kind == "update" else ("tokens_per_pass", "kept", "reached")
        assert [[line[name] for name in same] for line in expected] == [[line[name] for name in same] for line in found]
    left, right = load_file(whole / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(left[name].equal(right[name]) for name in left)


def test_the_folder_is_a_head_that_drafts(whole: Path, target: LlamaTarget) -> None:
    loaded = load_head(whole, target)
    assert loaded.info.target_fingerprint == target.spec.fingerprint
    assert loaded.info.data["texts"] == 16
    assert loaded.info.training["unroll"] == CONFIG.unroll
    assert set(loaded.info.hidden_statistics) == {"positions", "tap 1", "tap 2", "tap 4"}
    best = max(line["tokens_per_pass"] for line in log_of(whole, "evaluation"))
    assert loaded.info.acceptance["tokens_per_pass"] == best > 1
    page = (whole / "curves.html").read_text()
    assert page.count("<svg") == 3 and "prefers-color-scheme: dark" in page and "http" not in page
    assert "tokens_per_pass" in (whole / "README.md").read_text()


def test_it_learns_what_it_was_shown(tmp_path: Path, target: LlamaTarget) -> None:
    """One text, over and over: its own answer is then foreseen whole."""
    [text] = make_job(tmp_path).corpus.texts[:1]
    config = replace(CONFIG, num_epochs=300, unroll=4, evaluate_every=0, save_every_s=1e9)
    train_eagle(make_job(tmp_path / "one", corpus=Corpus(texts=(text,)), config=config, num_held_out=0), Quiet())
    head = load_head(tmp_path / "one", target).head
    found = decode_held_out(
        target, EagleDrafter(head, target.placement), [prompt_tokens(text)], max_tokens=16, num_draft_tokens=4
    )
    assert found.stats.accepted >= 0.95 * found.stats.drafted > 0


@pytest.mark.parametrize("taps", ["live", "store"])
def test_taps_live_or_stored_train_alike(tmp_path: Path, taps: str) -> None:
    out = tmp_path / taps
    report = Quiet()
    train_eagle(make_job(out, config=SHORT, taps=taps), report)
    assert (out / "training" / "taps" / "manifest.json").exists() == (taps == "store")
    assert report.lines[0].startswith("forecast: ")
    assert log_of(out)[-1]["share_of_matrix_rate"] > 0


def test_a_folder_in_use_and_another_recipe_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "head"
    with pytest.raises(ConfigError, match="holds no training run to go on with"):
        train_eagle(make_job(out, is_resumed=True), Quiet())
    train_eagle(make_job(out, config=SHORT), Quiet())
    with pytest.raises(ConfigError, match="give --resume"):
        train_eagle(make_job(out, config=SHORT), Quiet())
    other = replace(SHORT, learning_rate=0.5)
    with pytest.raises(DataError, match=r"learning_rate = 0\.01, now it is 0\.5"):
        train_eagle(make_job(out, config=other, is_resumed=True), Quiet())
    with hold(out / "training" / ".lock"), pytest.raises(ConfigError, match="another run trains there now"):
        train_eagle(make_job(out, config=SHORT, is_resumed=True), Quiet())


def test_no_texts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        train_eagle(make_job(tmp_path / "head", corpus=Corpus(texts=())), Quiet())


def test_prompt_of_a_text() -> None:
    text = Text(id="a", line=1, tokens=(1, 2, 3, 4), trained=(False, True, False, True))
    assert prompt_tokens(text) == [1, 2, 3]


def test_training_goes_on_from_a_head(whole: Path, tmp_path: Path) -> None:
    """With its vocabulary, and better than it began where the first head knew nothing."""
    start = Start.parse(f"head:{whole}", 4)
    assert start.head is not None
    out, config = tmp_path / "more", replace(CONFIG, num_epochs=1, learning_rate=1e-5, evaluate_every=0)
    train_eagle(make_job(out, start=start, shape=start.head.head.config, config=config), Quiet())
    more = load_file(out / "model.safetensors")
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert more[name].shape == tensor.shape and (more[name].float() - tensor.float()).abs().max() < 0.02, name
    assert log_of(out)[0]["loss"] < log_of(whole)[0]["loss"] - 0.15  # an untrained head loses 2.57, this one 2.31
    assert json.loads((out / "config.json").read_text())["training"]["init"].startswith("head:head, trained on ")
