"""The side of the conversation that runs inside a peer's environment. Standard library only.

A driver is one process that loads one arm and stays up. It reads a JSON object a line and answers with one:

    start     argv[1]: {"model": ..., "threads": ..., "streams": ..., "context": ..., "options": {...}}
    ready     {"ready": true, "versions": {...}, "note": "..."}   or   {"error": "..."}
    request   {"prompts": [[ids], ...], "max_tokens": ..., "stop_ids": [...]}
    answer    {"answers": [{"tokens": [...], "first_s": ...}], "wall_s": ..., "passes": ..., "drafted": ..., "accepted": ...}

``passes`` (decode passes of the target), ``drafted`` and ``accepted`` are left out where the peer does not tell them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]
Handler = Callable[[dict[str, Any]], Reply]


def serve(load: Callable[[dict[str, Any]], tuple[Handler, Reply]]) -> None:
    """Load the arm, say so, then answer until standard input ends.

    Args:
        load: given the start object, returns what answers requests and what to say about itself (versions, note).
    """
    end_with_parent()
    # Libraries print to standard output as they like: it goes to the log, the conversation keeps a copy of its own.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a driver is killed in the end: nothing may wait
    try:
        handler, about = load(json.loads(sys.argv[1]))
    except BaseException as error:
        traceback.print_exc()
        _say(channel, {"error": _text(error)})
        return
    _say(channel, {"ready": True, **about})
    for line in sys.stdin:
        try:
            reply = handler(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": _text(error)}
        _say(channel, reply)


def end_with_parent() -> None:
    """Have Linux end this process when its parent is gone, even while it stands still."""
    set_parent_death_signal = 1
    try:
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    except (OSError, AttributeError):
        return


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _say(channel: Any, reply: Reply) -> None:
    channel.write(json.dumps(reply) + "\n")
    channel.flush()


def cut(tokens: list[int], stop_ids: list[int]) -> list[int]:
    """Output ids up to and with the first stop id, as every arm is compared."""
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1]
    return tokens


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of the named packages."""
    from importlib import metadata

    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
