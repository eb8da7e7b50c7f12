"""From verdicts to committed tokens. A fault in one sequence ends that one; the others of the pass go on unharmed."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import Drafter
from outrider.engine.judge import Judged
from outrider.engine.sequence import LiveSequence
from outrider.sampling.laws import ProcessedLaws
from outrider.types import ROOT, Proposal

__all__ = ["commit"]


def commit(
    drafter: Drafter | None, sequences: Sequence[LiveSequence], proposals: Sequence[Proposal], judged: Judged
) -> list[tuple[int, ...]]:
    """Commit the verdicts of a pass under each sequence's stop rules; returns the tokens that count.

    A sequence whose tokens cannot be committed (its law, its tokenizer or its grammar fails) ends with reason ``error``.
    """
    committed = []
    for index, (sequence, proposal, verdict) in enumerate(zip(sequences, proposals, judged.verdicts, strict=True)):
        run = (*map(proposal.tokens.__getitem__, verdict.path), verdict.next_token)
        before = len(sequence.tokens)
        try:
            if index in judged.faults:
                raise judged.faults[index]
            tokens = _commit_one(sequence, run, index, (ROOT, *verdict.path), judged.laws)
        except AssertionError:
            raise
        except Exception as error:
            sequence.fail(error)
            tokens = tuple(sequence.tokens[before:])
        if drafter is not None:
            drafter.observe(sequence.key, sequence.tokens, len(tokens))
        committed.append(tokens)
    return committed


def _commit_one(
    sequence: LiveSequence, run: tuple[int, ...], index: int, stood: tuple[int, ...], laws: ProcessedLaws | None
) -> tuple[int, ...]:
    """Commit one sequence's run. Log-probabilities are read before the history moves on."""
    count, reason = sequence.judge(run)
    tokens = run[:count]
    if sequence.logprobs is not None:
        assert laws is not None, "whoever reads log-probabilities gets laws"
        paths = [tokens[:depth] for depth in range(count)]
        sequence.logprobs.extend(laws.token_logprobs(index, stood[:count], tokens, paths))
    sequence.append(tokens, reason)
    return tokens
