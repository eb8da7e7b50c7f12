"""Time to the first token: prompts cut to one length, plain arms, the pick of the fastest peer, the table and the bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.make_docs import render
from benchmarks.peers.__main__ import main
from benchmarks.peers.catalogue import REFERENCE, all_arms, choose
from benchmarks.peers.first_token import cut_items, first_token_arms, first_token_result
from benchmarks.peers.workfile import WorkFile
from benchmarks.prompts import load_group
from benchmarks.provenance import describe_run
from benchmarks.report import write_json

from benchmarks.peers import first_token
from outrider.errors import ConfigError

TRANSFORMERS, LLAMA, VLLM = "transformers-bf16-plain", "llamacpp-bf16-plain", "vllm-bf16-plain"


def test_every_plain_arm_takes_part_and_peers_that_read_in_parts_do_so_whole_too() -> None:
    arms = {arm.name: arm for arm in first_token_arms()}
    assert {name for name in arms if not name.endswith("-whole")} == {
        arm.name for arm in all_arms(num_draft_tokens=8) if arm.is_plain
    }
    assert all(arm.is_plain for arm in arms.values())
    assert arms["llamacpp-q8_0-plain-whole"].options["arguments"] == ["--batch-size", "2048", "--ubatch-size", "2048"]
    assert arms["openvino-int8-plain-whole"].options["max_batched_tokens"] == 2048
    assert "max_batched_tokens" not in arms["openvino-int8-plain"].options
    assert [arm.name for arm in choose(first_token_arms(), ["outrider"])] == [REFERENCE, "outrider-int8-plain"]


def test_prompts_are_cut_to_one_length_and_short_ones_left_out() -> None:
    prompts = [("a", "rag", [1] * 9), ("b", "rag", [2] * 12), ("c", "rag", [3] * 10), ("d", "rag", [4] * 11)]
    items = cut_items(prompts, 10, 2)
    assert [(item.name, item.prompts) for item in items] == [("b", [[2] * 10]), ("c", [[3] * 10])]
    with pytest.raises(ConfigError, match="3 prompts have 10 tokens, 4 are needed"):
        cut_items(prompts, 10, 4)


@pytest.fixture
def work(tmp_path: Path) -> WorkFile:
    """Four prompts: vLLM is fastest on the first and third, llama.cpp on the others; Outrider takes 0.2 s."""
    file = WorkFile(tmp_path / "work.jsonl", {})
    seconds = {TRANSFORMERS: [1.0] * 4, LLAMA: [0.5, 0.1, 0.5, 0.1], VLLM: [0.2, 0.25, 0.2, 0.25], REFERENCE: [0.2] * 4}
    for name, each in seconds.items():
        for item, wall_s in zip("abcd", each, strict=True):
            reply = {"answers": [{"tokens": [7], "first_s": wall_s / 2}], "wall_s": wall_s}
            file.add(kind="turn", round=0, item=item, arm=name, reply=reply)
    file.add(kind="probe", round=0, item="a", reply={"read_gb_per_s": 20.0, "bf16_tflop_per_s": 0.5})
    return file


def _result(work: WorkFile) -> dict[str, Any]:
    names = (TRANSFORMERS, LLAMA, VLLM, "openvino-int8-plain", REFERENCE)
    return first_token_result([arm for arm in first_token_arms() if arm.name in names], work)


def test_the_fastest_peer_is_picked_on_other_prompts_than_it_is_compared_on(work: WorkFile) -> None:
    result = _result(work)
    rows = {row["arm"]: row for row in result["rows"]}
    assert result["fastest_peer"] == VLLM
    assert rows[VLLM]["ratio"] is None
    assert (rows[REFERENCE]["ratio"]["value"], rows[REFERENCE]["ratio"]["pairs"]) == (0.8, 2)
    assert rows[LLAMA]["ratio"]["value"] == pytest.approx(0.4)
    assert rows[REFERENCE]["first_token_ms"]["median"] == pytest.approx(200)
    assert rows[REFERENCE]["told_ms"]["median"] == pytest.approx(100)
    [bar] = result["bars"]
    assert (bar["limit"], bar["verdict"]) == (1.1, "met")


def test_a_slower_first_token_misses_the_bar(work: WorkFile) -> None:
    for item in "abcd":
        reply = {"answers": [{"tokens": [7]}], "wall_s": 0.3}
        work.add(kind="turn", round=0, item=item, arm=REFERENCE, reply=reply)
    assert _result(work)["bars"][0]["verdict"] == "missed"


def test_documents_show_arms_that_could_not_be_had(work: WorkFile, tmp_path: Path) -> None:
    work.add(kind="arm", arm="openvino-int8-plain", unavailable="no wheel")
    head = {"kind": "first_token", **describe_run("benchmarks.peers", [])}
    write_json(tmp_path / "first_token.json", {**head, **_result(work)})
    page = render("<!-- benchmarks:first_token -->\n<!-- /benchmarks -->\n", tmp_path)
    assert f"| {REFERENCE} | 200 ms | 200 to 200 | 100 ms | 0.80x (0.80 to 0.80) | 4 |" in page
    assert "| openvino-int8-plain | not available: no wheel |" in page
    assert f"- first token, {REFERENCE} over {VLLM}: 0.80x (0.80 to 0.80), bar ≤ 1.1x: met" in page
    assert "- read_gb_per_s: median 20" in page


def test_streams_do_not_go_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--first-token", "1000", "--list"]) == 0
    assert "openvino-fp16-plain-whole" in capsys.readouterr().out


@pytest.mark.real_model
def test_outrider_really_reads_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = load_group("copy_heavy")[:3]
    monkeypatch.setattr(first_token, "load_group", lambda *_, **__: rows)
    monkeypatch.setattr(first_token, "CATEGORIES", {row.category for row in rows})
    arguments = ["--first-token", "40", "--prompts", "2", "--only", "transformers", "outrider-bf16-plain"]
    arguments += ["--threads", "1", "--root", str(tmp_path), "--out", str(tmp_path / "first_token.json")]
    assert main([*arguments, "--streams", "2"]) == 2
    assert main(arguments) == 0
    result = json.loads((tmp_path / "first_token.json").read_text(encoding="utf-8"))
    assert {row["arm"]: row["turns"] for row in result["rows"]} == {TRANSFORMERS: 2, REFERENCE: 2}
    assert result["fastest_peer"] == TRANSFORMERS
    assert result["bars"][0]["pairs"] == 1
    turns = [json.loads(line) for line in (tmp_path / "first_token.jsonl").read_text(encoding="utf-8").splitlines()]
    tokens = [turn["reply"]["answers"][0]["tokens"] for turn in turns if turn["kind"] == "turn"]
    assert [len(each) for each in tokens] == [1] * 4
