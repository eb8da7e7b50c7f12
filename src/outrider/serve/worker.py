"""One thread owns the engine and steps it; everybody else hands it commands and receives events.

Commands come through a queue that the thread reads between steps; while the engine has nothing to do it sleeps on that
queue, without polling. Events of a step go back in one call into the event loop, which puts them into the streams that
they belong to. Nobody but this thread touches the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from outrider.engine.result import StreamEvent
from outrider.errors import OutriderError
from outrider.serve.bridge import Bridge, Job
from outrider.serve.errors import ApiError, internal_error
from outrider.serve.tally import Tally

__all__ = ["Stream", "Worker"]

logger = logging.getLogger(__name__)

MOST_FAULTS = 3
"""Failing steps in a row after which the server says that it is not healthy."""

Item: TypeAlias = "StreamEvent | BaseException"


@dataclass(slots=True, eq=False)
class Stream:
    """Events of the jobs of one HTTP request, in the event loop that asked for them.

    Attributes:
        missing: choices whose result has not been handed out yet.
        order: position of each job among the request's prompts, by id.
    """

    loop: asyncio.AbstractEventLoop
    missing: int
    order: dict[str, int]
    _items: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)

    async def batch(self) -> list[StreamEvent]:
        """Wait for events; returns all that are there.

        Raises:
            ApiError: the server failed.
        """
        items = [await self._items.get()]
        while not self._items.empty():
            items.append(self._items.get_nowait())
        events = []
        for item in items:
            if isinstance(item, BaseException):
                raise item
            self.missing -= item.result is not None
            events.append(item)
        return events

    def put(self, item: Item) -> None:
        """Called in the loop's own thread."""
        self._items.put_nowait(item)


@dataclass(frozen=True, slots=True)
class _Submit:
    jobs: Sequence[Job]
    stream: Stream
    answer: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Cancel:
    ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[Bridge], object]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[object]


@dataclass(frozen=True, slots=True)
class _Close:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(slots=True)
class _Running:
    """A job in the engine, as the worker remembers it."""

    stream: Stream
    missing: int
    has_begun: bool = False
    submitted: float = field(default_factory=time.perf_counter)


