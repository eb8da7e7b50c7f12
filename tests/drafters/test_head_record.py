"""What a head's folder records can be found again, and tells a change from rounding."""

from __future__ import annotations

import torch

from outrider.drafters.head_record import (
    answer_statistics,
    common_tokens,
    scripts_of,
    tap_statistics,
    tensor_statistics,
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cosine(one: list[float], other: list[float]) -> float:
    return float(torch.nn.functional.cosine_similarity(torch.tensor(one), torch.tensor(other), dim=0))


def test_taps_are_known_again_by_their_direction() -> None:
    mean, other = noise(64, seed=1), noise(64, seed=2)
    here, again = (tap_statistics(noise(500, 64, seed=seed) + mean) for seed in (3, 4))
    elsewhere = tap_statistics(noise(500, 64, seed=5) + other)
    assert len(here["direction"]) == 16
    assert cosine(here["direction"], again["direction"]) > 0.95
    assert cosine(here["direction"], elsewhere["direction"]) < 0.7
    huge = torch.cat((noise(500, 64, seed=3) + mean, 1e4 * noise(1, 64)))
    assert abs(tap_statistics(huge)["norm_median"] / here["norm_median"] - 1) < 0.01, "one huge row moves no median"


def test_a_tensor_is_told_from_another_of_the_same_spread() -> None:
    matrix, ids = noise(32, 48), torch.arange(3)
    then = tensor_statistics({"a": matrix, "ids": ids})
    assert set(then) == {"a"}
    rounded = tensor_statistics({"a": matrix.to(torch.bfloat16)})["a"]
    assert abs(rounded["sketch"] - then["a"]["sketch"]) < 0.01 and abs(rounded["rms"] - then["a"]["rms"]) < 0.01
    other = noise(32, 48, seed=9)
    alike = tensor_statistics({"a": other * matrix.norm() / other.norm()})["a"]
    assert abs(alike["sketch"] - then["a"]["sketch"]) > 0.1


def test_answers() -> None:
    assert common_tokens([[5, 5, 2], [2, 9]]) == [2, 5, 9]
    found = answer_statistics([[1, 2], [3, 4]], ["ab <think>", "Привет мир"], draft_ids=[1, 2, 3], common_ids=[1])
    assert (found["tokens"], found["covered"], found["common"], found["thinking"]) == (4, 0.75, 0.25, 0.5)
    assert list(found["scripts"]) == ["cyrillic", "latin"]
    assert answer_statistics([], [], draft_ids=[1], common_ids=[])["covered"] == 0


def test_scripts() -> None:
    assert scripts_of("12 ...") == {}
    assert scripts_of("ab 日本") == {"latin": 0.5, "cjk": 0.5}
