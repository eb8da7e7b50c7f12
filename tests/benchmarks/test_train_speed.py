"""Training is timed on the real updates: arms that differ in their kernels alone, shares by the probes next to each turn."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.make_docs import render
from benchmarks.train_speed import main
from benchmarks.training_turns import (
    NUM_BATCHES,
    Cell,
    KeptStates,
    Material,
    Turn,
    bar_of,
    kernels_of,
    measure_cell,
    native_kernels,
    summary_of,
)

from benchmarks import training_turns
from outrider.device import Placement
from outrider.drafters.eagle_config import EagleConfig
from outrider.errors import ConfigError
from outrider.models.llama import LlamaTarget
from outrider.native.library import KERNELS, is_available
from outrider.native.training import training_kernels
from outrider.train.capture import LiveStates
from outrider.train.corpus import Text
from outrider.train.loop import Trainer
from outrider.train.packing import rows_of
from tests.drafters.heads import TARGET_CONFIG, VOCAB

PROMPTS = Path(training_turns.__file__).parent / "data" / "prose.jsonl"
CELL = Cell(batch_positions=40, draft_vocab=24, threads=1)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Native kernels that run on this processor, as a user asks for them; threads as they were afterwards."""
    name = next(name for name in KERNELS if is_available(name))
    monkeypatch.setenv("OUTRIDER_NATIVE", name)
    before = torch.get_num_threads()
    yield name
    torch.set_num_threads(before)


@pytest.fixture
def material() -> Material:
    """Twenty random texts of a tiny target in bfloat16, an answer of ten to sixteen tokens in each."""
    # Widths that the native kernels take.
    config = replace(TARGET_CONFIG, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1, head_width=32)
    target = LlamaTarget.random(config, Placement(device=torch.device("cpu"), precision="bfloat16"), 5)
    noise = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (20, 24), generator=noise).tolist()
    texts = tuple(
        Text(id=str(i), line=i + 1, tokens=tuple(row), trained=tuple(8 + i % 7 <= place for place in range(24)))
        for i, row in enumerate(tokens)
    )
    taps = EagleConfig.for_target(config, draft_vocab_size=1).tap_layers
    states = KeptStates(texts, LiveStates(target=target, tap_layers=taps, num_law_tokens=8))
    return Material(target=target, texts=texts, states=states)


def _turn(arm: str, index: int, *, rate: float, probes: tuple[float, float], seconds: float = 2.0) -> Turn:
    return Turn(
        arm=arm,
        turn=index,
        num_queries=1000,
        num_keys=3000,
        num_flop=rate * seconds,
        compute_s=seconds,
        states_s=0.5,
        probes=probes,
        loss=3.0,
    )


def _turns() -> list[Turn]:
    """The machine's rate halves on the way: shares stay at 0.6 and 0.3, rates do not."""
    probes = [(8e11, 8e11), (8e11, 4e11), (4e11, 4e11)]
    made = []
    for index, each in enumerate(probes):
        made.append(_turn("native", index, rate=0.6 * sum(each) / 2, probes=each))
        made.append(_turn("pytorch", index, rate=0.3 * sum(each) / 2, probes=each, seconds=4.5))
    return made


def test_arms_differ_in_their_kernels_alone(native: str) -> None:
    assert native_kernels() == native
    with kernels_of("native"):
        assert native_kernels() == native
    with kernels_of("pytorch"):
        assert training_kernels() is None
        with pytest.raises(ConfigError, match="--arm pytorch"):
            native_kernels()
    assert os.environ["OUTRIDER_NATIVE"] == native


def test_a_switch_that_nobody_set_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_NATIVE", raising=False)
    with pytest.raises(ZeroDivisionError), kernels_of("pytorch"):
        1 / 0  # noqa: B018
    assert "OUTRIDER_NATIVE" not in os.environ


def test_both_arms_do_the_same_updates_in_turns(
    material: Material, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, tuple[str, ...]]] = []
    whole = Trainer.step

    def step(trainer: Trainer) -> Any:
        ids = tuple(text.id for text in trainer.schedule.batch(trainer.update))
        seen.append((training_kernels() is None, ids))
        return whole(trainer)

    monkeypatch.setattr(Trainer, "step", step)
    turns = measure_cell(CELL, material, arms=("native", "pytorch"), turns=3, updates=4)
    assert [(turn.turn, turn.arm) for turn in turns] == [
        (0, "native"),
        (0, "pytorch"),
        (1, "pytorch"),
        (1, "native"),
        (2, "native"),
        (2, "pytorch"),
    ]
    batches = {is_plain: [ids for plain, ids in seen if plain == is_plain] for is_plain in (False, True)}
    assert batches[False] == batches[True]
    rounds = batches[False]
    assert len(rounds) == NUM_BATCHES + 12 and rounds == (rounds[:NUM_BATCHES] * 3)[: NUM_BATCHES + 12]
    sizes = {text.id: len(rows_of(text).queries) for text in material.texts}
    assert all(sum(sizes[id] for id in ids) >= CELL.batch_positions for ids in rounds)
    for one, other in zip(turns[::2], turns[1::2], strict=True):
        assert (one.num_queries, one.num_keys, one.num_flop) == (other.num_queries, other.num_keys, other.num_flop)
        assert one.loss == pytest.approx(other.loss, rel=0.02) and one.arm != other.arm
    assert all(before.probes[1] == after.probes[0] for before, after in itertools.pairwise(turns))


