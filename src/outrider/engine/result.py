"""What a request gives back. Names are those of the command line's ``--json``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.metrics import SpeculationStats
from outrider.types import FinishReason, StepReport, TokenLogprobs

__all__ = ["GenerationResult", "StreamEvent", "Timing", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts: prompt as rendered, completion as delivered (stop token ids count, stop strings' text does not)."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds: ``draft`` + ``verify`` + ``other`` + ``prefill`` of the passes this sequence took part in.

    ``queue``, ``first_token`` and ``total`` count from submission: until its prompt began to be read, until its first
    token was committed (``None`` if there is none), until it ended.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    queue: float = 0.0
    first_token: float | None = None
    total: float = 0.0

    def to_json(self) -> dict[str, float | None]:
        names = ("prefill", "draft", "verify", "other", "queue", "first_token", "total")
        values = ((name, getattr(self, name)) for name in names)
        return {name: None if value is None else round(value, 3) for name, value in values}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One finished choice.

    Attributes:
        id: the request's id; index: which of its ``n`` choices.
        text: decoded output, cut before a stop string; token_ids: output ids, the stopping token included.
        steps: the record of every pass, prefill first.
        settings: everything resolved (target, drafter, precision, sampling, engine), as JSON values.
        num_preemptions: how often it was put back for want of memory and read again.
        error: what went wrong; empty unless ``finish_reason`` is ``error``.
    """

    id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    stats: SpeculationStats
    timing: Timing
    drafter: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    steps: tuple[StepReport, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    num_preemptions: int = 0
    error: str = ""

    @property
    def speculation(self) -> dict[str, object]:
        """Counts and rates of this choice (docs/glossary.md)."""
        return self.stats.to_json(self.drafter)

    def to_json(self) -> dict[str, Any]:
        """The object that ``outrider generate --json`` prints."""
        out: dict[str, Any] = {
            "id": self.id,
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason.value,
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
            },
        }
        if self.logprobs is not None:
            out["logprobs"] = [
                {"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
                for entry in self.logprobs
            ]
        if self.error:
            out["error"] = self.error
        out["num_preemptions"] = self.num_preemptions
        out["speculation"] = self.speculation
        out["timing_ms"] = self.timing.to_json()
        out["settings"] = self.settings
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """A piece of a running choice: text that will never change again, the tokens committed since the last event.

    The last event of a choice carries its ``result``; joined ``text`` of all events equals ``result.text``, joined
    ``logprobs`` (``None`` if none were asked for) ``result.logprobs``.
    """

    id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    report: StepReport | None = None
    result: GenerationResult | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
