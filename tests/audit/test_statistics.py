"""Bets are fair, the alarm is rare, and what is stated to be visible is seen."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.audit import statistics
from outrider.audit.statistics import (
    BERNOULLI_LEANS,
    NUM_POLYNOMIALS,
    TILT_LEANS,
    Channel,
    Evidence,
    Floats,
    bernoulli_channel,
    exchange_test,
    polynomial,
    tilt_channel,
    uniform_channel,
)

ONE = np.ones(1, dtype=np.bool_)


def random_law(noise: np.random.Generator, size: int = 6) -> Floats:
    law: Floats = noise.dirichlet(np.full(size, 0.5))
    return law


@pytest.mark.parametrize("degree", range(1, NUM_POLYNOMIALS + 1))
def test_bets_on_the_transform_are_fair_and_polynomials_are_standardised(degree: int) -> None:
    nodes, weights = np.polynomial.legendre.leggauss(64)
    u, weights = (nodes + 1) / 2, weights / 2
    channel = uniform_channel("all", degree, u, np.ones(64, dtype=np.bool_))
    np.testing.assert_allclose(weights @ np.exp(channel.gains), 1, atol=1e-9)
    values = polynomial(degree, u)
    np.testing.assert_allclose([weights @ values, weights @ values**2], [0, 1], atol=1e-12)


def test_bets_on_named_tokens_and_on_likelihood_are_fair() -> None:
    noise = np.random.default_rng(1)
    for _ in range(20):
        law = random_law(noise)
        named = np.array([True, False])
        hit = bernoulli_channel("guess", "all", named, np.full(2, law[0]), np.ones(2, dtype=np.bool_))
        np.testing.assert_allclose(np.array([law[0], 1 - law[0]]) @ np.exp(hit.gains), 1, atol=1e-9)
        np.testing.assert_allclose(np.array([law[0], 1 - law[0]]) @ hit.deviations, 0, atol=1e-12)
        logs = np.log(law)
        entropy = -(law @ logs)
        tilts = [np.log((law ** (1 + lean)).sum()) for lean in TILT_LEANS]
        tilt = tilt_channel(
            "likelihood",
            "all",
            logs,
            np.full(6, entropy),
            np.full(6, law @ logs**2 - entropy**2),
            np.tile(tilts, (6, 1)),
            np.ones(6, dtype=np.bool_),
        )
        np.testing.assert_allclose(law @ np.exp(tilt.gains), 1, atol=1e-9)
        np.testing.assert_allclose(
            [law @ tilt.deviations, law @ tilt.deviations**2], [0, tilt.variances[0]], atol=1e-12
        )


def test_outside_its_stratum_a_token_changes_nothing() -> None:
    off = np.zeros(3, dtype=np.bool_)
    ones = np.ones(3)
    for channel in (
        uniform_channel("s", 1, np.array([0.1, np.nan, 2.0]), off),
        bernoulli_channel("guess", "s", np.ones(3, dtype=np.bool_), ones / 2, off),
        tilt_channel("likelihood", "s", -ones, ones, ones, np.ones((3, len(TILT_LEANS))), off),
    ):
        assert not channel.gains.any() and not channel.deviations.any() and not channel.variances.any()


def guesses(noise: np.random.Generator, size: int, excess: float = 0.0) -> Channel:
    probs = noise.uniform(0.1, 0.9, size)
    hits = noise.random(size) < probs + excess
    return bernoulli_channel("guess", "all", hits, probs, np.ones(size, dtype=np.bool_))


def uniforms(noise: np.random.Generator, size: int) -> list[Channel]:
    u = noise.random(size)
    return [
        uniform_channel("all", degree, u, np.ones(size, dtype=np.bool_)) for degree in range(1, NUM_POLYNOMIALS + 1)
    ]


def test_the_alarm_is_as_rare_as_stated_however_long_one_looks() -> None:
    noise = np.random.default_rng(2)
    alarms = 0
    for _ in range(300):
        evidence = Evidence(kinds=2, strata=1, alpha=0.1)
        for _ in range(3):
            evidence.add([*uniforms(noise, 100), guesses(noise, 100)], 100)
        alarms += evidence.alarm_at is not None
    assert alarms <= 0.1 * 300
    assert alarms > 0, "an alarm that never comes would not show that its rate is bounded"


def test_what_is_stated_to_be_detectable_is_detected() -> None:
    noise = np.random.default_rng(3)
    size = 2000
    planned = Evidence(kinds=2, strata=1)
    planned.add([*uniforms(noise, size), guesses(noise, size)], size)
    stated = {each.kind: each.detectable for each in planned.summaries()}["guess"]
    assert stated is not None
    caught = 0
    for _ in range(60):
        evidence = Evidence(kinds=2, strata=1)
        evidence.add([*uniforms(noise, size), guesses(noise, size, excess=stated)], size)
        caught += evidence.alarm_at is not None
    assert caught >= 0.8 * 60
    assert 0.02 < stated < 0.08


def test_evidence_does_not_depend_on_how_tokens_are_fed() -> None:
    def parts(bounds: list[tuple[int, int]]) -> Evidence:
        noise = np.random.default_rng(4)
        probs = noise.uniform(0.1, 0.9, 600)
        hits = noise.random(600) < np.minimum(probs + 0.2, 1)
        evidence = Evidence(kinds=1, strata=1)
        for start, stop in bounds:
            mask = np.ones(stop - start, dtype=np.bool_)
            evidence.add([bernoulli_channel("guess", "all", hits[start:stop], probs[start:stop], mask)], stop - start)
        return evidence

    whole, split = parts([(0, 600)]), parts([(0, 1), (1, 300), (300, 300), (300, 600)])
    assert whole.alarm_at == split.alarm_at and whole.alarm_at is not None and 20 < whole.alarm_at < 600
    assert whole.log_capital == pytest.approx(split.log_capital)
    [summary] = whole.summaries()
    assert summary.tokens == 600 and summary.z is not None and summary.z > 5
    assert summary.mean == pytest.approx(0.18, abs=0.05)


def test_what_was_staked_on_nothing_stays_in_the_purse() -> None:
    evidence = Evidence(kinds=4, strata=3)
    none = np.zeros(5, dtype=np.bool_)
    evidence.add([bernoulli_channel("guess", "all", none, np.zeros(5), none)], 5)
    assert evidence.log_capital == pytest.approx(0) and evidence.num_tokens == 5
    [summary] = evidence.summaries()
    assert (summary.tokens, summary.mean, summary.z, summary.detectable) == (0, None, None, None)


def test_exchange_finds_one_shifted_number_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(5)
    differences = noise.standard_cauchy((60, 12))
    differences[:, 7] = noise.normal(0.9, 1, 60)
    found = exchange_test(differences, seed=0)
    assert found.p_value <= 1e-3 and int(np.abs(found.z).argmax()) == 7
    assert found.critical < abs(found.z[7])


def test_exchange_is_exact_for_wild_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "NUM_EXCHANGES", 200)
    noise = np.random.default_rng(6)
    p_values = [exchange_test(noise.standard_cauchy((25, 8)), seed=run).p_value for run in range(300)]
    share = np.mean(np.array(p_values) <= 0.1)
    assert 0.05 < share < 0.15
    still = exchange_test(np.zeros((25, 3)), seed=0)
    assert still.p_value == 1 and not still.z.any()


def test_leans_cover_both_sides() -> None:
    for leans in (BERNOULLI_LEANS, TILT_LEANS, statistics.UNIFORM_LEANS):
        assert list(leans) == sorted(leans) and all(-lean in leans for lean in leans)
    assert math.isclose(statistics.ALPHA, 1e-3)
