"""Temperature, min_p, top_k, top_p: against the slow reference, at ties, at the edges, in either precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import warp_logits

from . import reference
from .strategies import VOCAB, logits_rows, sampled_params


def support(logits: torch.Tensor) -> list[list[int]]:
    return [[token for token, x in enumerate(row) if x > -math.inf] for row in logits.tolist()]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(logits_rows, sampled_params()), min_size=1, max_size=4))
def test_rows_of_mixed_fields_equal_the_reference(rows: list[tuple[list[float], SamplingParams]]) -> None:
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    got = warp_logits(logits, [fields for _, fields in rows]).softmax(-1).tolist()
    for law, (row, fields) in zip(got, rows, strict=True):
        expected = reference.softmax(reference.warped_logits(row, fields))
        assert [p > 0 for p in law] == [p > 0 for p in expected]
        assert law == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neutral_fields_return_the_very_tensor(dtype: torch.dtype) -> None:
    logits = torch.randn(2, VOCAB, dtype=dtype)
    fields = [SamplingParams(temperature=1), SamplingParams(temperature=1, top_k=VOCAB, top_p=1.0)]
    assert warp_logits(logits, fields) is logits


def test_neutral_rows_pass_untouched_beside_others_and_the_input_is_kept() -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    plain = SamplingParams(temperature=1)
    got = warp_logits(logits, [plain, SamplingParams(temperature=0.5, top_k=3, top_p=0.8, min_p=0.01), plain])
    assert torch.equal(logits, before)
    assert torch.equal(got[0], before[0])
    assert torch.equal(got[2], before[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_keeps_exactly_k_and_gives_ties_to_the_lowest_ids(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0], [0.0] * 6], dtype=dtype)
    fields = [SamplingParams(temperature=1, top_k=3), SamplingParams(temperature=1, top_k=2)]
    assert support(warp_logits(logits, fields)) == [[1, 2, 3], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_keeps_the_smallest_set_and_gives_ties_to_the_lowest_ids(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25] * 4], dtype=dtype).log()
    for mass, expected in ((0.4, [[0], [0, 1]]), (0.6, [[0, 1], [0, 1, 2]]), (0.8, [[0, 1, 2], [0, 1, 2, 3]])):
        got = warp_logits(logits, [SamplingParams(temperature=1, top_p=mass)] * 2)
        assert support(got) == expected


def test_top_p_keeps_at_least_one_token() -> None:
    assert support(warp_logits(torch.zeros(1, 5), [SamplingParams(temperature=1, top_p=1e-9)])) == [[0]]


@pytest.mark.parametrize("vocab_size", [1023, 1024, 1025, 20000])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_top_p_of_large_vocabularies_is_a_full_sort(vocab_size: int, scale: float) -> None:
    """Flat laws need far more than the head that is looked at first."""
    logits = (
        torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(vocab_size), dtype=torch.float64) * scale
    )
    masses = (0.5, 0.999)
    got = warp_logits(logits, [SamplingParams(temperature=1, top_p=mass) for mass in masses])
    for row, mass in enumerate(masses):
        probs, ids = logits[row].softmax(-1).sort(descending=True, stable=True)
        count = int((probs.cumsum(-1) < mass).sum()) + 1
        assert set(support(got[row : row + 1])[0]) == set(ids[:count].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_allowed_token_survives_every_cut(dtype: torch.dtype) -> None:
    logits = torch.full((1, VOCAB), -math.inf, dtype=dtype)
    logits[0, 7] = -3.0
    for fields in (
        SamplingParams(temperature=0.1),
        SamplingParams(temperature=1, top_k=5),
        SamplingParams(temperature=1, top_p=0.5),
        SamplingParams(temperature=100, top_k=3, top_p=0.99, min_p=1.0),
    ):
        assert support(warp_logits(logits, [fields])) == [[7]]
        assert warp_logits(logits, [fields]).softmax(-1)[0, 7] == 1


def test_min_p_of_one_keeps_the_likeliest_tokens_only() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.999]])
    assert support(warp_logits(logits, [SamplingParams(temperature=1, min_p=1.0)])) == [[1, 2]]


def test_a_tiny_temperature_is_the_argmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.9, -5.0]])
    assert warp_logits(logits, [SamplingParams(temperature=1e-4)]).softmax(-1).tolist() == [[0, 1, 0, 0]]


def test_a_tie_wider_than_the_head_still_goes_to_the_lowest_ids() -> None:
    """2,000 equal logits, some larger ones with high ids: neither the sorted head nor its order decides."""
    logits = torch.zeros(1, 2048)
    logits[0, [5, 2000, 2047]] = torch.tensor([1.0, 2.0, 3.0])
    got = warp_logits(logits, [SamplingParams(temperature=1, top_k=10)])
    assert support(got) == [[0, 1, 2, 3, 4, 5, 6, 7, 2000, 2047]]
    assert got[0, 5] == 1
    mass = logits.double().softmax(-1)
    top_p = float(mass[0, [5, 2000, 2047]].sum() + mass[0, 0] * 300.5)
    got = warp_logits(logits.double(), [SamplingParams(temperature=1, top_p=top_p)])
    assert support(got) == [[*range(302), 2000, 2047]]


def test_top_k_above_the_number_of_allowed_tokens_adds_none() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf, -math.inf]])
    assert support(warp_logits(logits, [SamplingParams(temperature=1, top_k=4, top_p=0.9999)])) == [[0, 2]]
