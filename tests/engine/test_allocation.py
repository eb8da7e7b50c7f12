"""The budget of a step is the best there is, as far as a brute search over small batches can tell."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from outrider.engine.allocation import Bid, Step, best_prefix, share_depths
from outrider.engine.costs import DraftCosts, RowCosts


def curve(*ms: float) -> list[float]:
    """Piecewise through 1, 4, 8, 16, 64 rows."""
    costs = RowCosts(rows=(1, 4, 8, 16, 64), ms=ms)
    return [costs(max(1, rows)) for rows in range(80)]


def speed(depths: Sequence[int], bids: Sequence[Bid], step: Step, call: DraftCosts) -> float:
    asked = [(bid, depth) for bid, depth in zip(bids, depths, strict=True) if depth]
    tokens = step.tokens + sum(sum(bid.survivals[:depth]) - bid.lost for bid, depth in asked)
    rows = sum(depth * bid.rows_each - bid.lost_rows for bid, depth in asked)
    ms = step.ms_with(rows)
    if asked:
        ms += call.fixed + call.level * max(depths)
        ms += sum(call.sequence + bid.entry_ms + call.node * depth for bid, depth in asked)
    return tokens / ms


@pytest.mark.parametrize("seed", range(40))
def test_within_a_percent_of_the_best_of_all_budgets(seed: int) -> None:
    rng = random.Random(seed)
    bids = []
    for _ in range(rng.randint(1, 3)):
        chance, rate = 1.0, rng.uniform(0.05, 0.95)
        survivals = [chance := chance * rate for _ in range(rng.randint(1, 5))]
        bids.append(Bid(survivals=survivals, entry_ms=rng.choice((0.0, 0.3))))
    size = len(bids)
    ms = sorted(rng.uniform(10, 12) for _ in range(3))
    step = Step(tokens=size, ms=0.5, rows=size, curve=curve(*ms, ms[-1] + rng.uniform(0, 6), ms[-1] + 40))
    call = DraftCosts(fixed=0.2, level=rng.uniform(0, 1), sequence=0.05, node=0.02)
    every = itertools.product(*(range(len(bid.survivals) + 1) for bid in bids))
    best = max(speed(depths, bids, step, call) for depths in every)
    found = speed(share_depths(bids, step, call, margin=1.0), bids, step, call)
    assert found >= 0.99 * best


def test_nothing_is_drafted_where_nothing_pays() -> None:
    step = Step(tokens=1, ms=0.0, rows=1, curve=curve(10, 20, 40, 80, 320))
    assert share_depths([Bid(survivals=[0.2, 0.1])], step, DraftCosts(), margin=1.0) == [0]
    assert share_depths([Bid(survivals=[])], step, DraftCosts(), margin=1.0) == [0]
    assert share_depths([], step, DraftCosts(), margin=1.0) == []


def test_nodes_go_to_the_more_predictable_text() -> None:
    step = Step(tokens=2, ms=0.0, rows=2, curve=curve(10, 10, 10, 30, 200))
    sure, unsure = Bid(survivals=[0.95**d for d in range(1, 9)]), Bid(survivals=[0.3**d for d in range(1, 9)])
    depths = share_depths([unsure, sure], step, DraftCosts(), margin=1.0)
    assert depths[1] >= 5 > 2 > depths[0]


def test_a_model_replaces_a_find_only_where_it_gains_more() -> None:
    step = Step(tokens=2.5, ms=0.0, rows=2, curve=curve(10, 10, 10.5, 12, 50))
    survivals = [0.7**d for d in range(1, 6)]
    assert share_depths([Bid(survivals=survivals, lost=1.8, lost_rows=3)], step, DraftCosts(level=0.3), margin=1.0) == [
        0
    ]
    [depth] = share_depths([Bid(survivals=survivals, lost=0.1, lost_rows=3)], step, DraftCosts(level=0.3), margin=1.0)
    assert depth > 1


def test_levels_that_run_no_model_are_free() -> None:
    step = Step(tokens=1, ms=0.0, rows=1, curve=curve(10, 10, 10, 14, 200))
    survivals, call = [0.5**d for d in range(1, 10)], DraftCosts(level=1.0)
    assert share_depths([Bid(survivals=survivals, rows_each=3)], step, call, margin=1.0) == [2]
    assert share_depths([Bid(survivals=survivals, rows_each=3, levels=2)], step, call, margin=1.0) == [9]
    assert share_depths([Bid(survivals=survivals, rows_each=7, levels=9)], step, call, margin=1.0) == [1]


def test_the_best_prefix_of_nodes() -> None:
    flat = Step(tokens=1, ms=0.0, rows=1, curve=curve(10, 10, 10, 10, 200))
    gains = [0.9, 0.5, 0.2, 0.05, 0.01]
    assert best_prefix(gains, flat) == 5
    steep = Step(tokens=1, ms=0.0, rows=1, curve=curve(10, 25, 45, 85, 325))
    assert best_prefix(gains, steep) == 1
    assert best_prefix([], steep) == 0
