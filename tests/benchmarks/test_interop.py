"""Counting two engines' drafts alike, and the comparison's verdict; vLLM itself is played."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.interop import vllm_eagle3 as script
from benchmarks.interop.counting import Answer, Counts, count_own, count_whole, shared_lengths, worst_gap
from benchmarks.peers.setups import DRIVERS, Ready

from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import HeadInfo, save_head
from outrider.models.load import load_target
from tests.models import _files


def _answer(length: int, *accepted: int, drafted: int = 2) -> Answer:
    return Answer(tokens=tuple(range(length)), drafted=(drafted,) * len(accepted), accepted=accepted)


def test_own_counts_are_sums_before_divisions() -> None:
    counts = count_own([_answer(9, 2, 0, 1), _answer(4, 2)], 2)
    assert counts == Counts(steps=4, drafted=8, accepted=5, kept=(3, 2))
    assert counts.accepted_length == 2.25 and counts.rates == [0.75, 0.5]
    assert count_own([], 2).accepted_length == 1.0 and count_own([], 2).rates == [0.0, 0.0]


def test_whole_steps_have_room_and_do_not_end_the_answer() -> None:
    # Tokens committed: 1 from the prompt's pass, then 3, 1, 3, 2: ten in all.
    answer = _answer(10, 2, 0, 2, 1)
    assert count_whole([answer], 2, max_tokens=100).kept == (2, 2), "the last step ends the answer"
    assert count_whole([answer], 2, max_tokens=9).steps == 3
    assert count_whole([answer], 2, max_tokens=7).steps == 2, "the third begins with 5 of 7 tokens there"


def test_both_ways_of_cutting_the_end_give_the_same_whole_steps() -> None:
    """One answer of six tokens: the first engine cuts the last step's drafts, the other does not."""
    cut = Answer(tokens=tuple(range(6)), drafted=(4, 2), accepted=(2, 2))
    uncut = Answer(tokens=tuple(range(6)), drafted=(4, 4), accepted=(2, 4))
    assert count_own([cut], 4) != count_own([uncut], 4)
    assert count_whole([cut], 4, max_tokens=6) == count_whole([uncut], 4, max_tokens=6)


def test_only_steps_of_the_same_text_are_counted() -> None:
    ours = [Answer(tokens=(5, 6, 7, 8, 9, 4), drafted=(2, 2), accepted=(2, 1))]
    theirs = [Answer(tokens=(5, 6, 7, 8, 3, 3, 3), drafted=(2, 2, 2), accepted=(2, 0, 1))]
    lengths = shared_lengths(ours, theirs)
    assert lengths == [4] and shared_lengths(ours, ours) == [6]
    same = [count_whole(each, 2, max_tokens=99, lengths=lengths) for each in (ours, theirs)]
    assert same[0] == same[1] == Counts(steps=1, drafted=2, accepted=2, kept=(1, 1))


def test_the_worst_gap_is_over_length_and_every_rate() -> None:
    one = Counts(steps=10, drafted=20, accepted=10, kept=(6, 4))
    other = Counts(steps=10, drafted=20, accepted=10, kept=(8, 2))
    assert worst_gap(one, other) == pytest.approx(0.2)
    assert worst_gap(one, one) == 0


PLAYED = f"""
import sys
sys.path.insert(0, {str(DRIVERS)!r})
from wire import serve

def load(start):
    record = dict(per_step_drafted=[2, 2], per_step_accepted=[0, 0])
    def answer(request):
        answers = [dict(tokens=[1, 2, 3], finish_reason="length", steps=record) for _ in request["prompts"]]
        return dict(answers=answers, wall_s=1.0, counters=[dict(name="vllm:spec_decode_num_drafts", value=2)])
    print("INFO loading the drafter from", start["options"]["head"])
    return answer, dict(versions=dict(vllm="0"))

serve(load)
"""


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Export, check, our engine, a played vLLM, files, verdict; the second run asks vLLM nothing."""
    shape = _files.config()
    model = _files.write_gguf(tmp_path / "tiny.gguf", shape, _files.random_tensors(shape), kind=0)
    target = load_target(model, dtype="float32")
    head = EagleHead(EagleConfig.for_target(shape, draft_vocab_size=20, tap_layers=(0, 1, 2)))
    head.initialise(range(20), seed=1)
    save_head(tmp_path / "head", head, HeadInfo(target_name=str(model), target_fingerprint=target.spec.fingerprint))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in "abc"))
    driver = tmp_path / "played.py"
    driver.write_text(PLAYED)

    def ready(args: Any, checkpoint: Any) -> Ready:
        options = {"head": str(script._exported_folder(args))}
        return Ready(python=Path(sys.executable), driver=driver, model="none", options=options)

    monkeypatch.setattr(script, "_ready", ready)
    out = tmp_path / "result.json"
    argv = [str(tmp_path / "head"), "--model", str(model), "--rows", str(rows), "--tokens", "8"]
    argv += ["--num-draft-tokens", "2", "--root", str(tmp_path / "root"), "--out", str(out)]
    status = script.main(argv)
    result, raw = json.loads(out.read_text()), json.loads((tmp_path / "result_raw.json").read_text())
    assert result["prompts"] == 3 and result["check"] == {"engine": "vllm 0.32.0", "tensors": 15, "ids": 20}
    assert result["counts"]["each its own"]["vllm"]["steps"] == 6
    assert result["outrider"]["precision"] == "bfloat16"
    assert status == (0 if result["agrees"] else 1)
    assert raw["turns"][0]["counters"][0]["value"] == 2 and len(raw["turns"][0]["answers"]) == 3
    assert raw["log"] == ["INFO loading the drafter from ROOT/interop/head"]
    assert "of 3 outputs identical" in capsys.readouterr().out
    monkeypatch.setattr(script, "_ready", lambda *_: pytest.fail("asked again"))
    assert script.main(argv) == status
    assert script.main([str(tmp_path / "nowhere"), *argv[1:]]) == 2
    assert "holds no config.json" in capsys.readouterr().err
