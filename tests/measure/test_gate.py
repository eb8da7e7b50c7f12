"""A result compared with an earlier one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ConfigError, DataError
from outrider.measure.gate import check_gate, check_level, compare_results
from outrider.measure.profile import profiles_of, write_profile
from outrider.measure.record import MeasureResult
from outrider.measure.report import summarise, write_result
from tests.measure.output_support import chain, made_up

ARMS = ((chain("suffix", 4), 1.0, 0.7, None), (chain("ngram", 4), 0.8, 0.5, None))
OLD = made_up(30, arms=ARMS)


def scaled(result: MeasureResult, factor: float, drafter: str = "suffix") -> MeasureResult:
    """The same requests, with a share of the tokens that one drafter's passes committed."""
    records = tuple(
        replace(each, counts=replace(each.counts, committed=each.counts.committed * factor))
        if each.arm.drafter == drafter
        else each
        for each in result.records
    )
    return replace(result, records=records)


def stored(result: MeasureResult, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    write_result(result, summarise(result), folder / "result.json")
    return folder


def test_nothing_changed(tmp_path: Path) -> None:
    gate = check_gate(OLD, stored(OLD, tmp_path), 1.0)
    assert gate.exit_code == 0 and gate.differences == ()
    assert [change.ratio.value for change in gate.changes] == [1.0, 1.0]
    assert all(change.is_paired and change.num_requests == 30 for change in gate.changes)


def test_one_arm_that_fell_fails_the_gate(tmp_path: Path) -> None:
    gate = check_gate(scaled(OLD, 0.9), stored(OLD, tmp_path) / "result.json", 0.95)
    assert gate.exit_code == 1
    assert [change.is_below for change in gate.changes] == [True, False]
    assert gate.changes[0].ratio.value == pytest.approx(0.9)
    assert gate.changes[0].ratio.low == pytest.approx(0.9)  # paired: requests that fell alike leave no doubt
    assert gate.changes[0].text.startswith("BELOW: suffix, chain 4: tokens a pass ")
    assert check_gate(scaled(OLD, 0.9), tmp_path, 0.85).exit_code == 0
    assert check_gate(scaled(OLD, 0.1), tmp_path, None).exit_code == 0


def test_only_common_requests_are_compared(tmp_path: Path) -> None:
    half = replace(OLD, records=tuple(each for each in OLD.records if each.line % 3 == 1))
    gate = compare_results(half, OLD, 0.99)
    assert gate.exit_code == 0
    assert {(change.ratio.value, change.num_requests) for change in gate.changes} == {(1.0, 10)}


def test_other_traffic_is_compared_as_two_samples() -> None:
    new = made_up(30, seed=1, arms=ARMS)
    moved = replace(new, records=tuple(replace(each, line=each.line + 100) for each in new.records))
    for change in compare_results(moved, OLD).changes:
        assert not change.is_paired
        assert change.ratio.low is not None and change.ratio.high is not None
        assert change.ratio.low < 1 < change.ratio.high
        assert "other requests than before" in change.text


def test_off_policy_records_take_no_part() -> None:
    fallen = scaled(OLD, 0.5).records
    spoiled = [
        replace(bad, is_on_policy=False) if bad.line < 6 else good
        for bad, good in zip(fallen, OLD.records, strict=True)
    ]
    gate = compare_results(replace(OLD, records=tuple(spoiled)), OLD, 1.0)
    assert gate.exit_code == 0 and gate.changes[0].num_requests == 25


def test_other_settings_are_named_fingerprints_first(tmp_path: Path) -> None:
    new = made_up(30, arms=ARMS, settings={"fingerprint": "fedcba", "device": "other", "threads": 7})
    gate = compare_results(new, OLD, 0.5)
    assert gate.differences == (
        "fingerprint was '0123456789abcdef', is now 'fedcba'",
        "device was 'cpu', is now 'other'",
    )


def test_a_profile_is_a_baseline_of_accepted_lengths(tmp_path: Path) -> None:
    path = tmp_path / "speculation_profile.json"
    write_profile(profiles_of(OLD, summarise(OLD))["suffix"], path)
    gate = check_gate(OLD, path, 0.99)
    assert [(change.arm.drafter, change.metric) for change in gate.changes] == [("suffix", "accepted length")]
    assert gate.exit_code == 0 and gate.changes[0].ratio.value == pytest.approx(1.0, abs=1e-6)
    worse = made_up(30, arms=((chain("suffix", 4), 0.6, 0.7, None),))
    assert check_gate(worse, path, 0.95).exit_code == 1


def test_misuse_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--fail-under 0 is not possible"):
        check_gate(OLD, stored(OLD, tmp_path), 0.0)
    with pytest.raises(DataError, match=r"the baseline holds suffix, chain 4; ngram, chain 4"):
        check_gate(made_up(5, arms=((chain("suffix", 2), 1.0, 1.0, None),)), tmp_path, 0.9)
    with pytest.raises(DataError, match="cannot be read"):
        check_gate(OLD, tmp_path / "nowhere", 0.9)
    path = tmp_path / "speculation_profile.json"
    write_profile(profiles_of(OLD, summarise(OLD))["suffix"], path)
    with pytest.raises(DataError, match="nothing to compare: the profile holds"):
        check_gate(made_up(5, arms=((chain("other", 4), 1.0, 1.0, None),)), path, 0.9)


def test_without_a_baseline_the_best_arm_must_reach_a_number() -> None:
    best = summarise(OLD).overall()[0].counts.tokens_per_pass
    assert best is not None
    assert check_level(OLD, best - 0.01).exit_code == 0
    level = check_level(OLD, best + 0.01)
    assert level.exit_code == 1 and level.text.startswith("BELOW: best arm suffix, chain 4: ")
    assert check_level(replace(OLD, records=()), 1.0).exit_code == 1
