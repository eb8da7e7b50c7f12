"""What an engine is doing now, and what it has done: a snapshot for metrics, logs and the server's page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.engine.result import GenerationResult
from outrider.engine.scheduler import PassPlan, Scheduler
from outrider.types import FinishReason, StepReport

__all__ = ["EngineStats", "Meter", "retry_after_s"]

WINDOW_S = 10.0
"""Rates are those of the last so many seconds."""
LONGEST_RETRY_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot.

    Attributes:
        running: sequences that are decoded; reading: whose text is being read; put_back: whose memory was taken for others.
        waiting: requests that were never started.
        num_preemptions: how often a sequence was put back, ever.
        num_finished, num_failed: choices that ended, ever, and those of them that ended by a fault.
        num_refused: requests refused because the queue was full.
        prompt_tokens, recomputed_tokens: tokens read, ever, and those of them that had been computed before.
        reused_tokens: tokens taken over from cached prefixes.
        output_tokens: committed, ever; tokens_per_s: in the last seconds.
        queue_ms: mean time from submission to the first token read, of choices that ended in the last seconds.
        first_token_ms: the same up to the first token.
        cache_bytes_in_use, cache_bytes_budget: keys and values of everybody, prefixes included, and their limit.
        num_prefixes, prefix_bytes: cached prefixes, and their part of the bytes in use.
        is_draining: nothing new is taken.
    """

    running: int = 0
    reading: int = 0
    waiting: int = 0
    put_back: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    tokens_per_s: float = 0.0
    queue_ms: float | None = None
    first_token_ms: float | None = None
    cache_bytes_in_use: int = 0
    cache_bytes_budget: int = 0
    num_prefixes: int = 0
    prefix_bytes: int = 0
    is_draining: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(slots=True)
class _Recent:
    """Values of the last seconds and their sum, kept up to date: a pass must not pay for long lists."""

    values: deque[tuple[float, float]] = field(default_factory=deque)
    total: float = 0.0

    def add(self, now: float, value: float) -> None:
        self.values.append((now, value))
        self.total += value

    def forget(self, oldest: float) -> None:
        while self.values and self.values[0][0] < oldest:
            self.total -= self.values.popleft()[1]
        if not self.values:
            self.total = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / len(self.values) if self.values else None


class Meter:
    """Sums for :class:`EngineStats`.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = clock()
        self._tokens, self._queue_ms, self._first_ms = _Recent(), _Recent(), _Recent()
        self._num_finished = self._num_failed = 0
        self._prompt_tokens = self._recomputed_tokens = self._output_tokens = 0

    def add_pass(self, plan: PassPlan, reports: Sequence[StepReport]) -> None:
        """A pass is done."""
        for chunk in plan.chunks:
            self._prompt_tokens += len(chunk.tokens)
            self._recomputed_tokens += len(chunk.tokens) if chunk.ticket.was_put_back else 0
        count = sum(len(report.tokens) for report in reports)
        self._output_tokens += count
        self._tokens.add(self._clock(), count)

    def add_end(self, result: GenerationResult) -> None:
        """A choice ended."""
        now, timing = self._clock(), result.timing
        self._num_finished += 1
        self._num_failed += result.finish_reason is FinishReason.ERROR
        self._queue_ms.add(now, timing.queue)
        if timing.first_token is not None:
            self._first_ms.add(now, timing.first_token)

    @property
    def ends_per_s(self) -> float:
        """Choices that ended, of the last seconds."""
        return len(self._queue_ms.values) / self._span()

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        """All of it, beside where everybody is now."""
        oldest = self._clock() - WINDOW_S
        for recent in (self._tokens, self._queue_ms, self._first_ms):
            recent.forget(oldest)
        return EngineStats(
            running=len(scheduler.running),
            reading=sum(len(ticket.sequences) for ticket in scheduler.reading),
            put_back=sum(len(ticket.sequences) for ticket in scheduler.put_back),
            waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            prompt_tokens=self._prompt_tokens,
            recomputed_tokens=self._recomputed_tokens,
            reused_tokens=scheduler.num_reused_tokens,
            output_tokens=self._output_tokens,
            tokens_per_s=self._tokens.total / self._span(),
            queue_ms=self._queue_ms.mean,
            first_token_ms=self._first_ms.mean,
            cache_bytes_in_use=scheduler.memory.in_use,
            cache_bytes_budget=scheduler.memory.budget_bytes,
            num_prefixes=len(scheduler.prefixes),
            prefix_bytes=scheduler.prefixes.num_bytes,
        )

    def _span(self) -> float:
        return min(WINDOW_S, max(self._clock() - self._begun, 1e-3))


def retry_after_s(num_waiting: int, ends_per_s: float) -> float:
    """When a quarter of those that wait should have been started, if choices go on ending as they do now."""
    wished = (1 + num_waiting / 4) / ends_per_s if ends_per_s else 1.0
    return min(max(1.0, wished), LONGEST_RETRY_S)
