"""The processed law, slowly and obviously: plain Python over one position. Nothing of the package's code is used."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.sampling.params import SamplingParams

FORBIDDEN = -math.inf


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def processed_logits(
    raw: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> list[float]:
    """Masks and logit_bias, then penalties; ``output`` holds draft tokens that lead to the position too."""
    logits = list(raw)
    for ids in params.bad_words_token_ids:
        before = list(ids[:-1])
        if list(output)[len(output) - len(before) :] == before and len(output) >= len(before):
            logits[ids[-1]] = FORBIDDEN
    if len(output) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            logits[token] = FORBIDDEN
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in range(len(logits)):
        if token in prompt or token in output:
            if logits[token] > 0:
                logits[token] /= params.repetition_penalty
            else:
                logits[token] *= params.repetition_penalty
        logits[token] -= params.frequency_penalty * list(output).count(token)
        if token in output:
            logits[token] -= params.presence_penalty
    return logits


def by_rank(logits: Sequence[float]) -> list[int]:
    """Token ids, likeliest first, ties to the lowest id."""
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def keep_only(logits: Sequence[float], kept: Sequence[int]) -> list[float]:
    return [x if token in set(kept) else FORBIDDEN for token, x in enumerate(logits)]


def warped_logits(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, min_p, top_k, top_p."""
    logits = [x / params.temperature for x in logits]
    if params.min_p > 0:
        probs = softmax(logits)
        logits = keep_only(logits, [t for t, p in enumerate(probs) if p >= params.min_p * max(probs)])
    if params.top_k > 0:
        logits = keep_only(logits, by_rank(logits)[: params.top_k])
    if params.top_p < 1:
        probs, kept, mass = softmax(logits), [], 0.0
        for token in by_rank(logits):
            kept.append(token)
            mass += probs[token]
            if mass >= params.top_p:
                break
        logits = keep_only(logits, kept)
    return logits


def law(
    raw: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> list[float]:
    """The whole processed law."""
    logits = processed_logits(raw, params, prompt, output, eos)
    if params.temperature == 0:
        best = by_rank(logits)[0]
        return [1.0 if token == best else 0.0 for token in range(len(logits))]
    return softmax(warped_logits(logits, params))
