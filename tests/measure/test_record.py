"""Records: one definition of every rate, and nothing lost on the way through JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from outrider.errors import DataError
from outrider.measure.record import (
    Arm,
    Counts,
    MeasureResult,
    PassCosts,
    Piece,
    RequestRecord,
    Sample,
    SkippedRow,
    short_names,
)
from outrider.measure.tally import Tally
from outrider.metrics import SpeculationStats

STATS = SpeculationStats(passes=5, steps=4, committed=9, drafted=12, accepted=4, reached=[4, 2, 1], kept=[2, 1])
ARM = Arm(drafter="ngram", shape="chain 3", num_draft_tokens=3)


def test_rates_are_those_of_decoding() -> None:
    counts = Counts.from_stats(STATS)
    for name in ("accepted_length", "tokens_per_pass", "draft_rate", "acceptance_rate"):
        assert getattr(counts, name) == getattr(STATS, name)
    assert counts.conditional_rates() == (0.5, 0.5, 0.0)
    assert counts.unconditional_rates() == (0.5, 0.25, 0.0)
    assert Counts().accepted_length is None and Counts().tokens_per_pass is None


def test_pooling_sums_before_it_divides() -> None:
    one, other = Counts.from_stats(STATS), Counts(passes=5.0, committed=5.0)
    pooled = Counts.pooled([one, other])
    assert pooled.tokens_per_pass == 1.4 and pooled.accepted_length == 2.0
    assert pooled.reached == (4, 2, 1) and pooled.kept == (2, 1)
    assert Counts.pooled([one.times(0.25), one.times(0.75)]) == one


def test_a_tally_counts_each_pass_with_its_weight() -> None:
    tally = Tally()
    tally.add_chain(0, 0, 1)  # a pass without drafts is no step
    tally.add_chain(3, 2, 3, weight=0.5)
    tally.add_chain(3, 2, 2, weight=0.5)  # cut behind the second draft: the third and the bonus never existed
    counts = tally.counts()
    assert (counts.passes, counts.steps, counts.committed) == (2, 1, 3.5)
    assert (counts.drafted, counts.accepted) == (2.5, 2)
    assert counts.reached == (1, 1, 0.5) and counts.kept == (1, 1, 0)


def test_json_gives_everything_back() -> None:
    record = RequestRecord(
        id="a", line=3, labels={"category": "qa"}, arm=ARM, counts=Counts.from_stats(STATS, draft_ms=1.5), source="live"
    )
    result = MeasureResult(
        arms=(ARM, Arm(drafter="x", shape="tree depth=2", num_draft_tokens=2)),
        records=(record,),
        samples=(Sample(id="a", arm=ARM, pieces=(Piece(text="é", kind="kept"),)),),
        skipped=(SkippedRow(line=1, reason="blank line"), SkippedRow(line=9, reason="blank line")),
        num_rows=4,
        settings={"target": "t", "versions": {"outrider": "1"}},
        costs=PassCosts(rows=(1, 2), pass_ms=(1.0, 1.5), draft_ms={ARM.name: 0.25}, num_cached=8),
        warnings=("look",),
    )
    assert MeasureResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert result.skipped_by_reason() == {"blank line": (1, 9)}


def test_other_files_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="format None"):
        MeasureResult.from_json({"arms": []})
    with pytest.raises(DataError, match="damaged"):
        MeasureResult.from_json({"format": "outrider measure 1", "arms": [{"drafter": 1}]})


def test_drafters_have_short_names_unless_two_would_be_alike() -> None:
    heads = [
        "suffix",
        "heads/mine",
        "merged:heads/mine:depth=2,dtype=int8",
        "a/run/head:k=2",
        "b/run/head",
        "auto:suffix,x/y/",
    ]
    assert list(short_names(heads).values()) == [
        "suffix",
        "mine",
        "merged:mine:depth=2,dtype=int8",
        "head:k=2",
        "head",
        "auto:suffix,y/",
    ]
    assert short_names(["a/head", "b/head"]) == {"a/head": "a/head", "b/head": "b/head"}


def test_an_arms_title_is_for_people() -> None:
    shape = "tree depth=2 width=3 num_nodes=9"
    tree = Arm(drafter="heads/mine:num_nodes=9", shape=shape, num_draft_tokens=2, label="mine:num_nodes=9")
    assert tree.title == "mine:num_nodes=9" and tree.name == f"heads/mine:num_nodes=9, {shape}"
    plain = Arm(drafter="heads/mine", shape="chain 4", num_draft_tokens=4)
    assert plain.title == plain.name == "heads/mine, chain 4" and replace(plain, label="mine").title == "mine, chain 4"
    assert replace(plain, label="mine") == plain, "a name makes no other arm"
