"""What the drafter tests share."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import DraftRequest
from outrider.sampling.params import SamplingParams
from outrider.types import DraftMode

GREEDY_PARAMS = SamplingParams(max_tokens=1000)


def wish(
    tokens: Sequence[int],
    num_draft_tokens: int,
    *,
    sequence: int = 0,
    mode: DraftMode = DraftMode.GREEDY,
    params: SamplingParams = GREEDY_PARAMS,
    seed: int = 0,
) -> DraftRequest:
    """A draft request with the usual fields."""
    return DraftRequest(
        sequence=sequence,
        tokens=tokens,
        num_draft_tokens=num_draft_tokens,
        mode=mode,
        params=params,
        seed=seed,
        choice=0,
    )
