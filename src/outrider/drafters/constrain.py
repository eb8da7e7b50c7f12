"""Grammars in draft laws (law 5): what a grammar forbids is masked out of the law before a draft is chosen from it.

The mask of a place depends on the tokens before it, so masking the law biases nothing; taking back a token that was drawn
would. Where nothing is left, drafting ends, and that too is known before anything is drawn there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from outrider.drafters.base import DraftRequest
from outrider.sampling.masks import allowed_BV, grammar_masks

__all__ = ["mask_drafts", "open_drafts"]


class _Vocabulary(Protocol):
    """See :class:`outrider.drafters.choice.DraftVocabulary`."""

    @property
    def target_size(self) -> int: ...
    @property
    def ids_U(self) -> Tensor | None: ...


def mask_drafts(
    logits_RU: Tensor, owners: Sequence[DraftRequest], paths: Sequence[Sequence[int]], vocabulary: _Vocabulary
) -> tuple[Tensor, set[int]]:
    """Forbid what each row's grammar forbids.

    Args:
        logits_RU: draft logits; not changed.
        owners: the request of each row.
        paths: draft tokens before each row.
        vocabulary: what the columns are.

    Returns:
        Logits, -inf where forbidden, and the rows behind which nothing can be drafted: their output ends there, or all
        that may follow lies outside the draft vocabulary. Those rows' logits are left as they were.
    """
    rows = [row for row, owner in enumerate(owners) if owner.grammar is not None]
    if not rows:
        return logits_RU, set()
    places = [(owner.grammar, tuple(path)) for owner, path in zip(owners, paths, strict=True) if owner.grammar]
    is_open = [grammar.is_open(path) for grammar, path in places]
    allowed_RU = allowed_BV(grammar_masks(places), vocabulary.target_size).to(logits_RU.device)
    if vocabulary.ids_U is not None:
        allowed_RU = allowed_RU.index_select(1, vocabulary.ids_U)
    allowed_RU = allowed_RU[:, : logits_RU.shape[1]]
    has_any = allowed_RU.any(dim=-1).tolist()
    closed = {
        row for row, is_going, any_left in zip(rows, is_open, has_any, strict=True) if not (is_going and any_left)
    }
    masked_RU = logits_RU.clone()
    for row, allowed_U in zip(rows, allowed_RU, strict=True):
        if row not in closed:
            masked_RU[row].masked_fill_(allowed_U.logical_not(), -math.inf)
    return masked_RU, closed


def open_drafts(
    logits_RU: Tensor, owners: Sequence[DraftRequest], paths: Sequence[Sequence[int]], vocabulary: _Vocabulary
) -> tuple[Tensor, list[int]]:
    """As :func:`mask_drafts`, but only the rows that drafting goes on behind, and which they are."""
    masked_RU, closed = mask_drafts(logits_RU, owners, paths, vocabulary)
    if not closed:
        return masked_RU, list(range(len(owners)))
    rows = [row for row in range(len(owners)) if row not in closed]
    return masked_RU[rows], rows
