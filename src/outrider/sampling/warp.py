"""The part of the processed law that knows no history: temperature, min_p, top_k, top_p, in that order (vLLM's).

Every row is processed by itself, with arithmetic that does not depend on its companions. Cuts are made on logits, not on
rounded probabilities, and ties at a cut go to the lowest id: ``top_k`` keeps exactly k tokens, ``top_p`` the smallest set
of likeliest tokens whose mass reaches it (at least one). Both keep *the n largest* logits, so a row with either is cut to
a short head of its sorted logits, and whoever draws from it needs noise for those tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.native.drawing import MISSING, OPEN
from outrider.native.drawing import cut_heads as native_cut
from outrider.sampling.params import SamplingParams

__all__ = [
    "Head",
    "first_size",
    "head_groups",
    "heads_of_group",
    "scale_logits",
    "warp_logits",
]

_FIRST_HEAD = 128
"""How many tokens ``top_p`` alone sorts at first; a flatter law makes it sort eight times as many, and so on."""


class Head(NamedTuple):
    """All that is left of some rows after ``top_k`` and ``top_p``.

    Attributes:
        rows: which rows, of the tensor that was cut.
        ids_BK: token ids, in no promised order among equal logits; a token may stand twice, with one and the same logit.
        logits_BK: their logits; -inf marks entries that were cut.
    """

    rows: tuple[int, ...]
    ids_BK: Tensor
    logits_BK: Tensor


def warp_logits(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits of the processed law; forbidden tokens are -inf.

    Args:
        logits_BV: float32 or float64, with masks, biases and penalties already applied.
        params: fields of each row; temperatures must be above 0.

    Returns:
        A new tensor, or ``logits_BV`` itself if every row's fields are neutral.
    """
    dense_BV, heads = cut_heads(logits_BV, params)
    if not heads:
        return dense_BV
    warped_BV = dense_BV.clone()
    for head in heads:
        rows_B = torch.tensor(head.rows, device=logits_BV.device)
        cut_BV = torch.full(
            (len(head.rows), logits_BV.shape[1]), -math.inf, dtype=logits_BV.dtype, device=logits_BV.device
        )
        warped_BV.index_copy_(0, rows_B, cut_BV.scatter_(1, head.ids_BK, head.logits_BK))
    return warped_BV


def has_head(params: SamplingParams, vocab_size: int) -> bool:
    """True if ``top_k`` or ``top_p`` cuts."""
    return params.top_p < 1 or _num_top(params, vocab_size) > 0


def cut_heads(logits_BV: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, list[Head]]:
    """Rows after temperature and ``min_p``, and the heads of those rows that ``top_k`` or ``top_p`` cuts further."""
    dense_BV = scale_logits(logits_BV, params)
    heads: list[Head] = []
    for num_top, rows in head_groups(params, logits_BV.shape[1]).items():
        heads.extend(heads_of_group(dense_BV, rows, num_top, [params[row].top_p for row in rows]))
    return dense_BV, heads


