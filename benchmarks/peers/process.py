"""A driver process that stays up, speaks JSON lines, and stands still while it is not its turn."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.installs import NotAvailable
from benchmarks.peers.setups import Ready

__all__ = ["Driver", "DriverError"]

PAUSE_SECONDS = 1.0


class DriverError(RuntimeError):
    """A driver died, hung or answered with an error."""


class Driver:
    """One running arm. Between turns the whole process group is stopped, so that no idle thread of it spins.

    Args:
        ready: how to start it.
        start: what it is told: model, threads, streams, context and options are filled in from here and ``ready``.
        log: its standard error.
        start_s, request_s: seconds that it may take.

    Raises:
        NotAvailable: it does not come up.
    """

    def __init__(self, ready: Ready, start: dict[str, Any], *, log: Path, start_s: float, request_s: float) -> None:
        self._request_s, self._log = request_s, log
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(start["threads"])
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **ready.env}
        told = {**start, "model": ready.model, "options": ready.options}
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [ready.python, ready.driver, json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                cwd=log.parent,
                start_new_session=True,
            )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.about = self._receive(start_s)
        except DriverError as error:
            self.close()
            raise NotAvailable(f"{error} (log: {log})") from None
        self.pause()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request: wake the arm, wait for its answer, stop it again.

        Raises:
            DriverError: it died, hung or answered with an error.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise DriverError(f"the driver is gone (log: {self._log})") from None
        try:
            return self._receive(self._request_s)
        finally:
            self.pause()

    def pause(self) -> None:
        """Stop every process of the arm until its next turn, and see it stand still."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + PAUSE_SECONDS
        while self._process.poll() is None and not self.is_stopped() and time.monotonic() < deadline:
            time.sleep(0.001)

    def close(self) -> None:
        """End the arm and everything that it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def is_stopped(self) -> bool:
        """True while the driver's process stands still."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0] == "T"

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _receive(self, limit_s: float) -> dict[str, Any]:
        begun = time.monotonic()
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise DriverError(f"no answer in {time.monotonic() - begun:.0f} s") from None
        if not line:
            raise DriverError("the driver ended without an answer")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise DriverError(reply["error"])
        return reply
