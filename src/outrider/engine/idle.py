"""What idling costs and may cost: the purse that tries are paid from, and hidden states that nobody reads."""

from __future__ import annotations

from outrider.engine.beliefs import Own

__all__ = ["FIRST_PURSE", "LAPSE", "MOST_PURSE", "TRY_SHARE", "WARM", "Purse", "is_ready", "keeps_taps"]

TRY_SHARE = 0.012
"""Share of the time that may go into trying drafters that do not pay."""
FIRST_PURSE, MOST_PURSE = 1.0, 6.0
"""Plain steps' time that the purse holds at first, and at most."""
LAPSE, WARM = 96, 24
"""Steps without an ask after which a sequence's hidden states are not kept any more, and steps of them that a try needs."""


class Purse:
    """Milliseconds that may be lost by trying. Every step fills it with a share of its own time, so that this is the most
    that all tries together can cost."""

    def __init__(self) -> None:
        self.ms: float | None = None  # until the first step

    def fill(self, plain_ms: float) -> None:
        """A step that takes ``plain_ms`` without drafts begins."""
        held = FIRST_PURSE * plain_ms if self.ms is None else self.ms
        self.ms = min(held + TRY_SHARE * plain_ms, MOST_PURSE * plain_ms)

    def holds(self, price_ms: float) -> bool:
        """True if so much can be paid."""
        return self.ms is not None and price_ms <= self.ms

    def pay(self, price_ms: float) -> bool:
        """Take so much out, if it is there."""
        if self.ms is None or price_ms > self.ms:
            return False
        self.ms -= price_ms
        return True


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


def keeps_taps(own: Own, step: int) -> bool:
    """Are the hidden states of this step worth keeping?"""
    if not own.has_lapsed and step - own.last_asked > LAPSE:
        own.has_lapsed, own.warm_since = True, None
    if own.warm_since is not None and step - own.warm_since > LAPSE:
        own.warm_since = None
    return not own.has_lapsed or own.warm_since is not None
