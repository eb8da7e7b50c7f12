"""Reading files that others wrote: whatever a parser raises becomes one clear error that names the file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError, WeightsError

__all__ = ["parsing", "read_json", "read_text"]

_MAX_TEXT_BYTES = 64 * 2**20


@contextlib.contextmanager
def parsing(where: str | Path, what: str) -> Iterator[None]:
    """Turn every failure inside into a :class:`WeightsError` saying that ``where`` is not a sound ``what``.

    Parsers of weights and tokenizers raise many types, and those written in Rust raise a ``BaseException`` of their own
    when they panic; only what the user or the interpreter does passes through.
    """
    try:
        yield
    except (OutriderError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise WeightsError(f"{where}: not a sound {what}: {reason}; fetch it again") from None


def read_text(path: Path) -> str:
    """Text of a small file.

    Raises:
        WeightsError: unreadable, not UTF-8, or absurdly large.
    """
    with parsing(path, "text file"):
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise WeightsError(f"{path}: {path.stat().st_size} bytes are too many for this kind of file")
        return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        WeightsError: unreadable, not JSON, or not an object.
    """
    text = read_text(path)
    with parsing(path, "JSON file"):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds {type(value).__name__}; allowed: a JSON object")
    return value
