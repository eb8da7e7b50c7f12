"""Expected speed-up, break-even, and an arm chosen without rewarding luck."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.engine.costs import RowCosts
from outrider.measure.forecast import Judgement, depth_of, forecast, judge, pass_ms, recommend
from outrider.measure.record import Arm, Counts, PassCosts, RequestRecord
from outrider.measure.stats import Interval, pool_arms
from tests.measure.output_support import COSTS_MS, COSTS_ROWS, chain, counts, made_up, record, tree

ARM = chain("suffix", 4)
COSTS = PassCosts(rows=(1, 5), pass_ms=(10.0, 14.0), draft_ms={ARM.name: 2.0})


def spread(total: Counts, arm: Arm = ARM, num_lines: int = 10) -> list[RequestRecord]:
    """The same counts on every line, so that intervals have no width."""
    return [record(arm, line, total) for line in range(1, num_lines + 1)]


def test_the_worked_example() -> None:
    """60 of 100 passes draft 4 tokens and keep 80 in all: 40 * 10 + 60 * (14 + 2) = 1360 ms, plainly 1800 ms."""
    given = Counts(passes=100, steps=60, committed=180, drafted=240, accepted=80, reached=(60.0,), kept=(40.0,))
    found = forecast(pool_arms(spread(given))[ARM], ARM, COSTS)
    assert found is not None
    assert found.speedup.value == pytest.approx(1800 / 1360)
    assert found.pass_cost == pytest.approx(1.36)
    assert found.break_even_length == pytest.approx(1 + 0.36 * 100 / 60)
    assert found.ceiling == pytest.approx(50 / 16)
    assert found.judgement is Judgement.PAYS


def test_at_the_break_even_length_speed_is_that_of_plain_decoding() -> None:
    given = Counts(passes=100, steps=60, committed=136, drafted=240, accepted=36)
    found = forecast(pool_arms(spread(given))[ARM], ARM, COSTS)
    assert found is not None and found.break_even_length == pytest.approx(given.accepted_length)
    assert found.speedup.value == pytest.approx(1.0)
    assert found.judgement is Judgement.UNSURE


def test_plain_decoding_neither_gains_nor_loses() -> None:
    found = forecast(pool_arms(spread(Counts(passes=50, committed=50)))[ARM], ARM, COSTS)
    assert found is not None and (found.speedup.value, found.pass_cost) == (1.0, 1.0)
    assert found.break_even_length is None


def test_a_drafter_whose_tokens_are_never_kept_loses() -> None:
    given = Counts(passes=50, steps=50, committed=50, drafted=200)
    found = forecast(pool_arms(spread(given))[ARM], ARM, COSTS)
    assert found is not None and found.judgement is Judgement.LOSES
    assert found.speedup.value == pytest.approx(10 / 16)


def test_the_ceiling_of_a_tree_pays_for_all_its_nodes() -> None:
    arm = tree("merged", 4)
    costs = PassCosts(rows=(1, 9), pass_ms=(10.0, 18.0), draft_ms={arm.name: 2.0})
    given = Counts(passes=10, steps=10, committed=30, drafted=80, accepted=20)
    found = forecast(pool_arms(spread(given, arm))[arm], arm, costs)
    assert found is not None and found.ceiling == pytest.approx(5 * 10 / 20)


def test_a_tree_may_be_flatter_than_the_length_asked_for() -> None:
    assert [depth_of(arm) for arm in (chain("a", 8), tree("b", 4), replace(tree("b", 4), num_draft_tokens=8))] == [
        8,
        4,
        4,
    ]


def test_without_times_there_is_no_forecast() -> None:
    pool = pool_arms(spread(Counts(passes=5, committed=5)))[ARM]
    assert forecast(pool, ARM, None) is None
    assert forecast(pool, ARM, PassCosts()) is None
    assert forecast(pool, ARM, PassCosts(rows=(1,), pass_ms=(3.0,))) is None


def test_pass_times_are_the_planners() -> None:
    planner = RowCosts(rows=COSTS_ROWS, ms=COSTS_MS)
    rows = np.array([1.0, 1.5, 3.0, 8.0, 12.0, 20.0])
    assert pass_ms(PassCosts(rows=COSTS_ROWS, pass_ms=COSTS_MS), rows) == pytest.approx([planner(r) for r in rows])
    assert pass_ms(PassCosts(rows=(1, 2, 4), pass_ms=(5.0, 4.0, 6.0)), np.array([2.0])) == pytest.approx([5.0])


@pytest.mark.parametrize(
    ("interval", "judgement"),
    [
        (Interval(value=1.2, low=1.01, high=1.4), Judgement.PAYS),
        (Interval(value=0.8, low=0.7, high=0.99), Judgement.LOSES),
        (Interval(value=1.2, low=0.99, high=1.4), Judgement.UNSURE),
        (Interval(value=2.0), Judgement.UNSURE),
        (Interval(), Judgement.UNSURE),
    ],
)
def test_judgements(interval: Interval, judgement: Judgement) -> None:
    assert judge(interval) is judgement


def test_a_good_drafter_is_recommended_with_its_length() -> None:
    result = made_up(60)
    found = recommend(result.records, result.costs)
    assert found.judgement is Judgement.PAYS and found.arm is not None
    assert found.arm.drafter in ("suffix", "merged:heads/tool-head")
    assert found.num_lines_chosen + found.num_lines_judged == 60
    assert found.text.startswith(f"Use {found.arm.name}: ")


def test_where_every_drafter_loses_plain_decoding_is_recommended() -> None:
    arm = chain("random", 4)
    result = made_up(40, arms=((arm, 0.0, 1.0, None),))
    found = recommend(result.records, result.costs)
    assert found.judgement is Judgement.LOSES and found.text.startswith("Decode without drafts")


def test_a_choice_among_equals_is_not_taken_for_a_gain() -> None:
    """Twelve arms of the same worth, 1.0: the best of them looks better than it is, its judgement must not."""
    arms = [chain(f"drafter-{index}", 1) for index in range(12)]
    costs = PassCosts(rows=(1, 2), pass_ms=(10.0, 10.0), draft_ms={arm.name: 5.0 for arm in arms})
    judged, naive = [], []
    for seed in range(40):
        noise = np.random.default_rng(seed)
        records = [
            record(arm, line, counts(noise, rate=0.5, k=1, passes=int(noise.integers(4, 40))))
            for line in range(1, 25)
            for arm in arms
        ]
        judged.append(recommend(records, costs).speedup.value or 0.0)
        naive.append(max(each.counts.tokens_per_pass or 0.0 for each in pool_arms(records).values()) / 1.5)
    assert np.mean(naive) > 1.02
    assert abs(np.mean(judged) - 1.0) < 0.012


def test_reasons_for_no_recommendation() -> None:
    result = made_up(19)
    assert "too few" in recommend(result.records, result.costs).text
    assert "pass times were not measured" in recommend(result.records, None).text
    assert "no request here may be judged by" in recommend([], result.costs).text
    assert "no drafter's time" in recommend(made_up(20).records, PassCosts(rows=(1,), pass_ms=(1.0,))).text
    assert all(recommend(records, costs).arm is None for records, costs in (([], result.costs), (result.records, None)))
