"""Keyed noise: every random number is a fixed function of (seed, choice, absolute position, purpose), and of the token id.

Nothing here is consumed in order, so the noise of a position is the same whatever was drafted, however the batch was
composed and whether the request was preempted (law 7). The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014) used as a hash of a counter: element i of the vector of a key is the
finaliser of ``key + (i + 1) * GOLDEN``. All of it is integer arithmetic modulo 2**64, so a CPU and a GPU yield the same
bits; only the two logarithms of the Gumbel transform may differ in the last place between devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Purpose", "gumbel_BV", "gumbel_at_BK", "noise_key", "uniform"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_FIELD_MULTIPLIER = 0xD1342543DE82EF95


class Purpose(IntEnum):
    """What a number is used for; numbers of different purposes are independent.

    ``TARGET``    choosing from the target's law (and ``SHARED`` drafts, which want that very noise).
    ``ACCEPT``    the acceptance test of a drawn draft token.
    ``RESIDUAL``  choosing the correction token after a refusal.
    ``DRAFT``     drawing draft tokens that are verified by rejection.
    """

    TARGET = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def noise_key(seed: int, choice: int, position: int, purpose: Purpose) -> int:
    """64-bit key of the noise of one position.

    Args:
        seed: of the request; any integer, read modulo 2**64.
        choice: which of the request's ``n`` choices.
        position: absolute index of the token that the noise decides (prompt included).
        purpose: what the noise is for.
    """
    key = _finalise((seed + _GOLDEN) & _MASK)
    for word in (choice, position, int(purpose)):
        key = _finalise(((key ^ (word & _MASK)) * _FIELD_MULTIPLIER + _GOLDEN) & _MASK)
    return key


def uniform(key: int) -> float:
    """Uniform number in the open interval (0, 1): an odd multiple of 2**-53, element 0 of the key's vector."""
    return ((_finalise((key + _GOLDEN) & _MASK) >> 12) * 2 + 1) * 2.0**-53


def gumbel_BV(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise for every token id, one row a key, float64 ``[len(keys), vocab_size]``.

    The number of a token depends on the key and the token id alone, not on ``vocab_size`` or the other keys.
    """
    state_BV = _counters_V(vocab_size, torch.device(device)) + _signed_B1(keys, device)
    return _gumbel_in_place(state_BV)


def gumbel_at_BK(keys: Sequence[int], ids_BK: Tensor) -> Tensor:
    """The same noise for some token ids of each key's row alone, float64 like ``ids_BK``."""
    return _gumbel_in_place((ids_BK + 1).mul_(_signed(_GOLDEN)).add_(_signed_B1(keys, ids_BK.device)))


def _finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The same 64 bits read as a signed integer, which is what torch computes with."""
    return value - (1 << 64) if value >> 63 else value


def _signed_B1(keys: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor([_signed(key & _MASK) for key in keys], dtype=torch.int64, device=device).unsqueeze(1)


@lru_cache(maxsize=8)
def _counters_V(vocab_size: int, device: torch.device) -> Tensor:
    """``(i + 1) * GOLDEN`` for every token id i."""
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def _xor_shift_(state: Tensor, bits: int) -> None:
    """``state ^= state >>> bits``; torch shifts arithmetically, so the copies of the sign bit are masked off."""
    state.bitwise_xor_((state >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _gumbel_in_place(state: Tensor) -> Tensor:
    """Finalise int64 counters and turn them into Gumbel numbers, reusing their memory."""
    _xor_shift_(state, 30)
    state.mul_(_signed(_MULTIPLIER_1))
    _xor_shift_(state, 27)
    state.mul_(_signed(_MULTIPLIER_2))
    _xor_shift_(state, 31)
    # The top 52 bits become the fraction of a double in [1, 2); minus (1 - 2**-53) that is an odd multiple of 2**-53,
    # exactly, and so never 0 and never 1.
    state.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1).bitwise_or_(0x3FF << 52)
    noise = state.view(torch.float64).sub_(1.0 - math.ldexp(1.0, -53))
    return noise.log_().neg_().log_().neg_()