class Worker:
    """Runs an engine for an event loop.

    Args:
        bridge: the engine.
        max_waiting: jobs that may wait for their first token; more are refused with 429.
    """

    def __init__(self, bridge: Bridge, *, max_waiting: int) -> None:
        self.bridge = bridge
        self.tally = Tally()
        self._max_waiting = max_waiting
        self._commands: queue.SimpleQueue[_Submit | _Cancel | _Call | _Close | _Stop] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._is_closing = False
        self._is_closed = False
        self._is_stopping = False
        self._faults = 0
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    # --- the event loop's side

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """False when the thread has ended, or keeps failing."""
        return self._thread.is_alive() and self._faults < MOST_FAULTS

    @property
    def is_draining(self) -> bool:
        """True once no new job is taken."""
        return self._is_closing

    @property
    def is_drained(self) -> bool:
        """True once no new job is taken and all that were taken have ended."""
        return self._is_closed and not self._running

    async def submit(self, jobs: Sequence[Job]) -> Stream:
        """Queue the jobs of one request, all or none.

        Raises:
            OutriderError: a job is not possible.
            ApiError: no room (429), or the server is ending or broken (503).
        """
        if not self._thread.is_alive():
            raise ApiError(503, "the server is ending and takes nothing new", code="draining", retry_after_s=5)
        loop = asyncio.get_running_loop()
        order = {job.id: position for position, job in enumerate(jobs)}
        stream = Stream(loop, sum(job.params.n for job in jobs), order)
        answer: asyncio.Future[None] = loop.create_future()
        self._commands.put(_Submit(jobs, stream, answer))
        try:
            await answer
        except asyncio.CancelledError:
            self.cancel(stream)
            raise
        return stream

    def cancel(self, stream: Stream) -> None:
        """Drop a request; what it holds is freed at the next step."""
        self._commands.put(_Cancel(tuple(stream.order)))

    async def call(self, function: Callable[[Bridge], object]) -> object:
        """Run a function on the engine between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()
        self._commands.put(_Call(function, loop, answer))
        return await answer

    def close(self) -> None:
        """Take nothing new from here on; what was submitted before is finished, and the thread goes on to answer."""
        self._is_closing = True
        self._commands.put(_Close())

    def stop(self) -> None:
        """Take nothing new, finish what was taken, end the thread."""
        self._is_closing = True
        self._commands.put(_Stop())

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; True if it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the engine's thread

    def _run(self) -> None:
        while True:
            self._take_commands()
            if self.bridge.has_work:
                self._step()
            elif self._is_stopping:
                return

    def _take_commands(self) -> None:
        """Handle what is there; sleep for a command if the engine has nothing to do."""
        if not self.bridge.has_work and not self._is_stopping:
            self._handle(self._commands.get())
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._commands.get_nowait())

    def _handle(self, command: _Submit | _Cancel | _Call | _Close | _Stop) -> None:
        if isinstance(command, _Submit):
            self._submit(command)
        elif isinstance(command, _Cancel):
            for id in command.ids:
                if self._running.pop(id, None) is not None:
                    self.bridge.cancel(id)
                    self.tally.cancelled += 1
            self._count_load()
        elif isinstance(command, _Call):
            self._call(command)
        else:
            self._is_closed = True
            self._is_stopping = self._is_stopping or isinstance(command, _Stop)

    def _submit(self, command: _Submit) -> None:
        done: list[Job] = []
        try:
            self._refuse(len(command.jobs))
            for job in command.jobs:
                self.bridge.submit(job)
                done.append(job)
        except Exception as error:
            for job in done:
                self.bridge.cancel(job.id)
            _answer(command.stream.loop, command.answer, error=_for_client(error))
            return
        for job in command.jobs:
            self._running[job.id] = _Running(command.stream, job.params.n)
        self._count_load()
        _answer(command.stream.loop, command.answer)

    def _refuse(self, num_jobs: int) -> None:
        if self._is_closed:
            raise ApiError(503, "the server is ending and takes nothing new", code="draining", retry_after_s=5)
        if self._faults >= MOST_FAULTS:
            raise ApiError(503, "the engine keeps failing; restart the server", code="unhealthy")
        waiting = sum(not entry.has_begun for entry in self._running.values())
        # Where nobody waits a request of many prompts is taken whole, or it could never run.
        if waiting and waiting + num_jobs > self._max_waiting:
            self.tally.refused += 1
            raise ApiError(
                429,
                f"{waiting} requests wait already, as many as this server lets wait ({self._max_waiting}); try later",
                code="queue_full",
                retry_after_s=self.tally.mean_request_s,
            )

    def _call(self, command: _Call) -> None:
        try:
            result = command.function(self.bridge)
        except Exception as error:
            logger.exception("a look at the engine failed")
            _answer(command.loop, command.answer, error=_for_client(error))
        else:
            _answer(command.loop, command.answer, result)

    def _step(self) -> None:
        try:
            events = self.bridge.step()
        except Exception:
            logger.exception("a step of the engine failed; its requests are given up")
            self._give_up()
            return
        self._faults = 0
        self.tally.count(events)
        self._deliver(events)

    def _deliver(self, events: Iterable[StreamEvent]) -> None:
        """Hand events to the loops of their streams, one call a loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Item]]] = {}
        for event in events:
            entry = self._running.get(event.id)
            if entry is None:  # cancelled by its owner
                continue
            if not entry.has_begun:
                entry.has_begun = True
                self.tally.first_token.observe(time.perf_counter() - entry.submitted)
            entry.missing -= event.result is not None
            if entry.missing == 0:
                del self._running[event.id]
            by_loop.setdefault(entry.stream.loop, []).append((entry.stream, event))
        for loop, items in by_loop.items():
            _in_loop(loop, _put_all, items)
        self._count_load()

    def _give_up(self) -> None:
        """A step failed: tell every stream once, and let the engine drop everything it was doing."""
        self._faults += 1
        self.tally.faults += 1
        gone, self._running = self._running, {}
        for id in gone:
            self.bridge.cancel(id)
        for stream in {entry.stream for entry in gone.values()}:
            _in_loop(stream.loop, stream.put, internal_error())
        self._count_load()
        if self._faults >= MOST_FAULTS:
            time.sleep(0.2)  # an engine that cannot even drop its requests must not take a processor

    def _count_load(self) -> None:
        self.tally.waiting = sum(not entry.has_begun for entry in self._running.values())
        self.tally.running = sum(entry.missing for entry in self._running.values() if entry.has_begun)


def _for_client(error: Exception) -> Exception:
    if isinstance(error, OutriderError | ApiError):
        return error
    logger.error("a request failed in the engine", exc_info=error)
    return internal_error()


def _put_all(items: list[tuple[Stream, Item]]) -> None:
    for stream, item in items:
        stream.put(item)


def _answer(
    loop: asyncio.AbstractEventLoop,
    answer: asyncio.Future[None] | asyncio.Future[object],
    result: object = None,
    *,
    error: Exception | None = None,
) -> None:
    def settle() -> None:
        if answer.done():  # whoever asked has gone
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    _in_loop(loop, settle)


def _in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    # A loop that has been closed has nobody left to tell.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
