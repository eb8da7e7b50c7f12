"""From scored tokens to what is bet on: kinds of numbers, in strata that were known before the token came."""

from __future__ import annotations

import numpy as np

from outrider.audit.scoring import Scores
from outrider.audit.statistics import (
    NUM_POLYNOMIALS,
    Channel,
    Evidence,
    Flags,
    Floats,
    bernoulli_channel,
    tilt_channel,
    uniform_channel,
)

__all__ = ["channels_of", "new_evidence", "output_sums", "strata_of"]

EARLY_TOKENS = 8
LOW_ENTROPY, HIGH_ENTROPY = 0.5, 2.0
"""Nats."""

OUTSIDE_BY = (0.0, 0.03, 0.3)
"""Logits; of two arms, how often each leaves the recomputed support by more than this is compared."""


def strata_of(scores: Scores) -> dict[str, Flags]:
    """Which tokens are in which stratum. Everything here is a function of the text before the token."""
    strata = {
        "all": np.ones(len(scores), dtype=np.bool_),
        f"first {EARLY_TOKENS} tokens": scores.position < EARLY_TOKENS,
        "later tokens": scores.position >= EARLY_TOKENS,
        "low entropy": scores.entropy < LOW_ENTROPY,
        "middle entropy": (scores.entropy >= LOW_ENTROPY) & (scores.entropy <= HIGH_ENTROPY),
        "high entropy": scores.entropy > HIGH_ENTROPY,
        "no n-gram match": ~scores.named["n-gram"],
    }
    for guess, named in scores.named.items():
        strata[f"{guess} names the mode"] = named & scores.is_mode[guess]
        strata[f"{guess} names another"] = named & ~scores.is_mode[guess]
    return {name: mask & scores.inside for name, mask in strata.items()}


def channels_of(scores: Scores) -> list[Channel]:
    """All channels of a run of tokens, always in the same order."""
    channels: list[Channel] = []
    for stratum, mask in strata_of(scores).items():
        channels += [uniform_channel(stratum, degree, scores.u, mask) for degree in range(1, NUM_POLYNOMIALS + 1)]
        channels.append(
            tilt_channel("likelihood", stratum, scores.logprob, scores.entropy, scores.variance, scores.log_tilts, mask)
        )
        for guess, named in scores.named.items():
            kind = f"{guess} guess"
            channels.append(bernoulli_channel(kind, stratum, scores.hits[guess], scores.probs[guess], mask & named))
    return channels


def new_evidence(num_guesses: int, alpha: float) -> Evidence:
    """An empty purse for audits with this many guesses: transform, likelihood and each guess, in every stratum."""
    return Evidence(kinds=2 + num_guesses, strata=7 + 2 * num_guesses, alpha=alpha)


def output_sums(scores: Scores, num_outputs: int) -> tuple[list[str], list[int], Floats]:
    """Sums of every channel's deviations over each output.

    Returns:
        Names of the channels, tokens in each, and sums ``[outputs, channels]``.
    """
    names: list[str] = []
    counts: list[int] = []
    columns: list[Floats] = []
    for channel in channels_of(scores):
        names.append(f"{channel.kind} | {channel.stratum}")
        counts.append(int(channel.mask.sum()))
        columns.append(_per_output(scores, channel.deviations, num_outputs))
    for gap in OUTSIDE_BY:
        names.append(f"outside the support | by more than {gap:g} logits")
        counts.append(len(scores))
        columns.append(_per_output(scores, (scores.gap > gap).astype(np.float64), num_outputs))
    return names, counts, np.stack(columns, axis=1)


def _per_output(scores: Scores, values: Floats, num_outputs: int) -> Floats:
    return np.bincount(scores.output, weights=values, minlength=num_outputs).astype(np.float64)
