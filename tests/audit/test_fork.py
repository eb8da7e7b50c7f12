"""Exact integration on toy verifiers whose law is known by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outrider.audit.fork import Fork, ForkingLaws, Outcome, Run, explore
from outrider.types import ROOT, Verdict
from outrider.verify.base import Place, StepLaws

LAW = [0.5, 0.0, 0.25, 0.25]


class FixedLaws:
    """One law at every place."""

    def choose(self, places: Sequence[Place]) -> list[int]:
        raise AssertionError("the audit never draws")

    def probs_BV(self, places: Sequence[Place]) -> Tensor:
        return torch.tensor([LAW] * len(places), dtype=torch.float64)

    def uniforms(self, places: Sequence[Place]) -> list[float]:
        raise AssertionError("the audit never draws")

    def draw_from(self, weights_BV: Tensor, places: Sequence[Place]) -> list[int]:
        raise AssertionError("the audit never draws")


def runner(toy: object) -> Run:
    def run(forks: Sequence[Fork]) -> list[Outcome]:
        laws = ForkingLaws(FixedLaws(), [fork.script for fork in forks])
        found = [toy(laws, Place(sequence=i, node=ROOT, path=())) for i in range(len(forks))]  # type: ignore[operator]
        return [Outcome(v, question) for v, question in zip(found, laws.questions, strict=True)]

    return run


def law_of(toy: object, hint: float = 0.5) -> dict[int, float]:
    law: dict[int, float] = {}
    for leaf in explore([1.0], runner(toy), lambda start, place: hint):
        law[leaf.verdict.next_token] = law.get(leaf.verdict.next_token, 0.0) + leaf.probability
    return law


def test_a_choice_forks_over_its_support() -> None:
    def toy(laws: StepLaws, place: Place) -> Verdict:
        return Verdict(path=(), next_token=laws.choose([place])[0])

    assert law_of(toy) == {0: 0.5, 2: 0.25, 3: 0.25}


def test_a_residual_is_normalised() -> None:
    def toy(laws: StepLaws, place: Place) -> Verdict:
        weights = torch.tensor([[0.0, 0.3, 0.1, 0.0]], dtype=torch.float64)
        return Verdict(path=(), next_token=laws.draw_from(weights, [place])[0])

    assert law_of(toy) == pytest.approx({1: 0.75, 2: 0.25})


@pytest.mark.parametrize("hint", [0.3, 0.1, 0.0, 7.0])
def test_a_threshold_is_found_wherever_the_hint_lies(hint: float) -> None:
    def toy(laws: StepLaws, place: Place) -> Verdict:
        return Verdict(path=(), next_token=1 if laws.uniforms([place])[0] < 0.3 else 2)

    assert law_of(toy, hint) == pytest.approx({1: 0.3, 2: 0.7}, abs=1e-13)


def test_a_rule_with_several_thresholds_is_integrated_too() -> None:
    def toy(laws: StepLaws, place: Place) -> Verdict:
        u = laws.uniforms([place])[0]
        return Verdict(path=(), next_token=1 if u < 0.2 or u > 0.9 else 2)

    assert law_of(toy) == pytest.approx({1: 0.3, 2: 0.7}, abs=1e-13)


def test_questions_in_a_row_multiply() -> None:
    def toy(laws: StepLaws, place: Place) -> Verdict:
        if laws.uniforms([place])[0] < 0.125:
            return Verdict(path=(), next_token=9)
        deeper = Place(sequence=place.sequence, node=0, path=(1,))
        return Verdict(path=(0,), next_token=laws.choose([deeper])[0])

    assert law_of(toy) == pytest.approx({9: 0.125, 0: 0.4375, 2: 0.21875, 3: 0.21875})


def test_starts_carry_their_probability() -> None:
    def toy(laws: StepLaws, place: Place) -> Verdict:
        return Verdict(path=(), next_token=laws.choose([place])[0])

    leaves = explore([0.25, 0.75], runner(toy), lambda start, place: 0.5)
    assert sum(leaf.probability for leaf in leaves if leaf.start == 0) == pytest.approx(0.25)
    assert sum(leaf.probability for leaf in leaves if leaf.start == 1) == pytest.approx(0.75)
