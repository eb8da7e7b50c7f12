"""One step's plan: who is asked how deep, what that may gain, and what the calls took."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from outrider.engine.speculation import SpeculationParams

__all__ = ["NO_ASK", "Ask", "Call", "Plannable", "StepPlan", "ask_for"]


class Plannable(Protocol):
    """What the planner reads of a running sequence; :class:`outrider.engine.sequence.LiveSequence` is one."""

    @property
    def key(self) -> int: ...
    @property
    def most_drafts(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def speculation(self) -> SpeculationParams: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """Which drafter is asked, and how deep; depth 0: none."""

    depth: int = 0
    drafter: str = ""


NO_ASK = Ask()
ask_for = cache(Ask)
"""The same, made once for each depth and drafter: most steps ask for what the last one asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a drafter as it went.

    Attributes:
        depth: deepest draft that came back, as far as depth takes time.
        num_read: committed tokens that it had to read first.
        ms: its time.
    """

    drafter: str
    num_sequences: int
    depth: int
    num_read: int
    ms: float


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """Grows while a step is planned (:class:`outrider.engine.planner.Planner`).

    Attributes:
        asks: of each sequence, who was asked how deep.
        gains: tokens expected of each sequence's drafts, as far as decided.
        num_rows: packed rows expected. num_other_rows: those of prompts among them.
        context: cached tokens of a sequence on average.
        plain_ms: predicted time of the step without drafts and prompts; prompts take ``other_ms`` more.
        caps: deepest draft that each sequence allows. is_nap: nobody is asked, as nobody was worth asking a moment ago.
        calls: of drafters.
        silent: (sequence, drafter) that were asked and had nothing, where another's drafts are verified instead.
        tried: sequences that were asked to learn. left_out: nodes that were drafted and did not pay.
        predicted_ms: of the step as decided.
    """

    asks: list[Ask]
    gains: list[float]
    num_rows: float
    context: float
    plain_ms: float
    num_other_rows: int = 0
    other_ms: float = 0.0
    caps: list[int] = field(default_factory=list)
    is_nap: bool = False
    calls: list[Call] = field(default_factory=list)
    silent: list[tuple[int, str]] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    left_out: int = 0
    predicted_ms: float = 0.0
