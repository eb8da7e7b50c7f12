"""Who is started next: first come, first served within a scope, scopes in turn, urgent ones earlier but nobody never."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from outrider.engine.sequence import LiveSequence, Request

__all__ = ["FairQueue", "Ticket"]

PATIENCE = 8
"""Starts in a row that may go past an older, less urgent request; the next one then is the oldest that waits."""


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """Sequences that need one text read into the cache: the choices of a new request, or one sequence that was put back.

    Attributes:
        sequences: they have the same tokens, which are read into the first one's slot.
        was_put_back: its tokens hold output that was computed before.
        num_held: tokens taken over from a cached prefix.
        num_read: tokens in the cache, those included.
        verify_ms, other_ms: of the passes that read a part of it.
    """

    sequences: list[LiveSequence]
    was_put_back: bool = False
    num_held: int = 0
    num_read: int = 0
    verify_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def request(self) -> Request:
        return self.sequences[0].request

    @property
    def slot(self) -> int:
        """Where the text goes; ``NO_SLOT`` while it waits."""
        return self.sequences[0].slot

    @property
    def tokens(self) -> list[int]:
        """What must be read."""
        return self.sequences[0].tokens

    @property
    def num_unread(self) -> int:
        return len(self.tokens) - self.num_read

    @property
    def seniority(self) -> tuple[int, int, int]:
        """Sorts the most urgent first, then the oldest."""
        return self.sequences[0].seniority


class FairQueue:
    """Tickets of new requests, by scope."""

    def __init__(self) -> None:
        self._tickets: dict[str | None, list[Ticket]] = {}
        self._turns: dict[str | None, int] = {}
        self._num_taken = 0
        self._num_overtaking = 0

    def __len__(self) -> int:
        return sum(map(len, self._tickets.values()))

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for tickets in self._tickets.values() for ticket in tickets)

    def push(self, ticket: Ticket) -> None:
        """Queue a ticket behind those of its scope that are as urgent."""
        insort(self._tickets.setdefault(ticket.request.scope, []), ticket, key=attrgetter("seniority"))

    def peek(self) -> Ticket | None:
        """Who is next: the most urgent; of equals the scope that was served longest ago; then the oldest."""
        if not self._tickets:
            return None
        if self._num_overtaking >= PATIENCE:
            return min(self, key=lambda ticket: ticket.request.number)
        heads = [tickets[0] for tickets in self._tickets.values()]
        return min(heads, key=lambda t: (t.request.priority, self._turns.get(t.request.scope, -1), t.request.number))

    def take(self, ticket: Ticket) -> None:
        """Remove the ticket that :meth:`peek` named: it is started."""
        older = any(t.request.number < ticket.request.number and self._is_less_urgent(t, ticket) for t in self)
        self._num_overtaking = self._num_overtaking + 1 if older else 0
        self._num_taken += 1
        self._turns[ticket.request.scope] = self._num_taken
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out that is not started."""
        scope = ticket.request.scope
        self._tickets[scope].remove(ticket)
        if not self._tickets[scope]:
            del self._tickets[scope]
        if not self._tickets:
            self._turns.clear()

    @staticmethod
    def _is_less_urgent(ticket: Ticket, than: Ticket) -> bool:
        return ticket.request.priority > than.request.priority
