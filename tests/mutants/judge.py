"""Run tests of this repository against one copy of the package; a script, because it must start without the package.

``python -P judge.py once FOLDER ARGUMENTS...`` runs pytest with ARGUMENTS against the copy in FOLDER.

``python -P judge.py serve MODULES...`` imports MODULES, those of other people that the tests need, and then forks a child
for each line of JSON on its input (:func:`serve`). Importing torch takes longer than most tests. Of the package and of
the tests themselves the server imports nothing, so each child reads them anew, the package from its own copy.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["judge", "serve"]

TIMED_OUT, WRONG_PACKAGE, CANNOT_START = 124, 97, 98
"""Exit codes of this script, apart from pytest's, which are at most 5."""

_PAUSE_S = 0.01


def judge(folder: str, arguments: list[str]) -> int:
    """Run pytest on the package in ``folder``; returns its exit code or one of this module's."""
    sys.path[:0] = ["", folder]
    try:
        import pytest

        import outrider

        _stop_at_the_first_example()
    except BaseException:
        traceback.print_exc()
        return CANNOT_START
    if not str(outrider.__file__).startswith(folder + os.sep):
        return WRONG_PACKAGE
    return int(pytest.main(arguments))


def _stop_at_the_first_example() -> None:
    """Hypothesis neither simplifies nor explains what fails, and a slow machine fails nothing."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target)
    settings.register_profile("judge", settings.default, phases=phases, deadline=None)
    settings.load_profile("judge")


def serve(modules: list[str]) -> None:
    """Fork a child for each request until the input ends; answers each with the child's exit code on a line.

    A request is an object with ``folder`` and ``arguments`` as of :func:`judge`, ``environment`` (the child's, whole),
    ``output`` (a file for what it prints) and ``timeout_s``, after which it and its own children are killed.

    Args:
        modules: imported before forking, for speed only: what is missing here is left to the children that need it.
    """
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _assert_forking_is_safe()
    gc.freeze()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(CANNOT_START))
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _leave(_in_child(request))
        print(_exit_code(child, request["timeout_s"]), flush=True)


def _assert_forking_is_safe() -> None:
    """A fork copies no thread but its own, and the children must find nothing of ours already imported."""
    ours = [name for name in sys.modules if name.split(".")[0] in ("outrider", "tests")]
    assert not ours, f"imported before forking: {ours}"
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads run before forking"


def _leave(code: int) -> NoReturn:
    """End this process with ``code``. Taking down all that was imported would take as long as most tests."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _in_child(request: dict[str, Any]) -> int:
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # whoever asked before the fork was told this process's folder
        _redirect(request["output"])
        return judge(request["folder"], request["arguments"])
    except BaseException:
        traceback.print_exc()
        return CANNOT_START


def _redirect(output: str) -> None:
    """Input from nowhere, output and errors into a file: nothing of the child's reaches the server's pipes."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, target)


def _exit_code(child: int, timeout_s: float) -> int:
    """Wait for a child, not beyond its time nor beyond the end of the process that asked for it."""
    end, parent = time.monotonic() + timeout_s, os.getppid()
    try:
        while time.monotonic() < end and os.getppid() == parent:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(_PAUSE_S)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return TIMED_OUT
    finally:
        # Whatever ends the wait, nothing that the child started goes on.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2:])
    else:
        sys.exit(judge(sys.argv[2], sys.argv[3:]))
