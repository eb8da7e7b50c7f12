"""One pass of the target and its verdicts.

Where every sequence of the pass takes the argmax of the raw logits and nobody reads log-probabilities, the target is asked
for tokens only: then the LM head compares as it goes and no logits are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from outrider.cache.base import Cache
from outrider.engine.sequence import LiveSequence
from outrider.models.base import PackedRows, Target
from outrider.sampling.laws import ProcessedLaws
from outrider.types import Proposal, Verdict
from outrider.verify import GreedyTokens, verify

__all__ = ["Judged", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a pass decided.

    Attributes:
        verdicts: one a sequence.
        laws: for log-probabilities; ``None`` where nobody reads them.
        taps: hidden states of all packed rows, by layer.
        faults: what went wrong with single sequences, by their index; their verdicts mean nothing.
    """

    verdicts: list[Verdict]
    laws: ProcessedLaws | None
    taps: dict[int, Tensor]
    faults: Mapping[int, Exception] = field(default_factory=dict)


def judge(
    target: Target,
    cache: Cache,
    rows: PackedRows,
    *,
    sequences: Sequence[LiveSequence],
    proposals: Sequence[Proposal],
    first_rows: Sequence[int] | None = None,
    taps: Sequence[int] = (),
) -> Judged:
    """Run a pass and verify the proposals.

    Args:
        target, cache: what runs it.
        rows: the packed rows.
        sequences, proposals: what is judged, one proposal a sequence.
        first_rows: each sequence's root among the rows that logits are asked for; the first of each segment if not given.
        taps: layers whose hidden states are wanted.
    """
    first_rows = [segment.start for segment in rows.segments] if first_rows is None else first_rows
    if _is_argmax_enough(sequences, proposals):
        tokens = target.forward_greedy(rows, cache, taps=taps)
        greedy = GreedyTokens(tokens.tokens_R.tolist(), first_rows)
        return Judged(verdicts=verify(proposals, greedy), laws=None, taps=tokens.taps)
    result = target.forward(rows, cache, taps=taps)
    argmax_R = None if result.tokens_R is None else result.tokens_R.tolist()
    laws = ProcessedLaws(
        result.logits_RV, first_rows=first_rows, states=[s.state for s in sequences], argmax_R=argmax_R
    )
    try:
        return Judged(verdicts=verify(proposals, laws), laws=laws, taps=result.taps)
    except AssertionError:
        raise
    except Exception:
        verdicts, faults = _judge_each(result.logits_RV, first_rows, sequences, proposals)
        return Judged(verdicts=verdicts, laws=laws, taps=result.taps, faults=faults)


def _judge_each(
    logits_RV: Tensor,
    first_rows: Sequence[int],
    sequences: Sequence[LiveSequence],
    proposals: Sequence[Proposal],
) -> tuple[list[Verdict], dict[int, Exception]]:
    """The same sequence by sequence, to find out whose law cannot be computed. Noise is keyed: it is no other verdict."""
    verdicts: list[Verdict] = []
    faults: dict[int, Exception] = {}
    for index, (row, sequence, proposal) in enumerate(zip(first_rows, sequences, proposals, strict=True)):
        laws = ProcessedLaws(logits_RV, first_rows=[row], states=[sequence.state])
        try:
            verdicts += verify([proposal], laws)
        except AssertionError:
            raise
        except Exception as fault:
            verdicts.append(Verdict(path=(), next_token=0))
            faults[index] = fault
    return verdicts, faults


def _is_argmax_enough(sequences: Sequence[LiveSequence], proposals: Sequence[Proposal]) -> bool:
    is_greedy = all(s.state.is_plain_greedy and s.logprobs is None for s in sequences)
    return is_greedy and all(proposal.draft_probs_NV is None for proposal in proposals)
