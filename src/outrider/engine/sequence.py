"""One running choice of one request: its tokens, its slot in the cache, its sampling history and its record."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.result import GenerationResult, StreamEvent, Timing, Usage
from outrider.engine.speculation import DEFAULT_SPECULATION, SpeculationParams
from outrider.engine.stop import OutputText, StopRules
from outrider.metrics import SpeculationStats
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.types import DraftMode, FinishReason, StepReport, TokenLogprobs

__all__ = ["LiveSequence", "Request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request: a prompt as token ids, resolved sampling fields, and its own wishes for speculation."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    speculation: SpeculationParams = DEFAULT_SPECULATION
    submitted: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """A choice that is being decoded.

    The cache always holds every token but the last committed one, whose row opens the next pass.

    Attributes:
        key: unique id within the engine; what drafters know the sequence by.
        tokens: prompt and committed output.
        slot: the sequence's slot in the target's cache.
    """

    key: int
    request: Request
    index: int
    tokens: list[int]
    slot: int
    state: SamplingState
    stop: StopRules
    text: OutputText
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    steps: list[StepReport] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    finished: float = 0.0

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def speculation(self) -> SpeculationParams:
        return self.request.speculation

    @property
    def most_drafts(self) -> int:
        """Deepest draft that could still be committed beside its correction or bonus token."""
        return self.stop.limit - self.num_output - 1

    def draft_mode(self, verification: str) -> DraftMode:
        """How a drafter with a law of its own must choose for this request (laws 5 to 7)."""
        if self.params.is_greedy:
            return DraftMode.GREEDY
        if self.params.seed is not None or verification == "compare":
            return DraftMode.SHARED
        return DraftMode.DRAWN

    def judge(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """How many of the tokens count under the stop rules, and why the output ended, if it did."""
        return self.stop.scan(tokens, num_output=self.num_output, text=self.text)

    def append(self, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        """Commit tokens that count."""
        self.tokens.extend(tokens)
        self.state.commit(tokens)
        if reason is not None:
            self.end(reason)

    def end(self, reason: FinishReason) -> None:
        """Mark as ended."""
        self.finish_reason = reason
        self.finished = time.perf_counter()
        self.text.finish()

    def record(self, report: StepReport) -> None:
        """Keep the record of one pass."""
        self.steps.append(report)
        self.stats.add(report)

    def event(self, report: StepReport | None, *, drafter: str, settings: dict[str, Any]) -> StreamEvent:
        """What the last pass added, with the result if it was the last one."""
        tokens = () if report is None else report.tokens
        result = self.result(drafter=drafter, settings=settings) if self.finish_reason is not None else None
        return StreamEvent(
            id=self.request.id,
            index=self.index,
            text=self.text.take(),
            token_ids=tokens,
            report=report,
            result=result,
        )

    def result(self, *, drafter: str, settings: dict[str, Any]) -> GenerationResult:
        """The finished choice."""
        assert self.finish_reason is not None, "the sequence is still running"
        return GenerationResult(
            id=self.request.id,
            index=self.index,
            text=self.text.text,
            token_ids=tuple(self.tokens[self.num_prompt :]),
            finish_reason=self.finish_reason,
            usage=Usage(prompt_tokens=self.num_prompt, completion_tokens=self.num_output),
            stats=self.stats,
            timing=self._timing(),
            drafter=drafter,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            steps=tuple(self.steps),
            settings=settings,
        )

    def _timing(self) -> Timing:
        prefill = sum(s.draft_ms + s.verify_ms + s.other_ms for s in self.steps if s.is_prefill)
        decode = [s for s in self.steps if not s.is_prefill]
        return Timing(
            prefill=prefill,
            draft=sum(s.draft_ms for s in decode),
            verify=sum(s.verify_ms for s in decode),
            other=sum(s.other_ms for s in decode),
            total=(self.finished - self.request.submitted) * 1e3,
        )
