"""One running choice of one request: its tokens, its slot in the cache, its sampling history and its record."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.result import GenerationResult, StreamEvent, Timing, Usage
from outrider.engine.speculation import DEFAULT_SPECULATION, SpeculationParams
from outrider.engine.stop import OutputText, StopRules
from outrider.metrics import SpeculationStats
from outrider.sampling.grammar import Grammar
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.types import DraftMode, FinishReason, StepReport, TokenLogprobs

__all__ = ["BROKEN_GRAMMAR", "NO_SLOT", "LiveSequence", "Request"]

BROKEN_GRAMMAR = "structured_outputs met a limit on what a grammar may cost"
"""How the error of a choice begins whose grammar was not to be followed any further."""
NO_SLOT = -1
"""The slot of a sequence that has no cache: it waits, or was put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request: a prompt as token ids, resolved sampling fields, and its own wishes for speculation.

    Attributes:
        scope: whose it is; only requests of one scope share cached prefixes and remembered texts.
        priority: smaller is more urgent.
        number: in order of arrival.
        grammar: the compiled constraint that each choice must match.
        prediction: tokens of the text that the output may repeat; none: empty.
        speculation: how it may be drafted for.
        submitted, deadline: times of ``time.perf_counter``; past the deadline it ends with what it has.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    scope: str | None = None
    priority: int = 0
    number: int = 0
    grammar: Grammar | None = None
    prediction: tuple[int, ...] = ()
    speculation: SpeculationParams = DEFAULT_SPECULATION
    submitted: float = field(default_factory=time.perf_counter)
    deadline: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """A choice that is being decoded.

    The cache always holds every token but the last committed one, whose row opens the next pass.

    Attributes:
        key: unique id within the engine; what drafters know the sequence by.
        tokens: prompt and committed output.
        slot: the sequence's slot in the target's cache.
        room: tokens that its cache may hold.
        started, first_token, finished: times; 0 until then.
        num_preemptions: how often it was put back for want of memory.
        num_delivered: output tokens that events have handed out.
        is_followed: the drafter knows it; is_suspended: and has given its memory back.
        error: what went wrong, if it ended with reason ``error``.
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
    room: int = 1 << 30
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    num_preemptions: int = 0
    num_delivered: int = 0
    is_followed: bool = False
    is_suspended: bool = False
    error: str = ""

    def __post_init__(self) -> None:
        if self.request.grammar is not None:
            self.state.constrain(GrammarMatcher(self.request.grammar))

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
    def seniority(self) -> tuple[int, int, int]:
        """Sorts the most urgent first, then the oldest: who is put back last."""
        return self.request.priority, self.request.number, self.index

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def speculation(self) -> SpeculationParams:
        return self.request.speculation

    @property
    def most_drafts(self) -> int:
        """Deepest draft that could still be committed beside its correction or bonus token, and that the cache can hold."""
        size = len(self.tokens)
        return min(self.stop.limit + len(self.request.prompt) - 1, self.room) - size

    @property
    def most_nodes(self) -> int:
        """Draft nodes that the cache has room for, behind the root."""
        return self.room - len(self.tokens)

    def draft_mode(self, verification: str) -> DraftMode:
        """How a drafter with a law of its own must choose for this request (laws 5 to 7)."""
        if self.params.is_greedy:
            return DraftMode.GREEDY
        if self.params.seed is not None or verification == "compare":
            return DraftMode.SHARED
        return DraftMode.DRAWN

    def judge(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """How many of the tokens count under the stop rules, and why the output ended, if it did.

        An output that its grammar completes has stopped, whatever limit it reached with that token.
        """
        end = None if self.state.grammar is None else self.state.grammar.end_of(tokens)
        if end is None:
            return self.stop.scan(tokens, num_output=self.num_output, text=self.text)
        count, reason = self.stop.scan(tokens[: end.num_tokens], num_output=self.num_output, text=self.text)
        if count < end.num_tokens:
            return count, reason
        return count, FinishReason.ERROR if end.is_broken else FinishReason.STOP

    def append(self, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        """Commit tokens that count."""
        if not self.first_token:
            self.first_token = time.perf_counter()
        self.tokens.extend(tokens)
        self.state.commit(tokens)
        if reason is not None:
            self.end(reason)

    def end(self, reason: FinishReason) -> None:
        """Mark as ended."""
        self.finish_reason = reason
        self.finished = time.perf_counter()
        if reason is FinishReason.ERROR:
            self.error = f"{BROKEN_GRAMMAR} behind {self.num_output} tokens; make the constraint smaller or simpler"
        self.text.finish()

    def end_early(self, reason: FinishReason) -> None:
        """End it for a reason that is not in its text."""
        try:
            self.end(reason)
        except AssertionError:
            raise
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Mark as ended by a fault: what was committed before stays."""
        self.finish_reason = FinishReason.ERROR
        self.finished = time.perf_counter()
        self.error = " ".join(f"{type(error).__name__}: {error}".split())
        self.text.abandon()

    def record(self, report: StepReport) -> None:
        """Keep the record of one pass."""
        self.steps.append(report)
        self.stats.add(report)

    def event(self, report: StepReport | None, *, drafter: str, settings: dict[str, Any]) -> StreamEvent:
        """What was added since the last event, with the result if it was the last one."""
        tokens = tuple(self.tokens[self.num_prompt + self.num_delivered :])
        self.num_delivered += len(tokens)
        result = self.result(drafter=drafter, settings=settings) if self.finish_reason is not None else None
        return StreamEvent(
            id=self.request.id,
            index=self.index,
            text=self.text.take(),
            token_ids=tokens,
            report=report,
            result=result,
            logprobs=None if self.logprobs is None else tuple(self.logprobs[len(self.logprobs) - len(tokens) :]),
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
            num_preemptions=self.num_preemptions,
            error=self.error,
        )

    def _timing(self) -> Timing:
        prefill = sum(s.draft_ms + s.verify_ms + s.other_ms for s in self.steps if s.is_prefill)
        decode = [s for s in self.steps if not s.is_prefill]
        return Timing(
            prefill=prefill,
            draft=sum(s.draft_ms for s in decode),
            verify=sum(s.verify_ms for s in decode),
            other=sum(s.other_ms for s in decode),
            queue=self._since_submitted(self.started or self.finished),
            first_token=self._since_submitted(self.first_token) if self.first_token else None,
            total=self._since_submitted(self.finished),
        )

    def _since_submitted(self, moment: float) -> float:
        return (moment - self.request.submitted) * 1e3
