"""The acceptance scenarios, small: the same functions that ``make scenarios`` runs at full size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from benchmarks.scenario_parts import permutation_test
from benchmarks.scenarios import SCENARIOS, Setup

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
    fair, same, biased = Counter(a=500, b=500), Counter(a=510, b=490), Counter(a=600, b=400)
    assert permutation_test(fair, same, rounds=500) > 0.1
    assert permutation_test(fair, biased, rounds=500) < 0.01
