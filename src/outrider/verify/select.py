"""Which verifier serves which proposal."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.types import Proposal, Verdict
from outrider.verify.base import StepLaws, Verifier
from outrider.verify.chain import verify_chain
from outrider.verify.compare import verify_compare

__all__ = ["verify"]


def verify(proposals: Sequence[Proposal], laws: StepLaws, sequences: Sequence[int] | None = None) -> list[Verdict]:
    """Verdicts of a mixed batch: rejection for drawn chains, draw-and-compare for everything else.

    Args:
        proposals: one a sequence.
        laws: laws and noise of the step.
        sequences: the step's sequence of each proposal; ``None`` for one proposal a sequence, in order.
    """
    sequences = range(len(proposals)) if sequences is None else sequences
    is_drawn = [proposal.draft_probs_NV is not None for proposal in proposals]
    verdicts: dict[int, Verdict] = {}
    for drawn, verifier in ((False, verify_compare), (True, verify_chain)):
        indexes = [index for index, kind in enumerate(is_drawn) if kind is drawn]
        if indexes:
            verdicts.update(zip(indexes, _some(indexes, proposals, laws, sequences, verifier), strict=True))
    return [verdicts[index] for index in range(len(proposals))]


def _some(
    indexes: Sequence[int],
    proposals: Sequence[Proposal],
    laws: StepLaws,
    sequences: Sequence[int],
    verifier: Verifier,
) -> list[Verdict]:
    return verifier([proposals[i] for i in indexes], laws, [sequences[i] for i in indexes])
