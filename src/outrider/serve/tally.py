"""What the server has done so far, in plain counts that one thread writes and everybody may read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.engine.result import GenerationResult, StreamEvent
from outrider.metrics import SpeculationStats
from outrider.types import StepReport

__all__ = ["BUCKETS_S", "TOKEN_BUCKETS_S", "Histogram", "Tally", "cached_tokens"]

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


@dataclass(slots=True)
class Histogram:
    """Counts of durations by bucket, as Prometheus wants them; ``edges_s`` are the buckets' upper ends."""

    edges_s: tuple[float, ...] = BUCKETS_S
    buckets: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.buckets = self.buckets or [0] * (len(self.edges_s) + 1)

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        index = next((i for i, edge in enumerate(self.edges_s) if seconds <= edge), len(self.edges_s))
        self.buckets[index] += 1
        self.total += seconds


@dataclass(slots=True)
class Tally:
    """Counts since the start.

    Attributes:
        speculation: pooled over everything decoded.
        prompt_tokens, cached_prompt_tokens, generated_tokens: token counts; cached ones were not read again.
        passes: target passes, prefill left out; a pass of many sequences is one.
        drafts: how often a sequence's step had this many draft tokens (0: decoded plainly).
        finished: choices by reason; requests by (path, status).
        waiting, running: requests that wait for their first token, choices that are being decoded.
        refused, cancelled, faults: requests refused for want of room, dropped by their owner, failing steps.
        first_token, duration: seconds to the first token and to the end of a choice.
        per_token: seconds between two tokens of a choice behind its first, the mean of each choice.
    """

    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    pass_ms: float = 0.0
    drafts: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    waiting: int = 0
    running: int = 0
    refused: int = 0
    cancelled: int = 0
    faults: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    duration: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=lambda: Histogram(edges_s=TOKEN_BUCKETS_S))
    mean_request_s: float = 1.0

    def count(self, events: Iterable[StreamEvent]) -> None:
        """Count the events of one step."""
        decoded: StepReport | None = None
        for event in events:
            if event.report is not None:
                self._count_report(event.report)
                decoded = decoded if event.report.is_prefill else event.report
            if event.result is not None:
                self._count_result(event.result)
        if decoded is not None:
            self.passes += 1
            self.pass_ms += decoded.draft_ms + decoded.verify_ms + decoded.other_ms

    def _count_report(self, report: StepReport) -> None:
        self.speculation.add(report)
        self.generated_tokens += len(report.tokens)
        if not report.is_prefill:
            self.drafts[report.drafted if report.drafter else 0] += 1

    def _count_result(self, result: GenerationResult) -> None:
        self.finished[result.finish_reason.value] += 1
        seconds = result.timing.total / 1e3
        self.duration.observe(seconds)
        first, later = result.timing.first_token, result.usage.completion_tokens - 1
        if first is not None and later > 0:
            self.per_token.observe((seconds - first / 1e3) / later)
        self.mean_request_s += 0.1 * (seconds - self.mean_request_s)
        if result.index == 0:
            self.prompt_tokens += result.usage.prompt_tokens
            self.cached_prompt_tokens += cached_tokens(result)


def cached_tokens(result: GenerationResult) -> int:
    """Prompt tokens that were not read again, since the cache of an earlier request held them."""
    read = sum(step.rows for step in result.steps if step.is_prefill)
    return max(0, result.usage.prompt_tokens - read) if read else 0
