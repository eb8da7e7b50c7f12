"""Draws by native kernels take the same tokens as draws from all of the noise, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outrider.native.drawing import MISSING, OPEN, cut_heads, draw_candidates
from outrider.native.library import KERNELS, is_available, library
from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.sampling import draw
from outrider.sampling.draw import draw_logits, draw_processed
from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import warp_logits

library()
AVAILABLE = [name for name in KERNELS if is_available(name)]


def rows_of(vocab_size: int) -> Iterator[Tensor]:
    """Laws of many shapes, ``[4, V]`` each."""
    generator = torch.Generator().manual_seed(vocab_size)
    for scale in (0.0, 0.01, 1.0, 4.0, 30.0, 1000.0):
        yield torch.randn(4, vocab_size, generator=generator) * scale
    tied = (torch.randn(4, vocab_size, generator=generator) * 2).round()
    yield tied
    yield tied.masked_fill(torch.rand(4, vocab_size, generator=generator) < 0.9, -math.inf)
    alone = torch.full((4, vocab_size), -math.inf)
    alone[:, vocab_size // 2] = -3.0
    yield alone
    yield tied - 1e6


def keys_of(seed: int, count: int = 4) -> list[int]:
    return [noise_key(seed, 0, row, Purpose.TARGET) for row in range(count)]


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 700, 4096])
@pytest.mark.parametrize("kernels", AVAILABLE)
def test_the_same_tokens_as_all_of_the_noise(kernels: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", kernels)
    params = [SamplingParams(temperature=1)] * 4
    for logits in rows_of(vocab_size):
        for seed in range(25):
            keys = keys_of(seed)
            assert draw_candidates(logits, keys) is not None
            assert draw_processed(logits, params, keys) == draw_logits(logits, gumbel_BV(keys, vocab_size))


@pytest.mark.parametrize("kernels", AVAILABLE)
def test_nearly_always_one_token_is_left(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", kernels)
    logits = torch.randn(8, 49152, generator=torch.Generator().manual_seed(0)) * 3
    found = [ids for seed in range(6) for ids in draw_candidates(logits, keys_of(seed, 8)) or []]
    assert len(found) == 48 and all(ids is not None and len(ids) == 1 for ids in found)


def test_rows_that_are_crowded_forbidden_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(1, 3)
    logits = torch.zeros(3, 64)
    logits[0] = -math.inf
    logits[1, 40:] = math.inf
    logits[2, 7] = math.nan
    logits[2, 50] = math.nan
    expected = draw_logits(logits, gumbel_BV(keys, 64))
    assert draw_processed(logits, [SamplingParams(temperature=1)] * 3, keys) == expected
    many = torch.full((1, 400), math.inf)
    assert draw_candidates(many, keys[:1]) == [None]
    assert draw_processed(many, [SamplingParams(temperature=1)], keys[:1]) == draw_logits(
        many, gumbel_BV(keys[:1], 400)
    )


def test_several_candidates_are_compared_with_their_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    keys = keys_of(5)
    expected = draw_logits(logits, gumbel_BV(keys, 300))
    crowd = [sorted({token, 3, 200, 299}) for token in expected]
    monkeypatch.setattr(draw, "draw_candidates", lambda logits_BV, keys: crowd)
    assert draw_processed(logits, [SamplingParams(temperature=1)] * 4, keys) == expected


def test_rows_of_a_wider_matrix_and_rows_that_only_torch_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(4, 500, generator=torch.Generator().manual_seed(3))
    keys = keys_of(9)
    expected = draw_logits(wide[:, :333], gumbel_BV(keys, 333))
    assert [ids[0] for ids in draw_candidates(wide[:, :333], keys) or [] if ids] == expected
    assert draw_candidates(wide.double(), keys) is None
    assert draw_candidates(wide.t(), keys_of(9, 500)) is None
    monkeypatch.setenv("OUTRIDER_NATIVE", "off")
    assert draw_candidates(wide, keys) is None


# --- what top_k and top_p leave


@pytest.mark.parametrize("vocab_size", [800, 1030, 4096])
@pytest.mark.parametrize("kernels", AVAILABLE)
def test_the_largest_come_in_order(kernels: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", kernels)
    for logits in rows_of(vocab_size):
        for size in (1, 7, 90):
            found = cut_heads(logits, size, [0.9] * 4, is_whole=True)
            assert found is not None
            for row in [row for row, count in enumerate(found.counts) if count != MISSING]:
                ranked = sorted((-value, id) for id, value in enumerate(logits[row].tolist()))[: size + 1]
                order = [id for _, id in ranked]
                assert found.ids_BK[row].tolist() == order
                assert found.values_BK[row].equal(logits[row][order])


def test_rows_beyond_the_kernel_are_said_to_be_so() -> None:
    logits = torch.randn(5, 4096, generator=torch.Generator().manual_seed(1))
    logits[0, 9] = math.nan
    logits[1, 9] = math.inf
    logits[2] = -math.inf
    logits[3, 5:] = -math.inf
    found = cut_heads(logits, 100, [0.01] * 5, is_whole=False)
    assert found is not None and found.counts[:4] == [MISSING] * 4 and found.counts[4] > 0
    for rows, size in ((torch.randn(1, 4096), 3000), (torch.zeros(1, 1 << 15), 100)):
        assert cut_heads(rows, size, [0.5], is_whole=True).counts == [MISSING]  # type: ignore[union-attr]
    flat = torch.randn(1, 4096, generator=torch.Generator().manual_seed(2)) * 0.01
    assert cut_heads(flat, 100, [0.5], is_whole=False).counts == [OPEN]  # type: ignore[union-attr]
    assert cut_heads(flat, 100, [1.0], is_whole=True).counts == [100]  # type: ignore[union-attr]


CUT = [
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=3, top_p=0.999),
    SamplingParams(temperature=1.2, top_k=300, top_p=0.95, min_p=0.001),
    SamplingParams(temperature=1, top_p=0.5),
]


@pytest.mark.parametrize("kernels", AVAILABLE)
def test_laws_are_cut_where_torch_cuts_them(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    for scale in (0.5, 2.0, 6.0):
        logits = torch.randn(5, 8192, generator=generator) * scale
        logits[4] = logits[4].round()
        monkeypatch.setenv("OUTRIDER_NATIVE", kernels)
        cut = warp_logits(logits, CUT)
        alone = torch.cat([warp_logits(logits[row : row + 1], [fields]) for row, fields in enumerate(CUT)])
        assert cut.equal(alone), "a row's cut does not depend on its companions"
        monkeypatch.setenv("OUTRIDER_NATIVE", "off")
        assert warp_logits(logits, CUT).equal(cut)


@pytest.mark.parametrize("kernels", AVAILABLE)
def test_draws_from_heads_are_draws_from_the_cut_law(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", kernels)
    generator = torch.Generator().manual_seed(6)
    for scale in (0.5, 2.0, 6.0):
        logits = torch.randn(5, 8192, generator=generator) * scale
        logits[4] = logits[4].round()
        logits[0, 77] = math.nan if scale == 6.0 else 1.0
        law = warp_logits(logits[1:], CUT[1:])
        for seed in range(30):
            keys = keys_of(seed, 5)
            drawn = draw_processed(logits, CUT, keys)
            assert drawn[1:] == draw_logits(law, gumbel_BV(keys[1:], 8192))
            assert drawn == [draw_processed(logits[i : i + 1], [CUT[i]], [keys[i]])[0] for i in range(5)]
