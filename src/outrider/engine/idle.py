"""What idling costs and may cost: the purse that tries are paid from, steps that go without drafts to be timed, and hidden
states that nobody reads."""

from __future__ import annotations

from outrider.engine.beliefs import Own
from outrider.engine.planlog import PlanRecord

__all__ = [
    "FIRST_PURSE",
    "HOPELESS",
    "HOPELESS_SHARE",
    "LAPSE",
    "MOST_PURSE",
    "TRY_SHARE",
    "USE",
    "WARM",
    "Listeners",
    "PlainLooks",
    "Purse",
    "Use",
    "is_ready",
]

TRY_SHARE = 0.012
"""Share of the time that may go into trying drafters that do not pay."""
HOPELESS, HOPELESS_SHARE = 0.05, 0.006
"""Share of the first drafts that are kept below which no model that is of no use is expected to become so soon, and what may
go into trying then."""
FIRST_PURSE, MOST_PURSE = 1.0, 6.0
"""Plain steps' time that the purse holds at first, and at most."""
PLAIN_AFTER, PLAIN_AT_FIRST = 32, 6
"""Steps with drafts, one behind the other, behind which one without is due; and as long as those have hardly been seen."""
LAPSE, WARM = 96, 24
"""Steps without an ask after which a sequence's hidden states are not kept any more, and steps of them that a try needs."""
USE = 8
"""Steps for which a drafter is of use after each in which it drafts for more than a try; they add up to ``LAPSE``."""


class Purse:
    """Milliseconds that may be lost by trying. Every step fills it with a share of its own time, so that this is the most
    that all tries together can cost."""

    def __init__(self) -> None:
        self.ms: float | None = None  # until the first step

    def fill(self, plain_ms: float, *, is_hopeless: bool = False) -> None:
        """A step that takes ``plain_ms`` without drafts begins."""
        held = FIRST_PURSE * plain_ms if self.ms is None else self.ms
        share = min(HOPELESS_SHARE, TRY_SHARE) if is_hopeless else TRY_SHARE
        self.ms = min(held + share * plain_ms, MOST_PURSE * plain_ms)

    def holds(self, price_ms: float) -> bool:
        """True if so much can be paid."""
        return self.ms is not None and price_ms <= self.ms

    def pay(self, price_ms: float) -> bool:
        """Take so much out, if it is there."""
        if self.ms is None or price_ms > self.ms:
            return False
        self.ms -= price_ms
        return True


class PlainLooks:
    """Breaks a long run of steps with drafts now and then: how much faster drafting is must be known from both kinds.

    The more it seems to gain, the more wrong that would have to be to matter, and the seldomer it is looked at, though
    never less than a quarter as often: what seems to gain most may be what is most wrong.
    """

    def __init__(self) -> None:
        self._run, self._speed_up = 0, 1.0

    def count(self, record: PlanRecord) -> None:
        """A step went by."""
        self._run = self._run + 1 if record.nodes else 0
        if record.nodes and record.predicted_ms:
            speed = record.predicted_tokens / record.predicted_ms
            self._speed_up = max(1.0, speed * record.plain_ms / record.batch_size)

    def is_due(self, *, is_known: bool) -> bool:
        """Should the next step go without? ``is_known``: some such were seen lately."""
        return self._run >= (PLAIN_AFTER if is_known else PLAIN_AT_FIRST) * min(self._speed_up**2, 4.0)

    def price_ms(self, plain_ms: float) -> float:
        """What is lost by it."""
        return plain_ms * (1 - 1 / self._speed_up)


def is_ready(own: Own, step: int) -> bool:
    """Can a reader of hidden states be asked? If they lapsed, they are kept again from now on."""
    if not own.has_lapsed:
        return True
    if own.warm_since is None:
        own.warm_since = step
    if step - own.warm_since < WARM:
        return False
    own.has_lapsed, own.warm_since, own.last_asked = False, None, step
    return True


class Use:
    """Whether a drafter is of use: does it draft for anybody, but to learn?"""

    def __init__(self) -> None:
        self._until = LAPSE

    def note(self, step: int) -> None:
        """It does in this step."""
        self._until = min(max(self._until, step) + USE, step + LAPSE)

    def is_recent(self, step: int) -> bool:
        """It did often enough not long ago, or has only begun."""
        return step <= self._until


class Listeners:
    """Whose hidden states are kept for a drafter that reads them.

    While it is of use, those of everybody who was asked for within ``LAPSE`` steps. Keeping them costs every pass
    something, so where nobody has any use for the drafter, no more are kept than tries can make something of: those of one
    new sequence in ``LAPSE`` steps, whose whole text is heard, and those of others for ``WARM`` steps ahead of a try.
    """

    def __init__(self, use: Use) -> None:
        self._use, self._next_new = use, 0

    def admit(self, own: Own, step: int) -> None:
        """Decide about a sequence that begins; nothing where that was done."""
        if not own.is_new:
            return
        own.is_new = False
        own.has_lapsed = step < self._next_new and not self._use.is_recent(step)
        if not own.has_lapsed:
            self._next_new = step + LAPSE

    def note_failure(self, own: Own, step: int) -> None:
        """Nothing of a try was kept."""
        own.has_lapsed = own.has_lapsed or not self._use.is_recent(step)

    def keeps(self, own: Own, step: int) -> bool:
        """Are the hidden states of this step worth keeping?"""
        self.admit(own, step)
        if not own.has_lapsed:
            idle_steps = step - own.last_asked
            if idle_steps <= WARM or (idle_steps <= LAPSE and self._use.is_recent(step)):
                return True
            own.has_lapsed, own.warm_since = True, None
        if own.warm_since is not None and step - own.warm_since > LAPSE:
            own.warm_since = None
        return own.warm_since is not None
