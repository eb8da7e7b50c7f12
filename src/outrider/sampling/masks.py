"""Bit masks of many places at once, and what they do to logits.

One bit a token, 32 tokens a word, as llguidance writes them. All places of a level are computed in parallel and laid over
the logits in one operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.matcher import GrammarMatcher, Path

__all__ = ["allowed_BV", "forbid_by_grammar", "grammar_masks"]


def grammar_masks(places: Sequence[tuple[GrammarMatcher, Path]]) -> Tensor:
    """What may follow each place; end-of-sequence alone where the grammar has ended.

    Args:
        places: at least one; matchers of one target, each in any number of places.

    Returns:
        int32 words ``[B, ceil(V / 32)]``, on the CPU.
    """
    compiler = places[0][0].grammar.compiler
    masks_BW = torch.zeros(len(places), -(-compiler.vocab_size // 32), dtype=torch.int32)
    waiting = list(range(len(places)))
    while waiting:  # a matcher stands at one place at a time
        later: list[int] = []
        standing: dict[int, int] = {}
        for row in waiting:
            matcher, path = places[row]
            if id(matcher) in standing:
                later.append(row)
            elif matcher.prepare(path) is None:
                _close(masks_BW, row, compiler.table.eos_ids)
            else:
                standing[id(matcher)] = row
        _fill(masks_BW, places, list(standing.values()))
        waiting = later
    return masks_BW


def _fill(masks_BW: Tensor, places: Sequence[tuple[GrammarMatcher, Path]], rows: Sequence[int]) -> None:
    """Compute the masks of places that their matchers stand at."""
    if not rows:
        return
    compiler = places[0][0].grammar.compiler
    work = [(places[row][0].prepare(places[row][1]), row) for row in rows]
    compiler.executor.unsafe_compute_mask_ptr(work, masks_BW.data_ptr(), 4 * masks_BW.shape[1], len(masks_BW))
    for row in rows:
        matcher, path = places[row]
        if not matcher.survived(path):
            masks_BW[row] = 0
            _close(masks_BW, row, compiler.table.eos_ids)


def _close(masks_BW: Tensor, row: int, eos_ids: Sequence[int]) -> None:
    for token in eos_ids:
        bit = token % 32
        masks_BW[row, token // 32] |= (1 << bit) - (1 << 32 if bit == 31 else 0)


def allowed_BV(masks_BW: Tensor, vocab_size: int) -> Tensor:
    """Masks as bools."""
    bits = np.unpackbits(masks_BW.numpy().view(np.uint8), axis=1, bitorder="little", count=vocab_size)
    return torch.from_numpy(bits).view(torch.bool)


def forbid_by_grammar(
    logits_BV: Tensor, matchers: Sequence[GrammarMatcher | None], paths: Sequence[Sequence[int]]
) -> None:
    """Set what a row's grammar forbids at its place to -inf, in place; rows without a grammar are left alone."""
    rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
    if not rows:
        return
    places = [(matcher, tuple(path)) for matcher, path in zip(matchers, paths, strict=True) if matcher is not None]
    masks_BW = grammar_masks(places)
    forbidden_BV = allowed_BV(masks_BW, logits_BV.shape[1]).logical_not_().to(logits_BV.device)
    if len(rows) == logits_BV.shape[0]:
        logits_BV.masked_fill_(forbidden_BV, -math.inf)
    else:
        logits_BV[rows] = logits_BV[rows].masked_fill_(forbidden_BV, -math.inf)
