"""``outrider serve`` itself in a process of its own, as a user starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.client import Client
from benchmarks.provenance import ROOT

__all__ = ["ServerProcess", "serving"]

READY = "outrider: ready on http://"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    """A server that takes requests.

    Attributes:
        process: of the command.
        host, port: where it listens.
        log: file with its standard error.
    """

    process: subprocess.Popen[str]
    host: str
    port: int
    log: Path

    @property
    def client(self) -> Client:
        """A client of it."""
        return Client(self.host, self.port)


@contextmanager
def serving(arguments: Sequence[str], *, log: Path, patience_s: float = 120.0) -> Iterator[ServerProcess]:
    """Run ``outrider serve`` with these arguments on a free port until the block ends.

    Args:
        arguments: flags, without the port.
        log: where its standard error goes.
        patience_s: for its end after SIGTERM; it is killed then.

    Raises:
        RuntimeError: it did not start; names the log.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
        )  # the server must not outlive this script
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(READY):
            raise RuntimeError(f"the server did not start (status {process.wait()}); see {log}")
        host, _, port = line.removeprefix(READY).strip().rpartition(":")
        yield ServerProcess(process=process, host=host, port=int(port), log=log)
    finally:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
