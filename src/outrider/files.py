"""Files that are whole or not there: written beside, made durable, then moved into place."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["append_line", "hold", "read_lines", "replace_file", "write_json"]


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold a lock file. It is given back when the process ends, however that comes about.

    Raises:
        BlockingIOError: somebody else holds it.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` make a neighbour of the file, then move it over the file: nobody ever sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)  # some writers make files that only their owner may read
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line."""
    with path.open("ab") as file:
        file.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON Lines file that may have been cut off while its last line was written; that line is dropped.

    The file is mended, so that the next line appended is whole. A file that is not there holds nothing.
    """
    if not path.exists():
        return []
    *whole, torn = path.read_bytes().split(b"\n")
    if torn:
        text = b"".join(line + b"\n" for line in whole)
        replace_file(path, lambda partial: partial.write_bytes(text))
    return [json.loads(line) for line in whole if line.strip()]
