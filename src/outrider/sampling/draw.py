"""From a processed law to a token: argmax and Gumbel-argmax. Ties go to the lowest id everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.native.drawing import draw_candidates, draw_from_heads
from outrider.rng import gumbel_at_BK, gumbel_BV
from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import first_size, head_groups, heads_of_group, scale_logits

__all__ = ["argmax_B", "argmax_tokens", "draw_logits", "draw_processed", "draw_weights"]

_BLOCK = 256


def argmax_tokens(scores_BV: Tensor) -> list[int]:
    """Index of the largest score of each row; of equal ones the lowest id."""
    return argmax_B(scores_BV).tolist()


def draw_logits(logits_BV: Tensor, gumbel_BV: Tensor) -> list[int]:
    """One token a row from ``softmax(logits)``: the argmax of logits + Gumbel noise (Gumbel-max).

    Args:
        logits_BV: processed logits; -inf forbids a token.
        gumbel_BV: float64 noise, overwritten.
    """
    return argmax_tokens(gumbel_BV.add_(logits_BV))


def draw_processed(logits_BV: Tensor, params: Sequence[SamplingParams], keys: Sequence[int]) -> list[int]:
    """One token a row from ``softmax(warp_logits(logits, params))`` with the noise of its key.

    The same tokens as ``draw_logits(warp_logits(logits, params), gumbel_BV(keys, ...))``; rows that ``top_k`` or ``top_p``
    cuts get noise for what is left of them alone.
    """
    dense_BV = scale_logits(logits_BV, params)
    tokens: dict[int, int] = {}
    for num_top, rows in head_groups(params, logits_BV.shape[1]).items():
        tokens.update(_draw_heads(dense_BV, rows, num_top, params, keys))
    rest = [row for row in range(len(params)) if row not in tokens]
    rest_BV = dense_BV if len(rest) == len(params) else dense_BV[rest]
    tokens.update(zip(rest, _draw_rows(rest_BV, [keys[row] for row in rest]), strict=True))
    return [tokens[row] for row in range(len(params))]


def _draw_heads(
    dense_BV: Tensor, rows: Sequence[int], num_top: int, params: Sequence[SamplingParams], keys: Sequence[int]
) -> dict[int, int]:
    """Tokens of rows that ``top_k`` or ``top_p`` cuts, with noise for what is left of them alone."""
    vocab_size, tokens = dense_BV.shape[1], dict[int, int]()
    size = first_size(num_top, vocab_size)
    if size < vocab_size:
        logits_BV = dense_BV if len(rows) == len(dense_BV) else dense_BV[list(rows)]
        drawn = draw_from_heads(
            logits_BV, [keys[row] for row in rows], size, [params[row].top_p for row in rows], is_whole=num_top > 0
        )
        for row, ids in zip(rows, drawn or (), strict=drawn is not None):
            if ids is not None:
                tokens[row] = _draw_among(dense_BV[row], keys[row], ids)
    left = [row for row in rows if row not in tokens]
    for head in heads_of_group(dense_BV, left, num_top, [params[row].top_p for row in left]):
        noise_BK = gumbel_at_BK([keys[row] for row in head.rows], head.ids_BK)
        best_B1 = noise_BK.add_(head.logits_BK).argmax(dim=-1, keepdim=True)
        tokens.update(zip(head.rows, head.ids_BK.gather(1, best_B1).flatten().tolist(), strict=True))
    return tokens


def _draw_rows(logits_BV: Tensor, keys: Sequence[int]) -> list[int]:
    """``draw_logits(logits, gumbel_BV(keys, ...))``, with noise for those tokens alone that native kernels leave standing."""
    num_rows, vocab_size = logits_BV.shape
    found = draw_candidates(logits_BV, keys) if num_rows else None
    if found is not None:
        return [_draw_among(logits_BV[row], key, ids) for row, (key, ids) in enumerate(zip(keys, found, strict=True))]
    # One row's noise fits a processor's cache, two do not; other devices want few, large operations.
    num_at_once = 1 if logits_BV.device.type == "cpu" else max(num_rows, 1)
    tokens: list[int] = []
    for start in range(0, num_rows, num_at_once):
        rows = slice(start, start + num_at_once)
        tokens += draw_logits(logits_BV[rows], gumbel_BV(keys[rows], vocab_size, logits_BV.device))
    return tokens


def _draw_among(logits_V: Tensor, key: int, ids: Sequence[int] | None) -> int:
    """A row's token, which is one of these ids (``None``: of all)."""
    if ids is None:
        return draw_logits(logits_V.unsqueeze(0), gumbel_BV([key], len(logits_V)))[0]
    if len(ids) == 1:
        return ids[0]
    noise_1K = gumbel_at_BK([key], torch.tensor([ids]))
    return ids[int(noise_1K.add_(logits_V[list(ids)]).argmax())]


def draw_weights(weights_BV: Tensor, gumbel_BV: Tensor) -> list[int]:
    """One token a row from unnormalised weights of 0 or more, not all 0 in a row. ``gumbel_BV`` is overwritten."""
    return draw_logits(weights_BV.log(), gumbel_BV)


def argmax_B(scores_BV: Tensor) -> Tensor:
    """As :func:`argmax_tokens`, as an int64 tensor ``[B]``.

    It works in two levels, ten times as fast as one on a CPU, where maxima run vectorised but indices do not.
    """
    num_rows, vocab_size = scores_BV.shape
    num_blocks = vocab_size // _BLOCK
    if num_blocks < 2 or vocab_size % _BLOCK:
        return scores_BV.argmax(dim=-1)
    blocks = scores_BV.reshape(num_rows, num_blocks, _BLOCK)
    block_B = blocks.amax(dim=-1).argmax(dim=-1)
    rows_B = torch.arange(num_rows, device=scores_BV.device)
    return block_B * _BLOCK + blocks[rows_B, block_B].argmax(dim=-1)
