"""Timing helpers on a tiny random model, comparisons of runs, and the whole script on the real model with tiny settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.arms import Comparison, Run
from benchmarks.make_docs import render
from benchmarks.passes import time_passes
from benchmarks.profile_step import WatchedTarget, group_operations, split_forward

from benchmarks import engine_speed, sections
from outrider.device import Placement
from outrider.models.config import LlamaConfig
from outrider.models.llama import LlamaTarget
from outrider.sampling.params import SamplingParams

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_width=8,
    norm_eps=1e-5,
    max_positions=128,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)


@pytest.fixture
def tiny() -> LlamaTarget:
    return LlamaTarget.random(TINY, Placement(device=torch.device("cpu"), precision="float32"), seed=1)


def test_passes_are_timed_for_every_row_count_and_undone(tiny: LlamaTarget) -> None:
    watched = WatchedTarget(tiny)
    times = time_passes(watched, (1, 4), cached=10, rounds=3)
    assert {count: len(ms) for count, ms in times.items()} == {1: 3, 4: 3}
    assert all(ms > 0 for each in times.values() for ms in each)
    assert len(watched.forward_ms) == 1 + 2 * (3 + 2)


def test_a_profiled_forward_names_its_operations(tiny: LlamaTarget) -> None:
    watched = WatchedTarget(tiny)
    watched.is_profiling = True
    time_passes(watched, (1,), cached=4, rounds=1)
    parts = split_forward(10.0, watched.operations, watched.profiled_ms)
    assert sum(parts.values()) == pytest.approx(10.0)
    assert min(parts.values()) > 0


def test_a_batch_is_measured_over_passes_in_which_all_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences; one decodes while the other is read (1 s), both decode (10 s twice), one goes on alone (1 s)."""
    clock = [0.0]
    script = [
        (1.0, {"a": 1}),
        (1.0, {"a": 1, "b": 1}),
        (10.0, {"a": 1, "b": 1}),
        (10.0, {"a": 1, "b": 2}),
        (1.0, {"b": 1}),
    ]

    class Scripted:
        def submit(self, ids: object, params: object) -> None: ...

        @property
        def has_work(self) -> bool:
            return bool(script)

        def step(self) -> list[SimpleNamespace]:
            seconds, tokens = script.pop(0)
            clock[0] += seconds
            return [SimpleNamespace(id=id, token_ids=range(count)) for id, count in tokens.items()]

    monkeypatch.setattr(sections.time, "perf_counter", lambda: clock[0])
    assert sections._batch_rate(Scripted(), [[1], [2]], SamplingParams()) == 5 / 20.0  # type: ignore[arg-type]


def test_operations_are_sorted_into_parts() -> None:
    operations = {
        "mkldnn::_linear_pointwise": 4.0,
        "aten::_int_mm": 1.0,
        "aten::_scaled_dot_product_flash_attention_for_cpu": 2.0,
        "aten::mul": 0.5,
        "aten::copy_": 0.25,
    }
    assert group_operations(operations) == {"matrices": 5.0, "attention": 2.0, "small operations": 0.75}


def _run(tokens: int, decode_s: float, passes: int) -> Run:
    return Run(tokens=tuple(range(tokens)), decoded=tokens - 1, passes=passes, first_s=0.5, decode_s=decode_s)


def test_comparisons_charge_equal_work() -> None:
    runs = {"plain": [_run(11, 1.0, 10), _run(21, 2.0, 20)], "fast": [_run(11, 0.5, 5), _run(11, 0.5, 5)]}
    comparison = Comparison(prompts=["a", "b"], runs=runs)
    assert comparison.costs("plain", "plain") == pytest.approx([1.0, 2.0])
    assert comparison.costs("fast", "plain") == pytest.approx([0.5, 1.0])
    assert comparison.identical("fast", "plain") == "1 of 2"
    assert comparison.tokens_per_pass("fast") == 2.0
    assert comparison.walls("fast") == [1.0, 1.0]


def test_unknown_models_and_sections_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    arguments = ["--model", str(tmp_path / "missing.gguf"), "--out", str(out), "--no-history"]
    assert engine_speed.main(["--only", "copy", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not out.exists()
    with pytest.raises(SystemExit):
        engine_speed.main(["--only", "copyy", *arguments])


@pytest.mark.real_model
def test_the_script_measures_resumes_and_feeds_documents(tmp_path: Path) -> None:
    out, history = tmp_path / "engine_speed-test.json", tmp_path / "history.jsonl"
    tiny = ["--limit", "1", "--tokens", "8", "--pairs", "1", "--history", str(history)]
    assert engine_speed.main(["--only", "copy", "--out", str(out), *tiny]) == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    section = data["sections"]["copy"]
    assert section["summary"]["suffix"]["outputs_equal_to_plain"] == "1 of 1"
    assert section["summary"]["plain"]["tokens_per_pass"] == 1.0
    assert section["raw"]["arms"]["none"]["decoded"] == [7]
    assert engine_speed.main(["--only", "copy", "--resume", str(out), *tiny]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["sections"]["copy"] == section
    assert len(history.read_text(encoding="utf-8").splitlines()) == 2
    page = render("<!-- benchmarks:drafters -->\n<!-- /benchmarks -->\n", tmp_path)
    assert "| copy-heavy prompts | suffix |" in page
