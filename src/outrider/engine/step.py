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

Behind these rows come parts of texts that are being read, a prompt's or that of a sequence that was put back. Only the
very last row of such a text gives a law: it is the root of everybody who goes on from there, and nobody drafts there yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.cache.base import Cache
from outrider.device import synchronize
from outrider.drafters.base import Drafter
from outrider.engine.commit import commit
from outrider.engine.drafting import draft
from outrider.engine.judge import judge
from outrider.engine.planner import Planner
from outrider.engine.reading import Chunk, teach
from outrider.engine.report import PassCost, count_reading, prefill_cost, report_of
from outrider.engine.sequence import LiveSequence
from outrider.engine.taps import hand_over, wanted_taps
from outrider.models.base import PackedRows, Target
from outrider.types import NO_DRAFT, ROOT, Proposal, StepReport

__all__ = ["Machinery", "decode_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What a step works with."""

    target: Target
    cache: Cache
    drafter: Drafter | None
    verification: str


def decode_step(
    machinery: Machinery, planner: Planner, sequences: Sequence[LiveSequence], chunks: Sequence[Chunk] = ()
) -> list[StepReport]:
    """Decode one step of all sequences together, and read parts of other texts in the same pass.

    Args:
        machinery: target, cache, drafter.
        planner: says who drafts, and learns what came of it.
        sequences: running sequences, each with one uncached token.
        chunks: parts of texts that are being read.

    Returns:
        One report a sequence, already recorded on it; then one for each sequence that took its first token.
    """
    target, cache, drafter = machinery.target, machinery.cache, machinery.drafter
    begun = time.perf_counter()
    num_read = sum(len(chunk.tokens) for chunk in chunks)
    plan, proposals = draft(drafter, planner, sequences, machinery.verification, num_other_rows=num_read)
    drafted = time.perf_counter()
    bases = [cache.length(s.slot) for s in sequences]
    rows, first_rows = _pack(sequences, proposals, bases, chunks, target)
    everybody = [*sequences, *(taker for chunk in chunks for taker in chunk.sequences)]
    proposals += [NO_DRAFT] * (len(everybody) - len(sequences))
    listeners = [planner.wants_taps(sequence) for sequence in sequences]
    taps = wanted_taps(drafter) if chunks or any(listeners) else ()
    judged = judge(target, cache, rows, sequences=everybody, proposals=proposals, first_rows=first_rows, taps=taps)
    synchronize(target.spec.device)
    verified = time.perf_counter()
    committed = commit(drafter, everybody, proposals, judged)
    for sequence, base, verdict, tokens in zip(sequences, bases, judged.verdicts, committed, strict=False):
        cache.keep(sequence.slot, base=base, path=(0, *(node + 1 for node in verdict.path[: len(tokens)])))
    parts = rows.segments[len(sequences) :]
    if any(listeners):
        keys = [s.key if listens else None for s, listens in zip(sequences, listeners, strict=True)]
        hand_over(drafter, keys, rows.segments, bases, judged.verdicts, judged.taps)
    teach(drafter, chunks, parts, judged.taps)
    cost = PassCost(
        draft_ms=(drafted - begun) * 1e3,
        verify_ms=(verified - drafted) * 1e3,
        other_ms=(time.perf_counter() - verified) * 1e3,
        batch_size=len(everybody),
        rows=len(rows.tokens_R),
        prefill_rows=sum(part.num_rows for part in parts),
    )
    for chunk in chunks:
        count_reading(chunk.ticket, len(chunk.tokens), cost)
    costs = [cost] * len(sequences) + [prefill_cost(c.ticket, cost) for c in chunks for _ in c.sequences]
    planned = [ask.depth for ask in plan.asks] + [0] * (len(everybody) - len(sequences))
    passed = zip(proposals, judged.verdicts, committed, costs, planned, strict=True)
    reports = [report_of(*entry) for entry in passed]
    for sequence, report in zip(everybody, reports, strict=True):
        sequence.record(report)
    planner.learn(plan, sequences, proposals[: len(sequences)], reports[: len(sequences)])
    return reports


def _pack(
    sequences: Sequence[LiveSequence],
    proposals: Sequence[Proposal],
    bases: Sequence[int],
    chunks: Sequence[Chunk],
    target: Target,
) -> tuple[PackedRows, list[int]]:
    """The rows of the pass, and where among those with laws each root is."""
    trees = [None if p.is_chain else (ROOT, *(parent + 1 for parent in p.parents)) for p in proposals]
    rows = PackedRows.pack(
        [*((s.tokens[-1], *p.tokens) for s, p in zip(sequences, proposals, strict=True)), *(c.tokens for c in chunks)],
        slots=[*(s.slot for s in sequences), *(c.ticket.slot for c in chunks)],
        starts=[*bases, *(c.start for c in chunks)],
        parents=[*trees, *(None for _ in chunks)],
        device=target.spec.device,
    )
    roots = [segment.start for segment in rows.segments[: len(sequences)]]
    if not chunks:
        return rows, roots
    parts = rows.segments[len(sequences) :]
    ends = [part.start + part.num_rows - 1 for part, chunk in zip(parts, chunks, strict=True) if chunk.is_last]
    takers = [len(chunk.sequences) for chunk in chunks if chunk.is_last]
    first = parts[0].start
    roots += [first + place for place, count in enumerate(takers) for _ in range(count)]
    return replace(rows, logit_rows=(*range(first), *ends)), roots
