"""Hand-written backward passes against numbers, and forward passes against their plain form, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.eagle_head import UnrolledAttention
from outrider.train.attention import AttentionPlan, unrolled_attention
from outrider.train.functions import rotate, take_rows, unit_norm

WIDTH, GROUPS, MEMBERS = 4, 2, 3


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def test_unit_norm() -> None:
    x = noise(3, 5)
    torch.testing.assert_close(unit_norm(x, 1e-3), F.rms_norm(x, (5,), eps=1e-3))
    assert torch.autograd.gradcheck(lambda x: unit_norm(x, 1e-3), (x,))


def test_rotate() -> None:
    x = noise(3, 2, 6)
    angles = torch.linspace(0, 2, 9, dtype=torch.float64).view(3, 3)
    cos, sin = angles.cos().repeat(1, 2).unsqueeze(1), angles.sin().unsqueeze(1)
    turned = rotate(x, cos, torch.cat((-sin, sin), dim=-1))
    left, right = x[..., :3], x[..., 3:]
    expected = torch.cat((left * cos[..., :3] - right * sin, right * cos[..., 3:] + left * sin), dim=-1)
    torch.testing.assert_close(turned, expected)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, torch.cat((-sin, sin), dim=-1)), (x,))


def test_take_rows() -> None:
    rows = torch.tensor([3, 0, 2])
    assert torch.equal(take_rows(noise(4, 2), rows), noise(4, 2)[rows])
    assert torch.autograd.gradcheck(lambda x: take_rows(x, rows), (noise(4, 2),))


def step_tensors(num_steps: int, num_keys: int, num_queries: int) -> list[Tensor]:
    """Queries, keys, values of the last step; then keys and values of the steps 1 .. between."""
    tensors = [noise(num_queries, GROUPS * MEMBERS, WIDTH), noise(num_keys, GROUPS, WIDTH, seed=1)]
    tensors.append(noise(num_keys, GROUPS, WIDTH, seed=2))
    for step in range(1, num_steps):
        tensors += [noise(num_queries, GROUPS, WIDTH, seed=2 * step + part) for part in (1, 2)]
    return tensors


@pytest.mark.parametrize("num_steps", [1, 3])
def test_unrolled_attention(num_steps: int) -> None:
    texts = ((5, (1, 3, 4)), (3, (0, 2)))
    plan = AttentionPlan.build(texts, dtype=torch.float64)
    tensors = step_tensors(num_steps, 8, 5)

    def attend(queries: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        return unrolled_attention(plan, queries, (keys, values), list(zip(own[0::2], own[1::2], strict=True)))

    assert torch.autograd.gradcheck(attend, tensors)
    found = attend(*tensors)
    first_key = first_query = 0
    for num_keys, indexes in texts:
        at, seen = slice(first_query, first_query + len(indexes)), slice(first_key, first_key + num_keys)
        torch.testing.assert_close(found[at], plain(tensors, at, seen, indexes), rtol=1e-5, atol=1e-6)
        first_key, first_query = first_key + num_keys, first_query + len(indexes)


def plain(tensors: list[Tensor], at: slice, seen: slice, indexes: tuple[int, ...]) -> Tensor:
    """One text through the reference: queries and own keys spread out to all indexes."""
    queries, keys, values, *own = tensors
    num_keys = seen.stop - seen.start

    def spread(x: Tensor) -> Tensor:
        out = torch.zeros(1, num_keys, *x.shape[1:], dtype=x.dtype)
        out[0, list(indexes)] = x[at]
        return out

    attention = UnrolledAttention(torch.ones(1, num_keys, num_keys, dtype=torch.bool).tril())
    steps = [
        (keys[seen][None], values[seen][None]),
        *((spread(k), spread(v)) for k, v in zip(own[::2], own[1::2], strict=True)),
    ]
    for key, value in steps:
        out = attention(0, spread(queries), key, value)
    return out[0, list(indexes)]
