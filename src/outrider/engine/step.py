"""One step: plan, propose, one target pass, verify, commit, forget what was refused, learn. Plain decoding is the empty
proposal.

Rows of a sequence in the pass: its last committed token (the root, whose keys and values are not cached yet), then its
draft nodes. With 7 tokens committed, 6 of them cached, and the chain a-b-c proposed::

    packed row            0     1     2     3
    token               t[6]    a     b     c
    position              6     7     8     9
    law it gives, of   t[7]  t[8]  t[9] t[10]

If a is kept and b refused, the verdict is path (0,) and a correction x: tokens a, x are committed; ``keep`` leaves the
6 cached tokens and rows 0 and 1; x is the root of the next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cache.base import Cache
from outrider.device import synchronize
from outrider.drafters.base import Drafter
from outrider.engine.drafting import draft
from outrider.engine.judge import Judged, judge
from outrider.engine.planner import Planner
from outrider.engine.report import PassCost, report_of
from outrider.engine.sequence import LiveSequence
from outrider.engine.taps import hand_over, wanted_taps
from outrider.models.base import PackedRows, Target
from outrider.sampling.laws import ProcessedLaws
from outrider.types import ROOT, Proposal, StepReport

__all__ = ["Machinery", "commit", "decode_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What a step works with."""

    target: Target
    cache: Cache
    drafter: Drafter | None
    verification: str


def decode_step(machinery: Machinery, planner: Planner, sequences: Sequence[LiveSequence]) -> list[StepReport]:
    """Decode one step of all sequences together.

    Args:
        machinery: target, cache, drafter.
        planner: says who drafts, and learns what came of it.
        sequences: running sequences, each with one uncached token.

    Returns:
        One report a sequence, already recorded on it.
    """
    target, cache, drafter = machinery.target, machinery.cache, machinery.drafter
    begun = time.perf_counter()
    plan, proposals = draft(drafter, planner, sequences, machinery.verification)
    drafted = time.perf_counter()
    bases = [cache.length(s.slot) for s in sequences]
    rows = _pack(sequences, proposals, bases, target)
    listeners = [planner.wants_taps(sequence) for sequence in sequences]
    taps = wanted_taps(drafter) if any(listeners) else ()
    judged = judge(target, cache, rows, sequences=sequences, proposals=proposals, taps=taps)
    synchronize(target.spec.device)
    verified = time.perf_counter()
    committed = commit(machinery, sequences, proposals, judged)
    for sequence, base, verdict, tokens in zip(sequences, bases, judged.verdicts, committed, strict=True):
        cache.keep(sequence.slot, base=base, path=(0, *(node + 1 for node in verdict.path[: len(tokens)])))
    if taps:
        keys = [s.key if listens else None for s, listens in zip(sequences, listeners, strict=True)]
        hand_over(drafter, keys, rows, judged.verdicts, judged.taps)
    cost = PassCost(
        draft_ms=(drafted - begun) * 1e3,
        verify_ms=(verified - drafted) * 1e3,
        other_ms=(time.perf_counter() - verified) * 1e3,
        batch_size=len(sequences),
        rows=len(rows.tokens_R),
    )
    passed = zip(proposals, judged.verdicts, committed, plan.asks, strict=True)
    reports = [report_of(proposal, verdict, tokens, cost, ask.depth) for proposal, verdict, tokens, ask in passed]
    for sequence, report in zip(sequences, reports, strict=True):
        sequence.record(report)
    planner.learn(plan, sequences, proposals, reports)
    return reports


def commit(
    machinery: Machinery, sequences: Sequence[LiveSequence], proposals: Sequence[Proposal], judged: Judged
) -> list[tuple[int, ...]]:
    """Commit the verdicts of a pass under each sequence's stop rules; returns the tokens that count."""
    committed = []
    for index, (sequence, proposal, verdict) in enumerate(zip(sequences, proposals, judged.verdicts, strict=True)):
        run = (*(proposal.tokens[node] for node in verdict.path), verdict.next_token)
        tokens = _commit_one(sequence, run, index, (ROOT, *verdict.path), judged.laws)
        if machinery.drafter is not None:
            machinery.drafter.observe(sequence.key, sequence.tokens, len(tokens))
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


def _pack(
    sequences: Sequence[LiveSequence], proposals: Sequence[Proposal], bases: Sequence[int], target: Target
) -> PackedRows:
    trees = [None if p.is_chain else (ROOT, *(parent + 1 for parent in p.parents)) for p in proposals]
    return PackedRows.pack(
        [(s.tokens[-1], *p.tokens) for s, p in zip(sequences, proposals, strict=True)],
        slots=[s.slot for s in sequences],
        starts=bases,
        parents=trees,
        device=target.spec.device,
    )
