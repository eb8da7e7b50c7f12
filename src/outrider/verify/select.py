"""Which verifier serves which proposal."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.types import Proposal, Verdict
from outrider.verify.base import GreedyTokens, StepLaws
from outrider.verify.chain import verify_chain
from outrider.verify.compare import verify_compare, verify_greedy

__all__ = ["verify"]


def verify(
    proposals: Sequence[Proposal], laws: StepLaws | GreedyTokens, sequences: Sequence[int] | None = None
) -> list[Verdict]:
    """Verdicts of a mixed batch: rejection for drawn chains, draw-and-compare for everything else.

    Args:
        proposals: one a sequence.
        laws: laws and noise of the step; known greedy tokens will do where nothing was drawn.
        sequences: the step's sequence of each proposal; ``None`` for one proposal a sequence, in order.
    """
    sequences = range(len(proposals)) if sequences is None else sequences
    if isinstance(laws, GreedyTokens):
        assert all(proposal.draft_probs_NV is None for proposal in proposals), "a drawn chain is verified against laws"
        return verify_greedy(proposals, laws, sequences)
    is_drawn = [proposal.draft_probs_NV is not None for proposal in proposals]
    verdicts: dict[int, Verdict] = {}
    compared = [index for index, drawn in enumerate(is_drawn) if not drawn]
    if compared:
        found = verify_compare([proposals[i] for i in compared], laws, [sequences[i] for i in compared])
        verdicts.update(zip(compared, found, strict=True))
    rejected = [index for index, drawn in enumerate(is_drawn) if drawn]
    if rejected:
        found = verify_chain([proposals[i] for i in rejected], laws, [sequences[i] for i in rejected])
        verdicts.update(zip(rejected, found, strict=True))
    return [verdicts[index] for index in range(len(proposals))]
