"""Keyed noise: the same bits as the published generator, the right laws, and independence between keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.rng import Purpose, gumbel_at_BK, gumbel_BV, noise_key, uniform

MASK = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """The generator as published: next state and output."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def outputs(key: int, count: int) -> list[int]:
    found, state = [], key
    for _ in range(count):
        state, value = splitmix64(state)
        found.append(value)
    return found


def uniforms(key: int, count: int) -> np.ndarray:
    return torch.exp(-torch.exp(-gumbel_BV([key], count)))[0].numpy()


def test_generator_used_as_reference_gives_its_published_vector() -> None:
    # First outputs for state 1234567, as listed with the public-domain implementation.
    assert outputs(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("key", [0, 1, 1234567, MASK, 1 << 63, 0x8000000000000001])
def test_vector_equals_pure_integers(key: int) -> None:
    noise = gumbel_BV([key], 2000)[0].tolist()
    for got, bits in zip(noise, outputs(key, 2000), strict=True):
        expected = -math.log(-math.log(((bits >> 12) * 2 + 1) * 2.0**-53))
        assert got == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_uniform_is_element_zero_and_known() -> None:
    key = noise_key(7, 1, 42, Purpose.ACCEPT)
    assert uniform(key) == ((outputs(key, 1)[0] >> 12) * 2 + 1) * 2.0**-53
    assert -math.log(-math.log(uniform(key))) == pytest.approx(float(gumbel_BV([key], 5)[0, 0]), abs=1e-12)


def test_keys_never_change() -> None:
    """Seeded outputs are promised to stay; these values pin the derivation of keys."""
    assert noise_key(0, 0, 0, Purpose.TARGET) == 4461711301965484829
    assert noise_key(-1, 3, 1000, Purpose.RESIDUAL) == 4035815707508911823
    assert noise_key(2**63 - 1, 127, 8191, Purpose.DRAFT) == 1738104297448028985


def test_negative_and_huge_seeds_are_read_modulo_two_to_the_64() -> None:
    assert noise_key(-5, 0, 1, Purpose.TARGET) == noise_key(2**64 - 5, 0, 1, Purpose.TARGET)


@given(st.integers(0, MASK))
def test_uniforms_are_strictly_inside_the_unit_interval(bits: int) -> None:
    assert 0 < uniform(bits) < 1


def test_extreme_bits_stay_inside_the_unit_interval() -> None:
    """All-zero and all-one outputs are reached by inverting the (bijective) finaliser."""
    for bits, expected in ((0, 2.0**-53), (MASK, 1 - 2.0**-53)):
        key = (_invert(bits) - 0x9E3779B97F4A7C15) & MASK
        assert uniform(key) == expected
        noise = float(gumbel_BV([key], 1)[0, 0])
        assert math.isfinite(noise)
        assert noise == pytest.approx(-math.log(-math.log(expected)), rel=1e-12)


def _invert(value: int) -> int:
    """The input for which the finaliser yields ``value``."""
    value = _unshift(value, 31)
    value = _unshift(value * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK, 27)
    return _unshift(value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK, 30)


def _unshift(value: int, bits: int) -> int:
    result = value
    for _ in range(64 // bits + 1):
        result = value ^ (result >> bits)
    return result


def test_noise_of_a_token_depends_on_nothing_else() -> None:
    keys = [noise_key(3, 0, position, Purpose.TARGET) for position in range(5)]
    together = gumbel_BV(keys, 1000)
    for row, key in enumerate(keys):
        assert torch.equal(gumbel_BV([key], 1000)[0], together[row])
        assert torch.equal(gumbel_BV([key], 130)[0], together[row, :130])


def test_noise_of_some_tokens_is_that_of_the_whole_row() -> None:
    keys = [noise_key(3, 0, position, Purpose.TARGET) for position in range(3)]
    ids = torch.tensor([[0, 7, 7, 999], [5, 4, 3, 2], [999, 0, 500, 1]])
    assert torch.equal(gumbel_at_BK(keys, ids), gumbel_BV(keys, 1000).gather(1, ids))
    assert ids.tolist()[0] == [0, 7, 7, 999]


def test_noise_is_gumbel() -> None:
    noise = gumbel_BV([noise_key(11, 0, 5, Purpose.TARGET)], 49152)[0].numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3


def test_uniforms_over_positions_are_uniform_and_uncorrelated() -> None:
    values = np.array([uniform(noise_key(1, 0, position, Purpose.ACCEPT)) for position in range(20000)])
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 4 / math.sqrt(len(values))


@pytest.mark.parametrize("field", ["seed", "choice", "position", "purpose"])
def test_changing_one_field_gives_independent_noise(field: str) -> None:
    base = {"seed": 5, "choice": 0, "position": 17, "purpose": Purpose.TARGET}
    other = {**base, field: Purpose.RESIDUAL if field == "purpose" else int(base[field]) + 1}
    a, b = (uniforms(noise_key(**fields), 20000) for fields in (base, other))  # type: ignore[arg-type]
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(20000)
    table = np.histogram2d(a, b, bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-3


def test_purposes_of_one_position_are_pairwise_independent() -> None:
    columns = [[uniform(noise_key(9, 0, t, purpose)) for t in range(8000)] for purpose in Purpose]
    correlations = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlations).max() < 4.5 / math.sqrt(8000)


def test_keys_do_not_collide() -> None:
    keys = {
        noise_key(seed, choice, position, purpose)
        for seed in range(8)
        for choice in range(4)
        for position in range(256)
        for purpose in Purpose
    }
    assert len(keys) == 8 * 4 * 256 * 4
