"""Evidence against "every token is a draw from the law that was written down for it", valid however long one looks.

**One sample.** Each token yields a few numbers whose law is known exactly if the claim holds: a uniform number, whether a
token named beforehand came out, how likely the token was. A bet that such a number leans one way multiplies its stake by
``exp(lean * x) / E[exp(lean * x)]``, which is 1 on average: fair under the claim, whatever came before. The capital of a fair
bet exceeds 1000 times its stake with probability at most 1/1000 (Ville 1939), *at any time*: one may watch and stop. All
bets share one stake, split among kinds, strata and leans, so that the family-wise false alarm is that of one bet, with no
assumption about sample size or dependence between the bets (an e-process; Ramdas et al., arXiv 2210.01948).

**Two samples.** Where the law that was written down is itself a little wrong (other arithmetic), both arms are measured
against it and compared with each other. Under the claim the two arms of a prompt may be exchanged, so the largest
standardised difference of all numbers is held against its own law under random exchanges (Westfall and Young's max-T):
exact for any law and any dependence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALPHA",
    "BERNOULLI_LEANS",
    "NUM_POLYNOMIALS",
    "TILT_LEANS",
    "UNIFORM_LEANS",
    "Channel",
    "Evidence",
    "Exchange",
    "Flags",
    "Floats",
    "Summary",
    "bernoulli_channel",
    "exchange_test",
    "polynomial",
    "tilt_channel",
    "uniform_channel",
]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

ALPHA = 1e-3
"""Chance that a whole audit of a sound engine raises an alarm."""
NUM_POLYNOMIALS = 4
UNIFORM_LEANS = (-0.4, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.4)
BERNOULLI_LEANS = (-1.6, -0.8, -0.4, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
TILT_LEANS = (-0.45, -0.15, -0.05, 0.05, 0.15, 0.45)
LEAN_LOSS = 1.06
"""Leans stand a factor of 2 to 3 apart; a deviation in between needs this much more to be seen."""
POWER_Z = 1.2816
"""90 % power."""
NUM_EXCHANGES = 20_000
_EXCHANGES_AT_ONCE = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One kind of number in one stratum, for a run of tokens.

    Attributes:
        kind, stratum: what it is; together they name the channel.
        gains: log of what each lean's capital is multiplied by at each token, ``[tokens, leans]``; 0 outside the stratum.
        deviations: observed minus expected, ``[tokens]``; 0 outside the stratum.
        variances: their variances under the claim; 0 outside the stratum.
        mask: which tokens are in the stratum.
    """

    kind: str
    stratum: str
    gains: Floats
    deviations: Floats
    variances: Floats
    mask: Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a channel came to.

    Attributes:
        tokens: in the stratum. mean: mean deviation. z: sum of deviations over its standard deviation under the claim.
        evidence: log10 of the channel's own capital (its bets' mean).
        detectable: mean deviation that this many tokens show with 90 % power; ``None`` without tokens.
    """

    kind: str
    stratum: str
    tokens: int
    mean: float | None
    z: float | None
    evidence: float | None
    detectable: float | None


@lru_cache(maxsize=1)
def _quadrature() -> tuple[Floats, Floats]:
    nodes, weights = np.polynomial.legendre.leggauss(128)
    return (nodes + 1) / 2, weights / 2


def polynomial(degree: int, u: Floats) -> Floats:
    """Shifted Legendre polynomial with mean 0 and variance 1 under a uniform ``u`` (Neyman's smooth test, 1937)."""
    values: Floats = np.polynomial.legendre.Legendre.basis(degree, domain=[0, 1])(u)
    return values * math.sqrt(2 * degree + 1)


@lru_cache(maxsize=NUM_POLYNOMIALS)
def _log_moments(degree: int) -> Floats:
    """``log E exp(lean * polynomial(U))`` for every lean."""
    u, weights = _quadrature()
    moments: Floats = np.log(np.exp(np.outer(UNIFORM_LEANS, polynomial(degree, u))) @ weights)
    return moments


def uniform_channel(stratum: str, degree: int, u: Floats, mask: Flags) -> Channel:
    """Does the transform lean like the polynomial of this degree? (1: too likely or too unlikely tokens; 2: too extreme.)"""
    x = np.where(mask, polynomial(degree, np.where(mask, u, 0.5)), 0.0)
    gains = np.outer(x, UNIFORM_LEANS) - np.outer(mask, _log_moments(degree))
    return Channel(
        kind=f"transform, degree {degree}",
        stratum=stratum,
        gains=gains,
        deviations=x,
        variances=mask.astype(np.float64),
        mask=mask,
    )


def bernoulli_channel(kind: str, stratum: str, hits: Flags, probs: Floats, mask: Flags) -> Channel:
    """Does a token named beforehand come out more or less often than its probability says?"""
    p = np.where(mask, np.clip(probs, 0.0, 1.0), 0.0)
    leans = np.asarray(BERNOULLI_LEANS)
    hit = (hits & mask).astype(np.float64)
    gains = np.outer(hit, leans) - np.log1p(np.outer(p, np.expm1(leans)))
    return Channel(
        kind=kind,
        stratum=stratum,
        gains=gains,
        deviations=np.where(mask, hit - p, 0.0),
        variances=p * (1 - p),
        mask=mask,
    )


def tilt_channel(
    kind: str, stratum: str, logprobs: Floats, entropies: Floats, variances: Floats, log_tilts: Floats, mask: Flags
) -> Channel:
    """Are tokens likelier or less likely than their law's entropy says? (A lean is a law raised to 1 + lean.)"""
    gains = np.where(mask[:, None], np.outer(np.where(mask, logprobs, 0.0), TILT_LEANS) - log_tilts, 0.0)
    return Channel(
        kind=kind,
        stratum=stratum,
        gains=gains,
        deviations=np.where(mask, logprobs + entropies, 0.0),
        variances=np.where(mask, variances, 0.0),
        mask=mask,
    )


@dataclass(slots=True)
class _Sums:
    capital: Floats
    tokens: int = 0
    deviation: float = 0.0
    variance: float = 0.0


@dataclass(slots=True)
class Evidence:
    """The capital of all bets together, fed with tokens as they come.

    Args:
        kinds: how many kinds of channels there will be, polynomials counted as one kind.
        strata: how many strata of each kind.
        alpha: the family-wise false alarm.

    Attributes:
        log_capital: natural logarithm of the present capital, the stake being 1.
        alarm_at: number of tokens after which it first reached ``1 / alpha``; ``None`` if it never did.
    """

    kinds: int
    strata: int
    alpha: float = ALPHA
    log_capital: float = 0.0
    alarm_at: int | None = None
    num_tokens: int = 0
    _sums: dict[tuple[str, str], _Sums] = field(default_factory=dict)

    def add(self, channels: Sequence[Channel], num_tokens: int) -> None:
        """Feed a run of tokens; every channel of the audit must be in ``channels``, and in the same order each time."""
        if num_tokens == 0:
            return
        total = np.full(num_tokens, -np.inf)
        stake = 0.0
        for channel in channels:
            sums = self._sums.setdefault(
                (channel.kind, channel.stratum), _Sums(capital=np.zeros(channel.gains.shape[1]))
            )
            running = sums.capital + np.cumsum(channel.gains, axis=0)
            share = self._share(channel)
            stake += share
            total = np.logaddexp(total, _log_mean_exp(running) + math.log(share))
            sums.capital = running[-1]
            sums.tokens += int(channel.mask.sum())
            sums.deviation += float(channel.deviations.sum())
            sums.variance += float(channel.variances.sum())
        assert stake < 1 + 1e-9, f"the stake is split into {stake}"
        # What was staked on kinds that this audit does not have stays in the purse.
        total = np.logaddexp(total, math.log(max(1 - stake, 1e-300)))
        over = np.flatnonzero(total >= -math.log(self.alpha))
        if self.alarm_at is None and len(over):
            self.alarm_at = self.num_tokens + int(over[0]) + 1
        self.log_capital = float(total[-1])
        self.num_tokens += num_tokens

    def summaries(self) -> Iterator[Summary]:
        """Every channel, in the order in which it was first fed."""
        for (kind, stratum), sums in self._sums.items():
            has = sums.tokens > 0 and sums.variance > 0
            share = self._share_of(kind) / len(sums.capital)
            need = math.sqrt(2 * (-math.log(self.alpha) - math.log(share))) + POWER_Z
            yield Summary(
                kind=kind,
                stratum=stratum,
                tokens=sums.tokens,
                mean=sums.deviation / sums.tokens if has else None,
                z=sums.deviation / math.sqrt(sums.variance) if has else None,
                evidence=float(_log_mean_exp(sums.capital[None, :])[0]) / math.log(10) if has else None,
                detectable=LEAN_LOSS * need * math.sqrt(sums.variance) / sums.tokens if has else None,
            )

    def _share(self, channel: Channel) -> float:
        return self._share_of(channel.kind)

    def _share_of(self, kind: str) -> float:
        per_kind = 1 / (self.kinds * self.strata)
        return per_kind / NUM_POLYNOMIALS if kind.startswith("transform") else per_kind


def _log_mean_exp(values: Floats) -> Floats:
    top = values.max(axis=1)
    mean: Floats = top + np.log(np.exp(values - top[:, None]).mean(axis=1))
    return mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Result of :func:`exchange_test`.

    Attributes:
        p_value: of the largest standardised difference, corrected for all of them.
        z: standardised difference of each number (0 where nothing varies). critical: largest one that chance explains.
        scale: standard deviation of each number's summed difference under exchange.
    """

    p_value: float
    z: Floats
    critical: float
    scale: Floats


def exchange_test(differences: Floats, seed: int, *, alpha: float = ALPHA) -> Exchange:
    """Are the signs of whole rows random?

    Args:
        differences: one arm minus the other, one row a prompt, one column a number, ``[prompts, numbers]``.
        seed: of the random exchanges.
    """
    scale = np.sqrt((differences**2).sum(axis=0))
    safe = np.where(scale > 0, scale, 1.0)
    z = np.where(scale > 0, differences.sum(axis=0) / safe, 0.0)
    observed = float(np.abs(z).max(initial=0.0))
    noise = np.random.default_rng(seed)
    largest: list[Floats] = []
    for start in range(0, NUM_EXCHANGES, _EXCHANGES_AT_ONCE):
        size = min(_EXCHANGES_AT_ONCE, NUM_EXCHANGES - start)
        signs = noise.integers(0, 2, size=(size, len(differences))) * 2.0 - 1.0
        largest.append(np.abs(signs @ (differences / safe)).max(axis=1, initial=0.0))
    chance = np.concatenate(largest)
    beyond = int((chance >= observed - 1e-9).sum())
    return Exchange(
        p_value=(1 + beyond) / (1 + NUM_EXCHANGES), z=z, critical=float(np.quantile(chance, 1 - alpha)), scale=scale
    )
