"""A request's own wishes for speculation are honoured, or refused by name; its output does not depend on them."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.drafters.portfolio import portfolio_of
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.engine.speculation import SpeculationParams
from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams
from tests.engine.support import random_chains, random_trees, table_model

PARAMS = SamplingParams(temperature=1.0, seed=4, max_tokens=30)


def engine(schedule: str = "fixed", k: int = 4) -> Engine:
    both = portfolio_of([random_chains(1), random_trees(2)], name="auto:random,trees")
    config = EngineConfig.from_dict({"num_draft_tokens": k, "schedule": schedule})
    return Engine(table_model(), drafter=both, config=config)


def run(engine: Engine, **wishes: Any) -> GenerationResult:
    engine.submit([1, 2], PARAMS, id="it", speculation=SpeculationParams(**wishes))
    while True:
        for event in engine.step():
            if event.result is not None:
                return event.result


@pytest.mark.parametrize("schedule", ["fixed", "adaptive"])
def test_output_is_the_same_whatever_is_wished(schedule: str) -> None:
    texts = {
        run(engine(schedule), **wishes).token_ids
        for wishes in ({}, {"enabled": False}, {"num_draft_tokens": 2}, {"drafter": "trees"}, {"num_draft_tokens": 0})
    }
    assert len(texts) == 1


def test_not_enabled_means_plain() -> None:
    result = run(engine(), enabled=False)
    assert result.stats.steps == 0 and result.stats.tokens_per_pass == 1
    assert all(step.planned == 0 for step in result.steps)


def test_fewer_draft_tokens() -> None:
    result = run(engine(), num_draft_tokens=2)
    assert max(step.drafted for step in result.steps) <= 2 and max(step.planned for step in result.steps) == 2
    assert result.stats.steps > 0


@pytest.mark.parametrize("name", ["random", "trees"])
def test_the_named_drafter_alone(name: str) -> None:
    assert {step.drafter for step in run(engine(), drafter=name).steps} - {""} == {name}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"drafter": "tree"}, "speculation.drafter 'tree' is unknown; did you mean 'trees'.*random, trees"),
        ({"num_draft_tokens": 5}, "speculation.num_draft_tokens 5 is more.*0 to 4"),
    ],
)
def test_what_the_engine_has_not_is_refused_by_name(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine().submit([1], PARAMS, speculation=SpeculationParams(**wishes))


@pytest.mark.parametrize("wishes", [{"drafter": "suffix"}, {"num_draft_tokens": 3}])
def test_without_a_drafter_none_can_be_asked_for(wishes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no drafter"):
        Engine(table_model()).submit([1], speculation=SpeculationParams(**wishes))


def test_an_engine_that_never_drafts_still_takes_the_default() -> None:
    assert run(engine(k=0)).stats.steps == 0
    assert run(Engine(table_model()), enabled=False).stats.steps == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable": True}, "speculation.enable is unknown"),
        ({"enabled": 1}, "speculation.enabled 1"),
        ({"num_draft_tokens": -1}, "num_draft_tokens -1"),
        ({"num_draft_tokens": True}, "num_draft_tokens True"),
        ({"num_draft_tokens": 2.5}, "num_draft_tokens 2.5"),
        ({"drafter": ""}, "speculation.drafter ''"),
        ({"drafter": 3}, "speculation.drafter 3"),
        ({"enabled": False, "num_draft_tokens": 3}, "leave one of the two out"),
        ({"enabled": False, "drafter": "suffix"}, "leave one of the two out"),
    ],
)
def test_impossible_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculationParams.from_dict(values)


def test_plain_values_come_back() -> None:
    wishes = SpeculationParams(num_draft_tokens=3, drafter="suffix")
    assert SpeculationParams.from_dict(wishes.to_json()) == wishes
