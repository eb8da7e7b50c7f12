"""Counters of running servers: names, definitions, and what may be said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.audit.doctor.metrics_text import ServedCounts, examine_counts, read_counts
from outrider.drafters.head_folder import HeadInfo
from outrider.errors import DataError

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1200.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 700.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 200.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 300.0
vllm:num_requests_running{engine="0"} 3.0
"""
CARD = HeadInfo(
    target_name="m",
    target_fingerprint="f",
    acceptance={"tokens_per_pass": 2.1, "kept_at_depth": [0.6, 0.3, 0.2], "reached": [500, 300, 150]},
)


def by_cause(counts: ServedCounts, info: HeadInfo | None = None) -> dict[str, str]:
    return {finding.cause: finding.status for finding in examine_counts(counts, info, subject="head").findings}


def test_vllm_counters() -> None:
    counts = read_counts(VLLM, source="file")
    assert (counts.engine, counts.steps, counts.drafted, counts.accepted) == ("vllm", 1000, 3000, 1200)
    assert counts.kept == (700, 300, 200) and counts.accepted_length == 2.2 and counts.acceptance_rate == 0.4
    assert counts.unconditional == [0.7, 0.3, 0.2]
    assert counts.conditional == pytest.approx([0.7, 3 / 7, 2 / 3])


def test_several_engines_are_summed() -> None:
    counts = read_counts(VLLM + VLLM.replace('engine="0"', 'engine="1"'), source="file")
    assert counts.steps == 2000 and counts.kept == (1400, 600, 400) and counts.accepted_length == 2.2


@pytest.mark.parametrize("prefix", ["llamacpp:", "outrider:", "outrider_", ""])
def test_other_names_of_the_same_counters(prefix: str) -> None:
    counts = read_counts(VLLM.replace("vllm:spec", f"{prefix}spec"), source="file")
    assert counts.steps == 1000 and counts.kept == (700, 300, 200)
    assert counts.engine == (prefix.rstrip(":_") or "a server")


def test_sglang_gauges() -> None:
    text = 'sglang:spec_accept_length{model="m"} 2.5\nsglang:spec_accept_rate{model="m"} 0.375\n'
    counts = read_counts(text, source="file")
    assert (counts.engine, counts.accepted_length, counts.acceptance_rate, counts.steps) == ("sglang", 2.5, 0.375, None)
    report = examine_counts(counts, CARD, subject="head")
    assert report.is_healthy and "2.50" in report.verdict
    assert {f.status for f in report.findings if f.cause != "idle"} == {"not checked"}


def test_no_counters_is_an_error() -> None:
    with pytest.raises(DataError, match=r"metrics\.txt holds no counters of speculation.*is speculation on"):
        read_counts("vllm:num_requests_running 3\n", source="metrics.txt")


def test_what_can_be_said() -> None:
    sound = read_counts(VLLM, source="file")
    assert set(by_cause(sound, CARD).values()) == {"clear"}
    assert by_cause(replace(sound, kept=(80, 10, 1)))["first_token"] == "seen"
    assert by_cause(replace(sound, kept=(700, 100, 20)))["later_tokens"] == "seen"
    deep = examine_counts(replace(sound, kept=(700, 300, 20)), None, subject="head")
    [finding] = [finding for finding in deep.findings if finding.cause == "too_deep"]
    assert finding.status == "seen" and "to 2 (" in finding.remedy
    assert by_cause(replace(sound, steps=0, drafted=0, kept=()))["idle"] == "seen"
    assert by_cause(replace(sound, steps=50, kept=(4, 0, 0)))["first_token"] == "not checked"


def test_against_the_card() -> None:
    sound = read_counts(VLLM, source="file")
    assert by_cause(sound)["card"] == "not checked"
    assert by_cause(replace(sound, kept=(450, 300, 200)), CARD)["card"] == "seen"
    assert by_cause(replace(sound, kept=(560, 300, 200)), CARD)["card"] == "clear", "within noise of the card"
