"""A whole measurement on a small model: messy traffic in, records, samples and reasons out."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from outrider.errors import ConfigError, DataError
from outrider.measure.record import Arm, Counts, MeasureResult
from outrider.measure.run import measure
from outrider.measure.settings import MeasureSettings
from outrider.models.base import LoadedTarget
from outrider.models.load import load_target
from outrider.sampling.params import SamplingParams
from tests.models import _files

ROWS: list[Any] = [
    {"id": "a", "category": "one", "messages": [{"role": "user", "content": "hello hello hello"}]},
    {"id": "b", "category": "two", "messages": [{"role": "user", "content": "tell me more of it"}]},
    {"id": "c", "category": "two", "messages": [{"role": "user", "content": "hello hello hello"}]},
]
SAMPLING = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    shape = _files.config(max_positions=256)
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    _files.write_gguf(path, shape, _files.random_tensors(shape), kind=gguf.GGMLQuantizationType.F32)
    return load_target(str(path), dtype="float32", device="cpu")


def run(target: LoadedTarget, rows: Sequence[Any], *, path: Path | None = None, **changes: Any) -> MeasureResult:
    data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    settings = {"drafters": ("ngram", "slice:1"), "num_draft_tokens": (1, 3), "sampling": SAMPLING, **changes}
    return measure(target, io.BytesIO(data), MeasureSettings(**settings), answers_path=path)


def counts_by(result: MeasureResult) -> dict[tuple[str, Arm], Counts]:
    names = ("draft_ms", "verify_ms", "other_ms")
    return {
        (r.id, r.arm): Counts(**{f: getattr(r.counts, f) for f in Counts.__dataclass_fields__ if f not in names})
        for r in result.records
    }


def test_every_request_meets_every_arm(target: LoadedTarget) -> None:
    result = run(target, [*ROWS, b"", b"nonsense", {"id": "a", "prompt": "again"}, {"prompt": "x" * 300}])
    assert [arm.name for arm in result.arms] == [
        "ngram, chain 1", "ngram, chain 3", "slice:1, chain 1", "slice:1, chain 3",
    ]  # fmt: skip
    assert len(result.records) == 3 * 4 and {r.id for r in result.records} == {"a", "b", "c"}
    assert result.num_rows == 7 and [row.line for row in result.skipped] == [4, 5, 6, 7]
    labels = {r.id: dict(r.labels) for r in result.records}
    assert labels["a"]["category"] == "one" and labels["a"]["context"] == "0 to 255 tokens"
    assert labels["c"]["traffic"] == "repeated" and "traffic" not in labels["a"]
    assert all(r.is_on_policy and r.source == "replay" for r in result.records)
    assert all(r.counts.committed == r.num_output_tokens - 1 for r in result.records)
    assert result.costs is not None and set(result.costs.draft_ms) == {arm.name for arm in result.arms}
    assert result.costs.rows[0] == 1 and all(ms > 0 for ms in result.costs.pass_ms)
    assert result.settings["mean_agreement"] == 1.0 and result.settings["fingerprint"] == target.spec.fingerprint
    assert MeasureResult.from_json(json.loads(json.dumps(result.to_json()))) == result


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(max_tokens=12, temperature=0.9, seed=4)])
def test_replay_and_live_agree(target: LoadedTarget, sampling: SamplingParams) -> None:
    settings = {"drafters": ("ngram", "suffix", "slice:1"), "num_draft_tokens": (2, 4), "batch_size": 1}
    replayed = run(target, ROWS, sampling=sampling, **settings)
    live = run(target, ROWS, sampling=sampling, source="live", **settings)
    assert counts_by(replayed) == counts_by(live)
    assert {s.id: s.pieces for s in replayed.samples} == {s.id: s.pieces for s in live.samples}
    assert all(r.source == "live" and r.counts.verify_ms > 0 for r in live.records if r.counts.passes)


def test_samples_show_the_answer_and_can_be_left_out(target: LoadedTarget) -> None:
    result = run(target, ROWS)
    assert result.samples
    for sample in result.samples:
        assert {piece.kind for piece in sample.pieces} <= {"kept", "target", "refused"}
    texts = {"".join(p.text for p in s.pieces if p.kind != "refused") for s in result.samples if s.id == "a"}
    assert len(texts) == 1, "whoever drafts, the answer is the same"
    silent = run(target, ROWS, keeps_text=False)
    assert not silent.samples
    assert "hello" not in json.dumps(silent.to_json())


def test_answers_are_kept_for_the_next_run(target: LoadedTarget, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = run(target, ROWS, path=path)
    before = path.read_bytes()
    second = run(target, ROWS, path=path, drafters=("ngram",))
    assert path.read_bytes() == before
    assert {k: v for k, v in counts_by(first).items() if k[1].drafter == "ngram"} == counts_by(second)
    with pytest.raises(DataError, match="sampling"):
        run(target, ROWS, path=path, sampling=SamplingParams(max_tokens=5))


def test_text_of_others_is_labelled_and_does_not_stop_anything(target: LoadedTarget) -> None:
    log = {"id": "l", "request": {"messages": ROWS[1]["messages"]}, "response": "hello, what can I do for hello"}
    result = run(target, [ROWS[0], log])
    policies = {r.id: r.is_on_policy for r in result.records}
    assert policies == {"a": True, "l": False}
    assert result.settings["num_off_policy"] == 1 and any("off-policy" in warning for warning in result.warnings)


def test_the_rest_of_a_long_file_is_not_read(target: LoadedTarget) -> None:
    file = io.BytesIO(b"".join(json.dumps({"prompt": f"row {i}"}).encode() + b"\n" for i in range(1000)))
    settings = MeasureSettings(drafters=("ngram",), num_draft_tokens=(2,), sampling=SAMPLING, limit=3)
    result = measure(target, file, settings)
    assert file.tell() < 100 and result.num_rows == 3 and any("first 3" in warning for warning in result.warnings)


def test_sampled_chains_are_expected_and_sampled_trees_refused(target: LoadedTarget) -> None:
    hot = SamplingParams(max_tokens=12, temperature=0.9)
    result = run(target, ROWS, sampling=hot)
    assert {arm.verification for arm in result.arms} == {"rejection"}
    for record in result.records:
        assert record.is_on_policy and abs(record.counts.committed - (record.num_output_tokens - 1)) < 1e-9
    with pytest.raises(ConfigError, match=r"sampled trees.*--live"):
        run(target, ROWS, sampling=hot, drafters=("slice:1:depth=2",))
    live = run(target, ROWS[:1], sampling=hot, drafters=("slice:1:depth=2",), source="live")
    assert live.arms[0].is_tree and live.records


def test_a_file_of_something_else_does_not_fill_the_memory(
    target: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.measure.run._MOST_SKIPPED", 5)
    with pytest.raises(DataError, match=r"not JSON.*JSON Lines"):
        run(target, [b"<html>"] * 20)


def test_nothing_to_measure_is_said(target: LoadedTarget) -> None:
    with pytest.raises(DataError, match="blank line"):
        run(target, [b"", b""])
    for changes, match in (
        ({"drafters": ("none",)}, "baseline"),
        ({"drafters": ("ngram", "ngram")}, "twice"),
        ({"num_draft_tokens": (0,)}, "1 to"),
        ({"limit": -1}, "limit"),
    ):
        with pytest.raises(ConfigError, match=match):
            run(target, ROWS, **changes)
