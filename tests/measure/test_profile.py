"""The exchange file ``speculation_profile.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import DataError
from outrider.measure.profile import SpeculationProfile, profiles_of, read_profile, write_profile
from outrider.measure.record import Counts, MeasureResult
from outrider.measure.report import summarise
from tests.measure.output_support import chain, made_up, record

KEPT = (816.0, 634.0, 475.0)


def test_rates_as_both_kinds_of_reader_want_them(tmp_path: Path) -> None:
    """Of 1000 steps 816, 634 and 475 keep at least one, two, three tokens (an example of the proposal)."""
    arm = chain("/home/somebody/heads/tools", 3)
    given = Counts(
        passes=1000, steps=1000, committed=2925, drafted=3000, accepted=1925, reached=(1000.0, *KEPT[:2]), kept=KEPT
    )
    result = MeasureResult(arms=(arm,), records=(record(arm, 1, given),), num_rows=1)
    (name, profile), *rest = profiles_of(result, summarise(result)).items()
    assert (name, rest) == ("heads-tools", [])
    write_profile(profile, tmp_path / "speculation_profile.json")
    values = json.loads((tmp_path / "speculation_profile.json").read_text())
    assert values["schema_version"] == "1.0" and values["measured"] is True
    assert values["marginal_accept_rates"] == [0.816, 0.634, 0.475]
    assert values["conditional_accept_rates"] == pytest.approx([0.816, 0.777, 0.749], abs=5e-4)
    assert values["mean_accept_length"] == 2.925
    assert values["acceptance_length_histogram"] == {"1": 184, "2": 182, "3": 159, "4": 475}
    assert values["accept_length_by_k"] == {"3": 2.925}
    assert "somebody" not in json.dumps(values)


def test_one_profile_a_drafter_with_all_its_lengths() -> None:
    result = made_up(30)
    profiles = profiles_of(result, summarise(result))
    assert list(profiles) == ["suffix", "ngram", "heads-tool-head", "merged-heads-tool-head", "random"]
    suffix = profiles["suffix"]
    assert suffix.num_speculative_tokens == 8
    assert list(suffix.accept_length_by_k) == [1, 2, 4, 8]
    assert set(suffix.per_category) == {"rag", "math", "chat"}
    rag, chat = (suffix.per_category[name]["mean_accept_length"] for name in ("rag", "chat"))
    assert rag > chat
    histogram = suffix.acceptance_length_histogram
    mean = sum(length * steps for length, steps in histogram.items()) / sum(histogram.values())
    assert mean == pytest.approx(suffix.mean_accept_length)
    assert suffix.measurement_conditions["traffic"] == "traffic/week-12.jsonl"
    assert suffix.target_model == {"name": "models/small-chat", "fingerprint": "0123456789abcdef", "precision": "int8"}


def test_products_of_the_conditional_rates_are_the_marginal_ones() -> None:
    profile = SpeculationProfile(
        method="x", num_speculative_tokens=3, marginal_accept_rates=(0.5, 0.2, 0.0), mean_accept_length=1.7
    )
    assert profile.conditional_accept_rates == pytest.approx((0.5, 0.4, 0.0))


def test_profiles_come_back_from_their_files(tmp_path: Path) -> None:
    result = made_up(30)
    for name, profile in profiles_of(result, summarise(result)).items():
        path = tmp_path / f"{name}.json"
        write_profile(profile, path)
        ours, back = profile.to_json(), read_profile(path).to_json()
        # Quotients of rates that were rounded to six digits differ in the last of them.
        rates = [values.pop("conditional_accept_rates") for values in (ours, back)]
        assert rates[1] == pytest.approx(rates[0], abs=1e-3)
        assert back == ours


def other(**changes: Any) -> dict[str, Any]:
    """A file as another producer writes it."""
    return {
        "schema_version": "1.0",
        "measured": True,
        "method": "eagle3",
        "draft_checkpoint": "somebody/a-head",
        "target_model": None,
        "num_speculative_tokens": 2,
        "block_size": None,
        "marginal_accept_rates": [0.8, 0.5],
        "conditional_accept_rates": [0.8, 0.625],
        "mean_accept_length": 2.3,
        "acceptance_length_histogram": None,
        "per_category": None,
        "validation": {"passed": True},
        **changes,
    }


def test_other_producers_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "speculation_profile.json"
    path.write_text(json.dumps(other()))
    profile = read_profile(path)
    assert (profile.method, profile.draft_checkpoint) == ("eagle3", {"name": "somebody/a-head"})
    path.write_text(json.dumps(other(measured=False, mean_accept_length=None, marginal_accept_rates=[0.0, 0.0])))
    assert read_profile(path).mean_accept_length is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (other(mean_accept_length=2.9), "contradicts itself"),
        (other(marginal_accept_rates=[0.5, 0.8]), "must fall"),
        (other(marginal_accept_rates=[1.2, 0.1]), "must fall"),
        (other(schema_version="2.0"), "schema 2.0"),
        (other(num_speculative_tokens="many"), "damaged"),
        ({"mean_accept_length": 2.3}, "not a speculation profile"),
    ],
)
def test_impossible_profiles_are_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    path = tmp_path / "speculation_profile.json"
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=said):
        read_profile(path)