def test_texts_that_fill_no_update_are_refused(material: Material) -> None:
    cell = replace(CELL, batch_positions=material.num_queries + 1)
    with pytest.raises(ConfigError, match="--limit"):
        measure_cell(cell, material, arms=("pytorch",), turns=1, updates=1)


def test_shares_are_those_of_each_turn_in_its_own_probes() -> None:
    found = summary_of(CELL, _turns())
    for arm, share in (("native", 0.6), ("pytorch", 0.3)):
        told = found["arms"][arm]["share_of_matrix_rate"]
        assert told["lower_quartile"] == told["upper_quartile"] == pytest.approx(share)
    native = found["arms"]["native"]
    assert native["model_gflop_per_s"]["low"] == 240 and native["model_gflop_per_s"]["high"] == 480
    assert native["masked_positions_per_s"]["median"] == 400 and native["all_positions_per_s"]["median"] == 1200
    assert found["speed_up"]["value"] == 2.0 and found["probe_gflop_per_s"]["high"] == 800


def test_the_bar_is_that_of_the_native_arm() -> None:
    bar = bar_of(CELL, _turns())
    assert (bar.value, bar.pairs, bar.verdict) == (pytest.approx(0.6), 3, "met")
    slower = [replace(turn, num_flop=turn.num_flop * 0.9) for turn in _turns()]
    assert bar_of(CELL, slower).verdict == "missed"


def test_the_table_tells_shares_and_the_verdict(tmp_path: Path) -> None:
    result = {
        "kind": "train_speed",
        "started": "2026-11-30T12:00:00+00:00",
        "command": "python -m benchmarks.train_speed prompts.jsonl",
        "git": {"commit": "0123456789abcdef"},
        "machine": {"processor": "abacus", "flags": ["amx_bf16"], "threads": 2},
        "versions": {"torch": "2.13"},
        "settings": {"kernels": "amx", "turns": 3, "updates": 2, "corpus": {"texts": 20}},
        "cells": [summary_of(CELL, _turns())],
        "bars": [bar_of(CELL, _turns()).to_json()],
    }
    (tmp_path / "train_speed.json").write_text(json.dumps(result), encoding="utf-8")
    page = render("<!-- benchmarks:train_speed -->\n<!-- /benchmarks -->\n", tmp_path)
    assert "| 40, 24 | 1 | native | 0.60 (0.60 to 0.60) | 360 (300 to 420) |" in page
    assert "| 400 (400 to 400) | 2.00x | ≥ 0.55: met |" in page
    assert "| 40, 24 | 1 | PyTorch | 0.30 (0.30 to 0.30) |" in page and "native kernels: amx" in page


def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], native: str
) -> None:
    out = tmp_path / "r.json"
    missing = ["--model", str(tmp_path / "missing.gguf"), "--out", str(out), "--no-history"]
    assert main([str(PROMPTS), *missing]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not out.exists()


@pytest.mark.real_model
def test_the_script_measures_the_real_model_and_keeps_answers(tmp_path: Path, native: str) -> None:
    out, answers, history = (tmp_path / name for name in ("train_speed.json", "answers.jsonl", "history.jsonl"))
    grid = ["--batch-positions", "64", "--draft-vocab", "512", "--threads", "1", "--turns", "1", "--updates", "1"]
    few = ["--limit", "4", "--max-answer-tokens", "32", "--answers", str(answers)]
    assert main([str(PROMPTS), *grid, *few, "--out", str(out), "--history", str(history)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    [cell], [bar] = result["cells"], result["bars"]
    assert len(answers.read_text(encoding="utf-8").splitlines()) == result["settings"]["corpus"]["texts"] == 4
    assert [turn["arm"] for turn in cell["turns"]] == ["native", "pytorch"]
    assert cell["arms"]["native"]["share_of_matrix_rate"]["median"] == pytest.approx(bar["value"], abs=1e-3)
    assert bar["name"] == "training, 64 positions an update, 512 draft entries, 1 thread"
    assert bar["name"] in json.loads(history.read_text(encoding="utf-8"))["bars"]
    assert "≥ 0.55" in render("<!-- benchmarks:train_speed -->\n<!-- /benchmarks -->\n", tmp_path)
