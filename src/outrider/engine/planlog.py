"""What the planner decided and what came of it: a bounded log of steps, and counters since the start."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PlanCounters", "PlanLog", "PlanRecord"]

LENGTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """One decode step of the whole batch.

    Attributes:
        step: number since the start.
        batch_size: sequences; context: their cached tokens on average.
        asked: sequences whose drafter was asked, by drafter.
        nodes: draft nodes that went into the pass; left_out: nodes that were drafted and did not pay.
        tries: sequences that were asked to learn, not to gain.
        predicted_ms, predicted_tokens: of the step as decided; observed_ms, tokens: what it took and committed.
        plain_ms: what a step without drafts was predicted to take.
    """

    step: int
    batch_size: int
    context: int
    asked: dict[str, int]
    nodes: int
    left_out: int
    tries: int
    predicted_ms: float
    predicted_tokens: float
    observed_ms: float
    tokens: int
    plain_ms: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, milliseconds to the microsecond."""
        values = asdict(self)
        for name in ("predicted_ms", "predicted_tokens", "observed_ms", "plain_ms"):
            values[name] = round(values[name], 3)
        return values


@dataclass(slots=True, kw_only=True)
class PlanCounters:
    """Sums since the start.

    Attributes:
        steps: decode steps; drafted_steps: those with at least one draft node.
        sequences: sequence passes; drafted_sequences: those with at least one draft node.
        nodes: draft nodes verified; left_out: drafted, but not worth a row.
        tries: sequence passes that drafted to learn.
        tokens: committed; predicted_tokens, predicted_ms, observed_ms: sums of the log's columns.
        asked: sequence passes by drafter asked.
    """

    steps: int = 0
    drafted_steps: int = 0
    sequences: int = 0
    drafted_sequences: int = 0
    nodes: int = 0
    left_out: int = 0
    tries: int = 0
    tokens: int = 0
    predicted_tokens: float = 0.0
    predicted_ms: float = 0.0
    observed_ms: float = 0.0
    asked: dict[str, int] = field(default_factory=dict)


class PlanLog:
    """The last :data:`LENGTH` records, and their sums for ever."""

    def __init__(self) -> None:
        self.records: deque[PlanRecord] = deque(maxlen=LENGTH)
        self.counters = PlanCounters()

    def add(self, record: PlanRecord, drafted_sequences: int) -> None:
        """One step, of which so many sequences brought drafts."""
        total = self.counters
        self.records.append(record)
        total.steps += 1
        total.drafted_steps += drafted_sequences > 0
        total.sequences += record.batch_size
        total.drafted_sequences += drafted_sequences
        total.nodes += record.nodes
        total.left_out += record.left_out
        total.tries += record.tries
        total.tokens += record.tokens
        total.predicted_tokens += record.predicted_tokens
        total.predicted_ms += record.predicted_ms
        total.observed_ms += record.observed_ms
        for name, count in record.asked.items():
            total.asked[name] = total.asked.get(name, 0) + count
