"""The acceptance scenarios, small: the same functions that ``make scenarios`` runs at full size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.scenario_parts import cells_of, per_position, permutation_test
from benchmarks.scenarios import SCENARIOS, Setup

from outrider import SamplingParams

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def setup(real_target_f32: Any) -> Setup:
    return Setup(
        target=real_target_f32,
        drafters=("suffix", "slice:3"),
        prompts_per_category=1,
        max_tokens=12,
        ks=(8,),
        num_calls=100,
        num_seeded_calls=10,
        few_ks=(4,),
        num_tokens=24,
        num_repeats=1,
        num_stop_strings=2,
        wrong_temperature=0.2,
        laws=("top_k 2",),
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, setup: Setup) -> None:
    SCENARIOS[name](setup)


def test_permutation_test_tells_laws_apart() -> None:
    fair, same, biased = ([("a",)] * count + [("b",)] * (1000 - count) for count in (500, 510, 600))
    assert permutation_test(fair, same, rounds=500) > 0.1
    assert permutation_test(fair, biased, rounds=500) < 0.01


def test_flat_laws_give_no_false_alarm() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(20.0, 2020.0)
    params = SamplingParams(temperature=1.0)

    def draw(weights: torch.Tensor) -> list[tuple[int, ...]]:
        drawn = torch.multinomial(weights, 2000, replacement=True, generator=generator).view(500, 4)
        return [tuple(row) for row in drawn.tolist()]

    values = [permutation_test(*cells_of(params, draw(weights), draw(weights)), rounds=100) for _ in range(20)]
    assert min(values) > 0.01
    assert 0.25 < sum(values) / len(values) < 0.75
    assert permutation_test(*cells_of(params, draw(weights), draw(weights**2)), rounds=100) < 0.01
    apart = [permutation_test(per_position(draw(weights)), per_position(draw(weights)), rounds=100) for _ in range(5)]
    assert max(apart) < 0.01, "cells chosen within each sample tell equal laws apart"
