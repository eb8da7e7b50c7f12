"""The native attention of unroll steps against the plain form in float64 and in bfloat16, on every instruction set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outrider.train.attention import AttentionPlan, unrolled_attention
from tests.train.native_sets import use

Texts = Sequence[tuple[int, Sequence[int]]]

# Texts of one key and of several tiles of 32, queries with gaps, at the very end, and more than 64 of one text.
TEXTS: Texts = ((1, (0,)), (70, (0, 2, 31, 32, 33, 69)), (40, range(5, 40)), (131, range(31, 131)))
MORE_KEYS, MORE_QUERIES = 7, 5
"""Rows of the padding, behind all texts."""

# Query heads, key heads, head width: grouped, one to one, widths on and off the tiles' 32 and the registers' 16.
SHAPES = ((6, 2, 64), (2, 2, 32), (3, 1, 40), (4, 2, 10), (2, 1, 80))


def problem(heads: int, groups: int, width: int, num_own: int) -> list[Tensor]:
    """Slopes of the output, queries, keys, values, then own keys and values by turns; bfloat16."""
    generator = torch.Generator().manual_seed(width + num_own)
    num_keys = sum(count for count, _ in TEXTS) + MORE_KEYS
    num_queries = sum(len(indexes) for _, indexes in TEXTS) + MORE_QUERIES
    shapes = [(num_queries, heads, width)] * 2 + [(num_keys, groups, width)] * 2
    shapes += [(num_queries, groups, width)] * (2 * num_own)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def run(tensors: Sequence[Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Output and gradients of one step; of the padding nothing flows back."""
    slopes, queries, *others = (x.detach().to(dtype).requires_grad_(True) for x in tensors)
    keys, values, *own = others
    plan = AttentionPlan.build(TEXTS, dtype=dtype)
    out = unrolled_attention(plan, queries, (keys, values), list(zip(own[0::2], own[1::2], strict=True)))
    (out * slopes.detach()).sum().backward()
    return [out.detach(), *(x.grad for x in (queries, *others) if x.grad is not None)]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, of all values together."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_native_attention_is_the_plain_one(
    kernels: str, shape: tuple[int, int, int], num_own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares, slopes of scores and what comes out are rounded to bfloat16, at most 2^-9 each."""
    given = problem(*shape, num_own)
    found, wanted = run(given), run(given, torch.float64)
    use(monkeypatch, None)
    plain = run(given)
    assert len(found) == len(wanted) == 4 + 2 * num_own
    for ours, theirs, right in zip(found, plain, wanted, strict=True):
        assert ours.shape == right.shape
        assert error(ours, right) <= min(3 * 2**-9, 1.5 * error(theirs, right) + 2**-9)
        assert bool(((ours.double() - right).abs() <= 2**-5 * right.abs().max()).all())


def test_rows_of_no_text_are_zero(kernels: str) -> None:
    out, query_grad, key_grad, value_grad, *own_grads = run(problem(6, 2, 64, 2))
    for x in (out, query_grad, *own_grads):
        assert not x[-MORE_QUERIES:].any()
    assert not key_grad[-MORE_KEYS:].any() and not value_grad[-MORE_KEYS:].any()


def test_nobody_sees_later_keys_or_another_text(kernels: str) -> None:
    given = problem(6, 2, 64, 1)
    before = run(given)[0]
    changed = [x.clone() for x in given]
    changed[2][1 + 33 :] += 1  # the keys and values of the second text from index 33 on, and of all texts behind
    changed[3][1 + 33 :] += 1
    after = run(changed)[0]
    assert torch.equal(before[:4], after[:4])  # the first text, and queries 0, 2, 31 of the second
    assert torch.equal(before[4], after[4]) and not torch.equal(before[5], after[5])  # at indexes 32 and 33


def test_same_bits_from_any_number_of_threads(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(6, 2, 64, 2)
    alone, again = run(given), run(given)
    use(monkeypatch, kernels, 2)
    for first, second, third in zip(alone, again, run(given), strict=True):
        assert torch.equal(first, second) and torch.equal(first, third)


def test_strided_rows(kernels: str) -> None:
    """Keys and values as training has them: halves of one product's columns."""
    given = problem(6, 2, 64, 0)
    both = torch.cat((given[2].flatten(1), given[3].flatten(1)), dim=1)
    parts = [half.unflatten(1, (2, 64)) for half in both.chunk(2, dim=1)]
    assert not parts[0].is_contiguous()
    for dense, strided in zip(run(given), run([*given[:2], *parts]), strict=True):
        assert torch.equal(dense, strided)


def test_nan_stays_in_its_text(kernels: str) -> None:
    given = problem(6, 2, 64, 1)
    given[3][1 + 2] = torch.nan  # a value of the second text, at index 2
    out = run(given)[0]
    assert not bool(out[2:7].isfinite().all(dim=-1).any())
    assert bool(out[0].isfinite().all()) and bool(out[7:].isfinite().all())


def test_more_heads_of_a_group_than_there_is_room_for(kernels: str) -> None:
    """The plain form takes over."""
    found, wanted = (run(problem(17, 1, 16, 1), dtype) for dtype in (torch.bfloat16, torch.float64))
    for ours, right in zip(found, wanted, strict=True):
        assert error(ours, right) <= 2**-6
