"""The part of the processed law that knows no history: temperature, min_p, top_k, top_p, in that order (vLLM's).

Every row is processed by itself, with arithmetic that does not depend on its companions. Cuts are made on logits, not on
rounded probabilities, and ties at a cut go to the lowest id: ``top_k`` keeps exactly k tokens, ``top_p`` the smallest set
of likeliest tokens whose mass reaches it (at least one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.sampling.params import SamplingParams

__all__ = ["warp_logits"]

_Cut = Callable[[Tensor, Tensor], Tensor]

_HEAD = 1024
"""How many tokens ``top_p`` sorts at first; a flat law makes it sort eight times as many, and so on."""


def warp_logits(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits of the processed law; forbidden tokens are -inf.

    Args:
        logits_BV: float32 or float64, with masks, biases and penalties already applied.
        params: fields of each row; temperatures must be above 0.

    Returns:
        A new tensor, or ``logits_BV`` itself if every row's fields are neutral.
    """
    assert len(params) == logits_BV.shape[0]
    assert all(p.temperature > 0 for p in params), "greedy rows have no law to warp"
    logits_BV = _apply_temperature(logits_BV, params)
    vocab_size = logits_BV.shape[1]
    logits_BV = _on_rows(logits_BV, [p.min_p for p in params], 0.0, _cut_min_p)
    top_ks = [float(p.top_k) if 0 < p.top_k < vocab_size else 0.0 for p in params]
    logits_BV = _on_rows(logits_BV, top_ks, 0.0, _cut_top_k)
    return _on_rows(logits_BV, [p.top_p for p in params], 1.0, _cut_top_p)


def _apply_temperature(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    temperatures = [p.temperature for p in params]
    if all(t == 1 for t in temperatures):
        return logits_BV
    return logits_BV / torch.tensor(temperatures, dtype=logits_BV.dtype, device=logits_BV.device).unsqueeze(1)


def _on_rows(logits_BV: Tensor, values: Sequence[float], neutral: float, cut: _Cut) -> Tensor:
    """Apply ``cut`` to the rows whose value is not neutral, and leave the others as they are."""
    rows = [row for row, value in enumerate(values) if value != neutral]
    if not rows:
        return logits_BV
    active = torch.tensor([values[row] for row in rows], dtype=torch.float64, device=logits_BV.device)
    if len(rows) == len(values):
        return cut(logits_BV, active)
    rows_B = torch.tensor(rows, device=logits_BV.device)
    return logits_BV.index_copy(0, rows_B, cut(logits_BV.index_select(0, rows_B), active))


def _cut_min_p(logits_BV: Tensor, min_ps_B: Tensor) -> Tensor:
    """Drop tokens whose probability is below min_p times the largest one, compared as logits."""
    floor_B1 = logits_BV.amax(dim=-1, keepdim=True) + min_ps_B.log().to(logits_BV.dtype).unsqueeze(1)
    return logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)


def _cut_top_k(logits_BV: Tensor, top_ks_B: Tensor) -> Tensor:
    counts_B = top_ks_B.long()
    head_BK = logits_BV.topk(int(counts_B.max()), dim=-1).values
    return _keep_largest(logits_BV, head_BK.gather(1, counts_B.unsqueeze(1) - 1), counts_B)


def _cut_top_p(logits_BV: Tensor, top_ps_B: Tensor) -> Tensor:
    probs_BV = logits_BV.softmax(dim=-1)
    vocab_size = logits_BV.shape[1]
    size = min(_HEAD, vocab_size)
    while True:
        head_BK, ids_BK = logits_BV.topk(size, dim=-1)
        mass_BK = probs_BV.gather(1, ids_BK).double().cumsum(dim=-1)
        short_BK = mass_BK < top_ps_B.unsqueeze(1)
        if size == vocab_size or not bool(short_BK[:, -1].any()):
            break
        size = min(size * 8, vocab_size)
    counts_B = (short_BK.sum(dim=-1) + 1).clamp_max(vocab_size)
    return _keep_largest(logits_BV, head_BK.gather(1, counts_B.unsqueeze(1) - 1), counts_B)


def _keep_largest(logits_BV: Tensor, nth_B1: Tensor, counts_B: Tensor) -> Tensor:
    """Keep the ``counts_B`` largest logits of each row, of which ``nth_B1`` is the smallest; ties to the lowest id."""
    kept_BV = logits_BV >= nth_B1
    crowded_B = kept_BV.sum(dim=-1) > counts_B
    if bool(crowded_B.any()):
        above_BV = logits_BV > nth_B1
        tied_BV = kept_BV & ~above_BV
        room_B1 = (counts_B - above_BV.sum(dim=-1)).unsqueeze(1)
        kept_BV = above_BV | (tied_BV & (tied_BV.cumsum(dim=-1) <= room_B1))
    return logits_BV.masked_fill(~kept_BV, -math.inf)
