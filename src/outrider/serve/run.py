"""Listens, serves, and ends without losing what was accepted."""

from __future__ import annotations

import logging
import math
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.serve.app import create_app
from outrider.serve.auth import KeyRing
from outrider.serve.config import ServeConfig
from outrider.serve.worker import Worker

__all__ = ["Listener", "bind", "listener_settings", "serve"]

logger = logging.getLogger("outrider.serve")

KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept. Proxies keep theirs for 60: whoever ends it first loses no request."""


def bind(config: ServeConfig) -> socket.socket:
    """A bound socket, so that a port that is taken is known before the model is loaded.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host {config.host} --port {config.port} cannot be had: {error.strerror}; give another, or --port 0"
        ) from None
    return bound


class Listener(uvicorn.Server):
    """A server that says when it is ready, and that answers to the end: while it drains, whoever comes is told so (503).

    Args:
        config: uvicorn's own.
        on_ready: called once requests are taken.
        worker: what was accepted.
        drain_timeout_s: most seconds from the first signal to the end.
    """

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], *, worker: Worker, drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._worker = worker
        self._drain_timeout_s = drain_timeout_s
        self._ends_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: close the door once everything accepted has ended, or time is up."""
        if self._ends_at is not None:
            left = self._ends_at - time.monotonic()
            if left <= 0 or self._worker.is_drained or not self._worker.is_healthy:
                self.config.timeout_graceful_shutdown = max(1, math.ceil(left))
                self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: nothing new is taken, what was accepted is finished; a second one ends at once."""
        self._captured_signals.append(sig)
        if self._ends_at is None:
            logger.warning("%s: running requests are finished first", signal.Signals(sig).name)
            self._ends_at = time.monotonic() + self._drain_timeout_s
            self._worker.close()
        else:
            self.should_exit = self.force_exit = True


def listener_settings(app: Callable[..., Any]) -> uvicorn.Config:
    """How uvicorn runs an application here."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def serve(
    engine: Engine, bound: socket.socket, *, config: ServeConfig, keys: KeyRing, on_ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT; what was accepted by then is finished within the drain's time."""
    app = create_app(engine, config=config, keys=keys)
    settings = listener_settings(app)
    # Once it has drained uvicorn raises the signal again for whoever was there before it; SIGTERM is then done with.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        worker = app.state.service.worker
        Listener(settings, on_ready, worker=worker, drain_timeout_s=config.drain_timeout_s).run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)
        bound.close()
