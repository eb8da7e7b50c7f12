"""Many asynchronous streams on one engine: one task steps in a worker thread and hands events to whoever they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from outrider.engine.result import StreamEvent
from outrider.errors import ConfigError

__all__ = ["AsyncStreams"]


class AsyncStreams:
    """The streams of one event loop.

    Args:
        step: one step of the engine; called in a worker thread.
        has_work: whether another step is wanted.
        cancel: ends a request.
    """

    def __init__(
        self, *, step: Callable[[], list[StreamEvent]], has_work: Callable[[], bool], cancel: Callable[[str], None]
    ) -> None:
        self._step, self._has_work, self._cancel = step, has_work, cancel
        self._queues: dict[str, asyncio.Queue[StreamEvent | BaseException]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def follow(self, id: str, num_choices: int, submit: Callable[[], str]) -> AsyncGenerator[StreamEvent, None]:
        """Submit a request, and its events until all of its choices have ended. Leaving it cancels the request.

        Args:
            id: the request's; num_choices: how many results it has.
            submit: called in a worker thread.

        Raises:
            ConfigError: the id is in use. And whatever ``submit`` raises.
        """
        if id in self._queues:
            raise ConfigError(f"request id {id!r} is in use; give another, or none")
        queue = self._queues[id] = asyncio.Queue()
        missing = 0
        try:
            await asyncio.to_thread(submit)
            missing = num_choices
            self._ensure_driver()
            while missing:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                missing -= event.result is not None
                yield event
        finally:
            del self._queues[id]
            if missing:
                self._cancel(id)
                self._ensure_driver()

    def _ensure_driver(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Step while there is work."""
        while self._has_work():
            try:
                events = await asyncio.to_thread(self._step)
            except Exception as error:
                for queue in self._queues.values():
                    queue.put_nowait(error)
                return
            for event in events:
                if event.id in self._queues:
                    self._queues[event.id].put_nowait(event)
