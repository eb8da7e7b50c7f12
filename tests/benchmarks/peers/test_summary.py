"""From drivers' answers to the table: rates, equal work, agreement, the pick of the fastest peer."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from benchmarks.make_docs import render
from benchmarks.peers.catalogue import REFERENCE, all_arms, choose
from benchmarks.peers.setups import DRIVERS
from benchmarks.peers.summary import Turn, best_against_ours, common_prefix, rows_of
from benchmarks.peers.workfile import WorkFile

from outrider.errors import ConfigError

ARMS = {arm.name: arm for arm in all_arms(num_draft_tokens=8)}
PLAIN, LOOKUP = "transformers-bf16-plain", "transformers-bf16-lookup"
SUFFIX = "outrider-bf16-suffix"


def _reply(tokens: list[int], first_s: float, wall_s: float, **more: Any) -> dict[str, Any]:
    return {"answers": [{"tokens": tokens, "first_s": first_s}], "wall_s": wall_s, **more}


@pytest.fixture
def work(tmp_path: Path) -> WorkFile:
    """Two items of four arms: eleven tokens of the reference, lookup twice as fast as plain."""
    file = WorkFile(tmp_path / "work.jsonl", {})
    for item in ("a", "b"):
        reference = list(range(11))
        seconds = {PLAIN: 2.0, LOOKUP: 1.0, REFERENCE: 1.0, SUFFIX: 0.25}
        for name, decode_s in seconds.items():
            tokens = [*reference[:5], *([99] * 6)] if name == PLAIN else reference
            reply = _reply(tokens, 0.5, 0.5 + decode_s, passes=10 if name != SUFFIX else 4)
            file.add(kind="turn", round=0, item=item, arm=name, reply=reply)
    return file


def test_rows_hold_rates_speed_ups_and_agreement(work: WorkFile) -> None:
    rows = {row.arm: row for row in rows_of([ARMS[name] for name in (PLAIN, LOOKUP, REFERENCE, SUFFIX)], work)}
    assert rows[PLAIN].tokens_per_s == pytest.approx(5.0)
    assert rows[PLAIN].request_tokens_per_s == pytest.approx(22 / 5)
    assert rows[PLAIN].first_token_ms == pytest.approx(500)
    assert rows[PLAIN].speed_up is None
    assert (rows[PLAIN].agreement, rows[PLAIN].identical) == (pytest.approx(5 / 11), "0 of 2")
    ratio = rows[LOOKUP].speed_up
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert (rows[SUFFIX].tokens_per_pass, rows[SUFFIX].identical) == (2.5, "2 of 2")


def test_equal_work_is_charged_when_outputs_end_apart(work: WorkFile) -> None:
    work.add(kind="turn", round=0, item="a", arm=LOOKUP, reply=_reply([0, 1, 2, 3, 4, 5], 0.5, 1.0))
    work.add(kind="turn", round=0, item="b", arm=LOOKUP, reply=_reply([0, 1, 2, 3, 4, 5], 0.5, 1.0))
    [row] = rows_of([ARMS[LOOKUP]], work)
    assert row.speed_up is not None
    assert row.speed_up.value == pytest.approx(2.0)


def test_the_fastest_peer_is_picked_on_other_items_than_it_is_compared_on(work: WorkFile) -> None:
    work.add(kind="turn", round=0, item="b", arm=LOOKUP, reply=_reply(list(range(11)), 0.5, 4.5))
    found = {line["arm"]: line for line in best_against_ours(list(ARMS.values()), work)}
    assert {line["against"] for line in found.values()} == {LOOKUP}
    assert found[SUFFIX]["ratio"]["value"] == pytest.approx(16.0)


def test_a_turn_without_a_second_token_is_left_out(work: WorkFile) -> None:
    work.add(kind="turn", round=0, item="a", arm=LOOKUP, reply=_reply([0], 0.5, 0.5))
    [row] = rows_of([ARMS[LOOKUP]], work)
    assert row.turns == 1


def test_several_prompts_count_the_whole_time() -> None:
    reply = {"answers": [{"tokens": [1, 2, 3]}, {"tokens": [4, 5]}], "wall_s": 2.0, "passes": 7}
    turn = Turn.of((0, "x"), reply)
    assert (turn.decoded, turn.decode_s, turn.first_s) == (5, 2.0, None)


def test_common_prefixes() -> None:
    assert [common_prefix([1, 2, 3], other) for other in ([1, 2, 4], [1, 2], [], [1, 2, 3])] == [2, 2, 0, 3]


def test_llama_server_answers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DRIVERS)
    drive_llama_server = importlib.import_module("drive_llama_server")
    replies = [
        {
            "tokens": [5, 6, 7, 2, 8],
            "timings": {"prompt_ms": 20.0, "predicted_n": 5, "draft_n": 6, "draft_n_accepted": 2},
        },
        {"tokens": [5, 6], "timings": {"prompt_ms": 30.0, "predicted_n": 2}},
    ]
    found = drive_llama_server.summary(replies, [2], 1.5)
    assert found["answers"] == [{"tokens": [5, 6, 7, 2], "first_s": 0.02}, {"tokens": [5, 6], "first_s": 0.03}]
    assert (found["passes"], found["drafted"], found["accepted"], found["wall_s"]) == (3, 6, 2, 1.5)


def test_arms_are_chosen_by_name_or_peer_and_each_has_its_plain_one() -> None:
    arms = list(ARMS.values())
    assert {arm.plain for arm in arms} <= set(ARMS)
    assert [arm.name for arm in choose(arms, ["vllm", LOOKUP])] == [
        LOOKUP,
        "vllm-bf16-plain",
        "vllm-bf16-ngram",
        "vllm-bf16-suffix",
    ]
    assert choose(arms, []) == arms
    assert REFERENCE in ARMS
    with pytest.raises(ConfigError, match="arm 'vlm' is unknown"):
        choose(arms, ["vlm"])
    more = all_arms(num_draft_tokens=4, drafters=["ngram", "suffix"])
    assert [arm.options["drafter"] for arm in more if arm.name.startswith("outrider-int8")] == [
        "none",
        "suffix",
        "ngram",
    ]


def test_documents_show_the_table(work: WorkFile, tmp_path: Path) -> None:
    from benchmarks.peers.__main__ import result_of
    from benchmarks.provenance import describe_run
    from benchmarks.report import write_json

    work.add(kind="arm", arm="vllm-bf16-plain", unavailable="no wheel")
    arms = [ARMS[name] for name in (PLAIN, LOOKUP, REFERENCE, "vllm-bf16-plain")]
    head = {"kind": "peers", **describe_run("benchmarks.peers", [])}
    write_json(tmp_path / "peers.json", {**head, **result_of(arms, work)})
    page = render("<!-- benchmarks:peers -->\n<!-- /benchmarks -->\n", tmp_path)
    assert f"| {LOOKUP} | 10 |" in page
    assert "2.00x" in page
    assert "| vllm-bf16-plain | not available: no wheel |" in page

    short = render("<!-- benchmarks:peers_short -->\n<!-- /benchmarks -->\n", tmp_path)
    assert [line.split(" | ")[0] for line in short.splitlines() if line.startswith("| ")] == [
        "| arm",
        f"| {PLAIN}",
        f"| {LOOKUP}",
        f"| {REFERENCE}",
    ]