def scale_logits(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Rows after temperature and ``min_p``."""
    assert len(params) == logits_BV.shape[0]
    assert all(p.temperature > 0 for p in params), "greedy rows have no law to warp"
    return _cut_min_p(_apply_temperature(logits_BV, params), params)


def head_groups(params: Sequence[SamplingParams], vocab_size: int) -> dict[int, list[int]]:
    """Rows that ``top_k`` or ``top_p`` cuts, by their ``top_k`` (0 for none)."""
    groups: dict[int, list[int]] = {}
    for row, fields in enumerate(params):
        if has_head(fields, vocab_size):
            groups.setdefault(_num_top(fields, vocab_size), []).append(row)
    return groups


def first_size(num_top: int, vocab_size: int) -> int:
    """How many tokens of a head are looked at first."""
    return num_top or min(_FIRST_HEAD, vocab_size)


def _num_top(params: SamplingParams, vocab_size: int) -> int:
    """``top_k`` where it cuts, else 0."""
    return params.top_k if 0 < params.top_k < vocab_size else 0


def _apply_temperature(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    temperatures = [p.temperature for p in params]
    if all(t == 1 for t in temperatures):
        return logits_BV
    return logits_BV / torch.tensor(temperatures, dtype=logits_BV.dtype, device=logits_BV.device).unsqueeze(1)


def _cut_min_p(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Drop tokens whose probability is below min_p times the largest one, compared as logits."""
    if not any(p.min_p for p in params):
        return logits_BV
    log_min_ps = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
    log_min_ps_B1 = torch.tensor(log_min_ps, dtype=logits_BV.dtype, device=logits_BV.device).unsqueeze(1)
    return logits_BV.masked_fill(logits_BV < logits_BV.amax(dim=-1, keepdim=True) + log_min_ps_B1, -math.inf)


def heads_of_group(dense_BV: Tensor, rows: Sequence[int], num_top: int, top_ps: Sequence[float]) -> list[Head]:
    """Cut rows that share ``top_k`` (0 for none), so that a row's sums have one length whatever its companions ask for."""
    vocab_size = dense_BV.shape[1]
    size = first_size(num_top, vocab_size)
    heads: list[Head] = []
    while rows:
        logits_BV = dense_BV if len(rows) == dense_BV.shape[0] else dense_BV[list(rows)]
        values_BK, ids_BK, counts = _sorted_head(logits_BV, size, top_ps, is_whole=num_top > 0)
        done = [index for index, count in enumerate(counts) if count != OPEN]
        if done:
            part = slice(None) if len(done) == len(rows) else done
            kept_B = torch.tensor([counts[index] for index in done], device=dense_BV.device)
            values, ids = _keep_largest(logits_BV[part], values_BK[part], ids_BK[part], kept_B)
            heads.append(Head(tuple(rows[index] for index in done), ids, values))
        rows = [row for row, count in zip(rows, counts, strict=True) if count == OPEN]
        top_ps = [top_p for top_p, count in zip(top_ps, counts, strict=True) if count == OPEN]
        size = min(size * 8, vocab_size)
    return heads


def _sorted_head(
    logits_BV: Tensor, size: int, top_ps: Sequence[float], *, is_whole: bool
) -> tuple[Tensor, Tensor, list[int]]:
    """The largest logits, their ids, and how many of each row are kept, ``OPEN`` where ``size`` tokens are too few.

    One more than the head can hold shows whether a tie crosses the cut. Probabilities are within the head if ``top_k`` made
    it (``is_whole``), else within the row.
    """
    found = native_cut(logits_BV, size, top_ps, is_whole=is_whole) if size < logits_BV.shape[1] else None
    if found is None:
        return _torch_head(logits_BV, size, top_ps, is_whole=is_whole)
    values_BK, ids_BK, counts = found
    for row in [row for row, count in enumerate(counts) if count == MISSING]:
        values_1K, ids_1K, [counts[row]] = _torch_head(logits_BV[row : row + 1], size, [top_ps[row]], is_whole=is_whole)
        values_BK[row], ids_BK[row] = values_1K[0], ids_1K[0]
    return values_BK, ids_BK, counts


def _torch_head(
    logits_BV: Tensor, size: int, top_ps: Sequence[float], *, is_whole: bool
) -> tuple[Tensor, Tensor, list[int]]:
    vocab_size = logits_BV.shape[1]
    values_BK, ids_BK = logits_BV.topk(min(size + 1, vocab_size), dim=-1)
    head_BK = values_BK[:, :size]
    probs_BK = head_BK.softmax(dim=-1) if is_whole else logits_BV.softmax(dim=-1).gather(1, ids_BK[:, :size])
    top_ps_B1 = torch.tensor(top_ps, dtype=torch.float64, device=logits_BV.device).unsqueeze(1)
    is_short_BK = (probs_BK.double().cumsum(dim=-1) < top_ps_B1) | (top_ps_B1 == 1)
    counts_B = (is_short_BK.sum(dim=-1) + 1).clamp_max(size)
    if not is_whole and size < vocab_size:
        counts_B = counts_B.masked_fill(is_short_BK[:, -1], OPEN)
    return values_BK, ids_BK, counts_B.tolist()


def _keep_largest(logits_BV: Tensor, values_BK: Tensor, ids_BK: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the ``counts_B`` first of sorted logits; where a tie crosses the cut, its lowest ids.

    Returns:
        Logits, -inf where cut, and ids.
    """
    num_wide = values_BK.shape[1]
    columns_1K = torch.arange(num_wide, device=values_BK.device).unsqueeze(0)
    last_B1 = values_BK.gather(1, counts_B.unsqueeze(1) - 1)
    next_B1 = values_BK.gather(1, counts_B.unsqueeze(1).clamp_max(num_wide - 1))
    crosses_B = (next_B1 == last_B1) & (last_B1 > -math.inf) & (counts_B.unsqueeze(1) < num_wide)
    kept_BK = values_BK.masked_fill(columns_1K >= counts_B.unsqueeze(1), -math.inf)
    if bool(crosses_B.any()):
        ids_BK = ids_BK.clone()
        for row in crosses_B.flatten().nonzero().flatten().tolist():
            tied_K = (kept_BK[row] == last_B1[row]).nonzero().flatten()
            lowest = (logits_BV[row] == last_B1[row]).nonzero().flatten()[: len(tied_K)]
            # An id behind the cut may now also stand before it; there the likeliest token is repeated instead.
            ids_BK[row, tied_K] = lowest
            ids_BK[row, int(counts_B[row]) :] = ids_BK[row, 0]
            kept_BK[row, int(counts_B[row]) :] = kept_BK[row, 0]
    return kept_BK, ids_BK
