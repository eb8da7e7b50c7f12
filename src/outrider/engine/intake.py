"""The door: requests come in and are cancelled while a step runs in another thread, and nobody waits for that step."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from outrider.engine.queue import Ticket
from outrider.engine.stats import retry_after_s
from outrider.errors import ConfigError, DrainingError, QueueFullError

__all__ = ["Intake"]


class Intake:
    """What was accepted and has not ended. Every method may be called from any thread.

    Args:
        max_waiting: most requests that may wait to be started; 0 does not bound them.

    Attributes:
        ends_per_s: choices that end a second now, as far as anybody has said.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._gate = threading.Lock()
        self._inbox: list[Ticket] = []
        self._cancelled: set[str] = set()
        self._missing: dict[str, int] = {}  # choices of each request that have not ended
        self._unstarted: set[str] = set()
        self.num_refused = 0
        self.is_draining = False
        self.ends_per_s = 0.0

    def __bool__(self) -> bool:
        """True while something that was accepted has not ended."""
        return bool(self._missing)

    @property
    def num_waiting(self) -> int:
        """Requests that were never started."""
        return len(self._unstarted)

    def check_open(self) -> None:
        """Refuse if nothing more is taken.

        Raises:
            DrainingError, QueueFullError: see :mod:`outrider.errors`.
        """
        if self.is_draining:
            raise DrainingError("the engine is being shut down and takes no new requests; send it elsewhere, or later")
        waiting = self.num_waiting
        if self._max_waiting and waiting >= self._max_waiting:
            self.num_refused += 1
            seconds = retry_after_s(waiting, self.ends_per_s)
            raise QueueFullError(
                f"{waiting} requests wait already, and {self._max_waiting} may; try again in {seconds:.0f} s", seconds
            )

    def accept(self, ticket: Ticket) -> None:
        """Let a request in.

        Raises:
            ConfigError: its id is in use.
            DrainingError, QueueFullError: as :meth:`check_open`.
        """
        id = ticket.request.id
        with self._gate:
            if id in self._missing:
                raise ConfigError(f"request id {id!r} is in use; give another, or none")
            self.check_open()
            self._inbox.append(ticket)
            self._missing[id] = len(ticket.sequences)
            self._unstarted.add(id)

    def cancel(self, id: str) -> None:
        """Remember that a request is not wanted any more; unknown and ended ones do not matter."""
        with self._gate:
            if id in self._missing:
                self._cancelled.add(id)

    def take(self) -> tuple[list[Ticket], set[str]]:
        """What has come since the last call, and the ids that were cancelled."""
        with self._gate:
            inbox, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, set()
        return inbox, cancelled

    def note_started(self, ids: Iterable[str]) -> None:
        """These wait no longer."""
        with self._gate:
            self._unstarted.difference_update(ids)

    def note_ended(self, id: str) -> None:
        """A choice of the request ended; with the last one its id is free."""
        with self._gate:
            self._missing[id] -= 1
            if self._missing[id] == 0:
                del self._missing[id]
                self._unstarted.discard(id)
                self._cancelled.discard(id)
