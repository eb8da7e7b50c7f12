"""What a head's folder records about its training, so that whoever meets the head later can tell what has changed.

Every number here can be computed again where the head is used, from the target's hidden states, the head's own tensors or
the target's answers, and compared (:mod:`outrider.audit.doctor`).
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["answer_statistics", "common_tokens", "scripts_of", "tap_statistics", "tensor_statistics"]

NUM_COMMON = 256
"""How many of the commonest tokens of the training answers are recorded."""

_NUM_SIGNS = 16


def tap_statistics(taps_RD: Tensor) -> dict[str, Any]:
    """Mean and spread of a tap's numbers, its rows' norms, and where its rows point on average.

    The mean norm hangs on a few huge rows (the first token's, in most models) and so on the texts' length; the median does
    not. ``direction`` is the mean of the rows, each scaled to length 1, seen along sixteen fixed directions.
    """
    rows_RD = taps_RD.float()
    norms_R = rows_RD.norm(dim=-1)
    mean_D = (rows_RD / norms_R.clamp_min(1e-9).unsqueeze(-1)).mean(dim=0)
    return {
        "mean": float(rows_RD.mean()),
        "std": float(rows_RD.std()),
        "norm_mean": float(norms_R.mean()),
        "norm_std": float(norms_R.std()),
        "norm_median": float(norms_R.median()),
        "direction": [round(float(value), 5) for value in _signs(_NUM_SIGNS, len(mean_D)) @ mean_D],
    }


def _signs(num_rows: int, width: int) -> Tensor:
    """Rows of +1 and -1 over the square root of the width, made by arithmetic alone, the same everywhere."""
    places = torch.arange(num_rows * width, dtype=torch.int64)
    mixed = (places * 2654435761 + 40503) % 2**32
    mixed = ((mixed ^ (mixed >> 15)) * 668265263) % 2**32
    signs: Tensor = ((mixed >> 16) % 2 * 2 - 1).view(num_rows, width).float()
    return signs.mul_(math.sqrt(1 / width))


def tensor_statistics(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Root mean square of each floating-point tensor, and a sketch: its share along one fixed direction.

    Of two independent tensors the sketches differ by about 1; rounding moves one by a thousandth.
    """
    found: dict[str, dict[str, float]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            values = tensor.detach().float().flatten()
            along = float(_signs(1, len(values))[0] @ values) * len(values) ** 0.5
            found[name] = {
                "rms": float(values.square().mean().sqrt()),
                "sketch": along / max(float(values.norm()), 1e-9),
            }
    return found


def common_tokens(answers: Iterable[Sequence[int]]) -> list[int]:
    """The commonest tokens, commonest first; of equal counts the lowest id."""
    counts = Counter(token for answer in answers for token in answer)
    return sorted(counts, key=lambda token: (-counts[token], token))[:NUM_COMMON]


def answer_statistics(
    answers: Sequence[Sequence[int]], texts: Sequence[str], *, draft_ids: Iterable[int], common_ids: Iterable[int]
) -> dict[str, Any]:
    """How far answers are made of the draft vocabulary and of its commonest tokens, and in which scripts they are.

    Args:
        answers: token ids of each. texts: the same as text; empty where there is no tokenizer.
        draft_ids: what the head can say. common_ids: the commonest tokens of the training answers.
    """
    can_say, common = frozenset(draft_ids), frozenset(common_ids)
    tokens = [token for answer in answers for token in answer]
    found: dict[str, Any] = {
        "tokens": len(tokens),
        "covered": sum(token in can_say for token in tokens) / max(len(tokens), 1),
        "common": sum(token in common for token in tokens) / max(len(tokens), 1),
    }
    if texts:
        found["scripts"] = scripts_of("".join(texts))
        found["thinking"] = sum("<think>" in text for text in texts) / len(texts)
    return found


def scripts_of(text: str) -> dict[str, float]:
    """Shares of the letters by script (the first word of their Unicode names), the largest first."""
    letters = (unicodedata.name(char, "unknown").split()[0].lower() for char in text if char.isalpha())
    counts = Counter(letters)
    return {script: round(count / counts.total(), 4) for script, count in counts.most_common(6)}
