"""Pooled rates and their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.measure import stats
from outrider.measure.record import Counts, RequestRecord
from outrider.measure.stats import (
    Interval,
    interval_of,
    is_judged,
    pool_arms,
    rate_intervals,
    requests_to_decide,
    requests_to_halve,
    why_not_judged,
)
from tests.measure.output_support import chain, counts, record

ARM = chain("suffix", 4)


def records(num_lines: int, *, seed: int = 0, rate: float = 0.6) -> list[RequestRecord]:
    noise = np.random.default_rng(seed)
    return [
        record(ARM, line, counts(noise, rate=rate, k=4, passes=int(noise.integers(5, 80)), draft_rate=0.8))
        for line in range(1, num_lines + 1)
    ]


def test_rates_are_those_of_the_pooled_counts() -> None:
    given = records(12)
    pool = pool_arms(given)[ARM]
    rates, pooled = rate_intervals(pool), Counts.pooled(each.counts for each in given)
    assert pool.counts == pooled
    assert rates.tokens_per_pass.value == pytest.approx(pooled.tokens_per_pass)
    assert rates.accepted_length.value == pytest.approx(pooled.accepted_length)
    assert rates.acceptance_rate.value == pytest.approx(pooled.acceptance_rate)
    assert rates.draft_rate.value == pytest.approx(pooled.draft_rate)
    assert [each.value for each in rates.unconditional] == pytest.approx(pooled.unconditional_rates())
    assert [each.value for each in rates.conditional] == pytest.approx(pooled.conditional_rates())


def test_counts_are_summed_before_they_are_divided() -> None:
    """A short request of 3 tokens a pass beside a long one of 1: the mean of ratios would be 2."""
    given = [
        record(ARM, 1, Counts(passes=1, committed=3)),
        record(ARM, 2, Counts(passes=9, committed=9)),
    ]
    assert rate_intervals(pool_arms(given)[ARM]).tokens_per_pass.value == pytest.approx(1.2)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """200 measurements of 15 uneven requests each; chains of 4 kept with chance 0.6 in 80 % of passes."""
    truth = 1 + 0.8 * sum(0.6**depth for depth in range(1, 5))
    hits, widths = 0, []
    for seed in range(200):
        found = rate_intervals(pool_arms(records(15, seed=seed), seed=seed)[ARM]).tokens_per_pass
        assert found.low is not None and found.high is not None
        hits += found.low <= truth <= found.high
        widths.append(found.high - found.low)
    assert 0.90 <= hits / 200 <= 0.99
    assert max(widths) < 0.6


def test_the_same_seed_gives_the_same_interval_whatever_is_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rate_intervals(pool_arms(records(20))[ARM])
    monkeypatch.setattr(stats, "_CHUNK_NUMBERS", 70)
    assert rate_intervals(pool_arms(records(20))[ARM]) == whole
    assert rate_intervals(pool_arms(records(20), seed=1)[ARM]) != whole


def test_turns_of_one_line_are_one_unit() -> None:
    """Counting every turn twice adds no evidence, so the interval stays as wide as it was."""
    given = records(12)
    doubled = [*given, *(record(ARM, each.line, each.counts, id=f"{each.id}-turn-2") for each in given)]
    once, twice = pool_arms(given)[ARM], pool_arms(doubled)[ARM]
    assert (twice.num_requests, twice.num_lines) == (24, 12)
    assert rate_intervals(twice).tokens_per_pass == rate_intervals(once).tokens_per_pass


def test_arms_are_compared_on_the_same_resamplings() -> None:
    other = chain("ngram", 4)
    given = records(12)
    thrice = [
        record(other, each.line, Counts(passes=3 * each.counts.passes, committed=3 * each.counts.committed))
        for each in given
    ]
    pools = pool_arms([*thrice, *given])
    ratio = pools[other].columns["committed"] / pools[ARM].columns["committed"]
    assert np.allclose(ratio, 3.0)


@pytest.mark.parametrize(("num_lines", "has_ends", "is_small"), [(4, False, True), (5, True, True), (30, True, False)])
def test_few_lines_are_said_to_be_few(num_lines: int, has_ends: bool, is_small: bool) -> None:
    pool = pool_arms(records(num_lines))[ARM]
    found = rate_intervals(pool).tokens_per_pass
    assert pool.is_small is is_small
    assert found.value is not None
    assert (found.low is not None, found.high is not None) == (has_ends, has_ends)


def test_without_drafts_there_is_no_rate() -> None:
    pool = pool_arms([record(ARM, line, Counts(passes=5, committed=5)) for line in range(1, 9)])[ARM]
    rates = rate_intervals(pool)
    assert rates.tokens_per_pass == Interval(value=1.0, low=1.0, high=1.0)
    assert rates.accepted_length == rates.acceptance_rate == Interval()
    assert rates.draft_rate.value == 0.0
    assert pool_arms([]) == {}


def test_a_rate_that_most_resamplings_lack_has_no_interval() -> None:
    """One request in ten drafted at all, so a third of resamplings hold no draft."""
    given = [record(ARM, line, Counts(passes=5, committed=5)) for line in range(2, 11)]
    drafted = Counts(passes=5, steps=5, committed=8, drafted=10, accepted=3, reached=(5.0,), kept=(3.0,))
    rates = rate_intervals(pool_arms([record(ARM, 1, drafted), *given])[ARM])
    assert rates.acceptance_rate == Interval(value=0.3)
    assert rates.tokens_per_pass.low is not None


@pytest.mark.parametrize("freedom", [4, 9, 29, 200])
def test_widening_follows_students_t(freedom: int) -> None:
    t = pytest.importorskip("scipy.stats").t
    assert stats._student(freedom) == pytest.approx(t.ppf(0.975, freedom), rel=3e-3)


def test_few_lines_have_wider_ends_than_plain_quantiles() -> None:
    """By sqrt(n / (n - 1)) t / z: 1.44 for 6 lines, 1.01 for 200."""
    values = np.random.default_rng(0).normal(size=200_001)
    values[0] = 0.0
    for num_lines, factor in ((6, math.sqrt(6 / 5) * 2.5706 / 1.96), (200, math.sqrt(200 / 199) * 1.972 / 1.96)):
        found = interval_of(values, num_lines)
        assert found.half_width == pytest.approx(1.96 * factor, rel=0.02)


def test_the_rate_itself_always_lies_in_its_interval() -> None:
    values = np.array([2.0, *np.linspace(3, 4, stats.NUM_RESAMPLES)])
    found = interval_of(values, 10)
    assert found.low == 2.0 and found.high is not None and found.high > 3.9


def test_how_many_requests_more() -> None:
    assert requests_to_halve(40) == 120
    unsure = Interval(value=1.1, low=0.9, high=1.3)
    assert requests_to_decide(unsure, bound=1.0, num_requests=40) == 120  # half the width needs four times as many
    assert requests_to_decide(Interval(value=1.1, low=1.05, high=1.15), bound=1.0, num_requests=40) == 0
    assert requests_to_decide(Interval(value=1.0, low=0.9, high=1.1), bound=1.0, num_requests=40) is None
    assert requests_to_decide(Interval(value=1.1), bound=1.0, num_requests=3) is None


def test_what_may_be_judged_by() -> None:
    given = Counts(passes=1, committed=1)
    assert is_judged(record(ARM, 1, given))
    assert why_not_judged(record(ARM, 1, given, is_on_policy=False)) == "off-policy"
    assert why_not_judged(record(ARM, 1, given, labels={"traffic": "repeated"})) == "repeated"
    assert why_not_judged(record(ARM, 1, given, labels={"traffic": "synthetic"})) == "synthetic"
