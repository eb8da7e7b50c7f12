"""The scheduler on a device: requests that come and go while others decode, against each of them decoded plainly alone.

Every situation also has to happen (a preemption where memory is short, a reused prefix where a prompt comes again), and
when it is over no cache may be in use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_subject import OUT_OF_TIME, Clock, Size, Subject, compared, params_of
from outrider.drafters.base import Drafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.memory import CacheMemory
from outrider.engine.result import GenerationResult
from outrider.types import FinishReason

__all__ = ["SITUATIONS", "Situation", "check_scheduler"]

_CANCEL_AFTER = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What happens to the requests.

    Attributes:
        name: said in tables. drafter: see :class:`benchmarks.gpu_subject.Subject`.
        options: of the engine. every: steps from one arrival to the next; 0: all come at once.
        is_tight: there is memory for all prompts, and for half of the answers.
        cancels: every third request is cancelled a few steps after it came.
        times: how often each prompt comes, the next time when all requests have ended.
        expects: counter of the engine's statistics that must not be 0 in the end; empty: none.
        path: only where the target's path has this in its name. Slabs give room in large pieces, so that short answers
            never outgrow theirs; pages are what sequences compete for.
    """

    name: str
    drafter: str
    options: Mapping[str, Any] = field(default_factory=dict)
    every: int = 3
    is_tight: bool = False
    cancels: bool = False
    times: int = 1
    expects: str = ""
    path: str = ""


_TREE = "merged:HEAD:num_nodes=8"
SITUATIONS = (
    Situation(name="they arrive one by one", drafter=_TREE),
    Situation(
        name="prompts are read in small chunks", drafter="suffix", options={"prefill_while_decoding": 16}, every=1
    ),
    Situation(
        name="memory for a part of them",
        drafter="HEAD:depth=3,width=2,num_nodes=6",
        options={"prefill_chunk": 4096, "prefill_while_decoding": 4096},
        every=0,
        is_tight=True,
        expects="num_preemptions",
        path="paged",
    ),
    Situation(name="every third is cancelled", drafter=_TREE, cancels=True),
    Situation(name="each prompt comes twice", drafter="suffix", times=2, expects="reused_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    """What came of a situation."""

    results: dict[str, GenerationResult]
    stats: dict[str, Any]
    bytes_left: int
    costs: dict[str, Any]
    seconds: float


def check_scheduler(
    plain: Mapping[str, Mapping[str, GenerationResult]],
    subject: Subject,
    prompts: Mapping[str, list[int]],
    size: Size,
    tolerance: float,
    clock: Clock,
) -> list[dict[str, Any]]:
    """One row a situation.

    Args:
        plain: by kind (``greedy``, ``seeded``) and prompt id: decoded plainly, alone.
        subject: what schedules. prompts: by id. size, tolerance: as in the identity grid. clock: of the whole check.
    """
    rows: list[dict[str, Any]] = []
    for situation in [each for each in SITUATIONS if each.path in subject.target.spec.path]:
        row = {"path": subject.target.spec.path, "situation": situation.name, "drafter": situation.drafter}
        if clock.is_over:
            rows.append(row | {"verdict": OUT_OF_TIME})
            continue
        played = _play(subject, situation, list(plain), prompts, size)
        rows.append(row | _judged(situation, played, plain, prompts, subject, size, tolerance))
    return rows


def _play(
    subject: Subject, situation: Situation, kinds: Sequence[str], prompts: Mapping[str, list[int]], size: Size
) -> _Played:
    drafter = subject.drafter(situation.drafter)
    options: dict[str, Any] = {"num_draft_tokens": size.num_draft_tokens, **situation.options}
    if situation.is_tight:
        options["cache_memory_gb"] = _tight_bytes(subject, drafter, len(kinds), prompts, size) / 1e9
    engine = Engine(subject.target, drafter=drafter, config=EngineConfig.from_dict(options))
    begun = time.perf_counter()
    results: dict[str, GenerationResult] = {}
    for turn in range(situation.times):
        asks = [(f"{kind}/{turn}/{id}", kind, ids) for id, ids in prompts.items() for kind in kinds]
        cancel_at: dict[str, int] = {}
        num_asks, step = len(asks), 0
        while asks or engine.has_work:
            while asks and (not situation.every or step >= situation.every * (num_asks - len(asks))):
                id, kind, ids = asks.pop(0)
                engine.submit(ids, params_of(kind, size.tokens), id=id)
                if situation.cancels and len(asks) % 3 == 0:
                    cancel_at[id] = step + _CANCEL_AFTER
            for id in [id for id, when in cancel_at.items() if when == step]:
                engine.cancel(id)
            results |= {event.id: event.result for event in engine.step() if event.result is not None}
            step += 1
    seconds, stats = time.perf_counter() - begun, engine.stats().to_json()
    engine.clear_prefixes()
    return _Played(
        results=results,
        stats=stats,
        bytes_left=engine.cache_bytes_in_use,
        costs=engine.planner.costs.to_json(),
        seconds=seconds,
    )


def _tight_bytes(
    subject: Subject, drafter: Drafter | None, times: int, prompts: Mapping[str, list[int]], size: Size
) -> int:
    """Bytes for every prompt with half of its answer, and for one with all of it."""
    memory = CacheMemory(subject.target.new_cache(), drafter)
    half = times * sum(memory.cost(len(ids) + size.tokens // 2) for ids in prompts.values())
    return max(half, max(memory.cost(len(ids) + size.tokens) for ids in prompts.values()))


def _judged(
    situation: Situation,
    played: _Played,
    plain: Mapping[str, Mapping[str, GenerationResult]],
    prompts: Mapping[str, list[int]],
    subject: Subject,
    size: Size,
    tolerance: float,
) -> dict[str, Any]:
    cancelled = [id for id, result in played.results.items() if result.finish_reason is FinishReason.CANCELLED]
    triples = []
    for name, result in played.results.items():
        kind, _, id = name.split("/", 2)
        if name not in cancelled:
            triples.append((kind, (prompts[id], plain[kind][id], result)))
    row = compared(subject.target, triples, size.tokens, tolerance)
    stats = played.stats
    row |= {
        "cancelled": len(cancelled),
        "tokens_per_s": round(stats["output_tokens"] / played.seconds, 1),
        "costs": played.costs,
        **{name: stats[name] for name in ("num_preemptions", "reused_tokens", "num_failed")},
    }
    asked = situation.times * len(prompts) * len(plain)
    if played.bytes_left or stats["num_failed"] or len(played.results) != asked:
        row["verdict"] = (
            f"broken: {played.bytes_left} bytes left, {stats['num_failed']} failed, {len(played.results)} of {asked} ended"
        )
    elif (situation.expects and not stats[situation.expects]) or (situation.cancels and not cancelled):
        row["verdict"] = f"did not happen: {situation.name}"
    return row
