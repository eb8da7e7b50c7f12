"""Where replay may count otherwise than decoding did: drafts that are equally likely to the last bit.

Replay and decoding ask a drafter's model in passes of other shapes. Where its arithmetic depends on the number of rows (PyTorch
in float32 and bfloat16), a logit may come out one rounding higher or lower, and where two tokens' draft logits are closer than
that, the other one is drafted. The target's own law is not touched: only what is drafted may differ, never what is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.drafters.base import LawDrafter
from outrider.measure.expected import FollowedText
from outrider.measure.target_pass import ReadText
from outrider.types import DraftMode

__all__ = ["TIE_TOLERANCE", "DraftTie", "draft_ties"]

TIE_TOLERANCE = 1e-4
"""Logits that rounding may swap in float32, as for the target's own ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTie:
    """Two tokens that a drafter finds equally likely.

    Attributes:
        id: of the text. start: output index at which drafting begins. depth: of the draft token, from 1.
        tokens: the likelier one first; ``gap``: between their logits.
    """

    id: str
    start: int
    depth: int
    tokens: tuple[int, int]
    gap: float


@torch.inference_mode()
def draft_ties(
    drafter: LawDrafter, read: ReadText, num_draft_tokens: int, *, key: int, tolerance: float = TIE_TOLERANCE
) -> list[DraftTie]:
    """Ties of greedy drafts along a text, for drafts from every place of it.

    Args:
        drafter: a drafter of chains with a law of its own.
        read: the text, with the taps that the drafter wants.
        num_draft_tokens: most draft tokens of a step.
        key: a fresh id of a sequence.
        tolerance: largest gap that counts, in logits.
    """
    text, output = FollowedText(drafter, read, key), read.text.output  # type: ignore[arg-type]
    depth = 1 if drafter.is_start_free else num_draft_tokens
    found: list[DraftTie] = []
    for start in range(1, len(output)):
        text.advance(start)
        found += _ties_at(drafter, text, start, output[start : start + depth], tolerance)
    text.finish()
    return found


def _ties_at(
    drafter: LawDrafter, text: FollowedText, start: int, said: Sequence[int], tolerance: float
) -> Iterator[DraftTie]:
    [logits_KU] = drafter.logits_along([text.request(len(said), DraftMode.GREEDY)], [said])
    best_K2, columns_K2 = logits_KU.topk(2, dim=-1)
    gaps = (best_K2[:, 0] - best_K2[:, 1]).tolist()
    for row, gap in enumerate(gaps):
        if gap <= tolerance:
            first, second = drafter.vocabulary.tokens(columns_K2[row].tolist())
            yield DraftTie(id=text.read.text.id, start=start, depth=row + 1, tokens=(first, second), gap=gap)
