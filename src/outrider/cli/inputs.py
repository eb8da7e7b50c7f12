"""Where a command's prompts come from: an argument, standard input, a text file, or JSON Lines (:mod:`outrider.traffic`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from outrider.errors import ConfigError, DataError
from outrider.traffic import BrokenLine, Inputs, Row, read_rows, wrap

__all__ = ["BrokenLine", "Format", "Inputs", "Row", "read_file", "read_inputs", "read_rows"]

Format = Literal["auto", "text", "jsonl"]


def read_inputs(prompt: str | None, file: Path | None, *, file_format: Format = "auto", chat: bool = True) -> Inputs:
    """Read the prompt argument (``-`` is standard input) or a file (``-`` too).

    Args:
        prompt: text given on the command line.
        file: text file (one prompt) or JSON Lines (one prompt a line).
        file_format: ``auto`` goes by the name: ``.jsonl``, ``.ndjson`` and ``.json`` are rows, the rest is text.
        chat: wrap plain prompts as a user's message; ``False`` hands the model the bare text.

    Raises:
        ConfigError: no prompt, or two.
        DataError: a file that cannot be read, or is empty.
    """
    if prompt is not None and file is not None:
        raise ConfigError("a prompt and --file were both given; give one of them")
    if prompt is None and file is None:
        raise ConfigError("no prompt was given; give a text, - for standard input, or --file PATH")
    if file is None and prompt != "-":
        assert prompt is not None
        return Inputs(rows=(Row(id="0", line=0, prompt=wrap(prompt, chat)),))
    path = file or Path("-")
    data = read_file(path)
    name = "standard input" if str(path) == "-" else str(path)
    if not data.strip():
        raise DataError(f"{name} is empty; it must hold a prompt, or one JSON object a line")
    if _is_rows(path, file_format):
        return read_rows(data, name=name, chat=chat)
    return Inputs(rows=(Row(id="0", line=0, prompt=wrap(_decode(data, name), chat)),), source=name)


def _is_rows(path: Path, file_format: Format) -> bool:
    if file_format == "auto":
        return path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    return file_format == "jsonl"


def read_file(path: Path) -> bytes:
    """All bytes of a file, or of standard input for ``-``.

    Raises:
        DataError: it cannot be read.
    """
    if str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"file {path} cannot be read: {error.strerror}") from None


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text (byte {error.start}); convert it first") from None
