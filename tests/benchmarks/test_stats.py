"""Medians, pairs, bootstrap, order of the arms."""

from __future__ import annotations

import random

import pytest
from benchmarks.stats import alternate, paired_ratio, pooled_ratio, spread


def test_spread_of_known_values() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.low, found.lower_quartile, found.median, found.upper_quartile, found.high) == (1, 2, 3, 4, 5)
    assert found.count == 5


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        spread([])
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([], [])


def test_unpaired_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="not positive"):
        pooled_ratio([1.0], [0.0])


def test_paired_ratio_ignores_a_drift_that_hits_both_arms() -> None:
    drift = [1.0, 5.0, 2.0, 9.0, 3.0]
    ratio = paired_ratio([2 * d for d in drift], drift)
    assert ratio.value == ratio.low == ratio.high == 2.0
    assert ratio.pairs == 5


def test_one_slow_moment_moves_the_pooled_ratio_but_not_the_median() -> None:
    slow_once = [1.0] * 9 + [100.0]
    assert paired_ratio(slow_once, [1.0] * 10).value == 1.0
    assert pooled_ratio(slow_once, [1.0] * 10).value == pytest.approx(10.9)


def test_bootstrap_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    hits = 0
    for trial in range(60):
        pairs = [(draw.gauss(1.5, 0.2), draw.gauss(1.0, 0.05)) for _ in range(40)]
        ratio = pooled_ratio([a for a, _ in pairs], [b for _, b in pairs], seed=trial)
        hits += ratio.low <= 1.5 <= ratio.high
    assert 50 <= hits < 60


def test_bootstrap_is_repeatable_and_orders_its_ends() -> None:
    top, bottom = [1.0, 1.2, 0.9, 1.4, 1.1], [1.0, 1.1, 1.0, 0.9, 1.2]
    first, again = paired_ratio(top, bottom, seed=3), paired_ratio(top, bottom, seed=3)
    assert first == again
    assert first.low < first.value < first.high


def test_two_arms_swap_every_turn() -> None:
    assert [alternate(["a", "b"], turn)[0] for turn in range(4)] == ["a", "b", "a", "b"]


def test_many_arms_each_go_first_sometimes() -> None:
    names = ["a", "b", "c"]
    orders = [alternate(names, turn) for turn in range(30)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    assert orders == [alternate(names, turn) for turn in range(30)]
