"""A file of results that survives being interrupted: run the same command again and it goes on where it stopped.

Results are appended as they finish, all choices of a request in one write, one JSON object a line. On opening, a torn
last line (the process was killed while it wrote) and requests that lack choices are dropped, by writing the good lines to
a new file and renaming it over the old one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import DataError

if TYPE_CHECKING:
    from outrider.engine.result import GenerationResult

__all__ = ["ResultFile"]

# Settings that change how fast a result came, or only how it was spelled, but not what it is.
_UNCOMPARED = ("threads", "engine", "drafter", "drafter_path")
_UNCOMPARED_SAMPLING = ("bad_words_token_ids",)


class ResultFile:
    """Results by id, on disk.

    Args:
        path: file to append to; made if it is not there.
        num_choices: how many choices each request asks for, by id.

    Attributes:
        done: ids whose choices are all there.
        repaired: lines that were dropped because they were torn or incomplete.

    Raises:
        DataError: the file cannot be read or written, or holds something else than results.
    """

    def __init__(self, path: Path, *, num_choices: Mapping[str, int]) -> None:
        self._path = path
        lines, torn = _read_lines(path)
        by_id: dict[str, list[dict[str, Any]]] = {}
        for record in lines:
            by_id.setdefault(record["id"], []).append(record)
        self.done = {id for id, records in by_id.items() if len(records) >= num_choices.get(id, 1)}
        self._settings = {id: records[0].get("settings", {}) for id, records in by_id.items()}
        kept = [record for record in lines if record["id"] in self.done]
        self.repaired = torn + len(lines) - len(kept)
        if self.repaired:
            _replace(path, kept)
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise DataError(f"output file {path} cannot be written: {error.strerror}") from None

    def write(self, results: Sequence[GenerationResult]) -> None:
        """Append all choices of one request in one write."""
        self._file.write(b"".join(_line(result.to_json()) for result in results))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check_settings(self, id: str, settings: Mapping[str, Any]) -> None:
        """Refuse to mix results of different settings in one file.

        Raises:
            DataError: the result of ``id`` in the file was made with other settings than these.
        """
        before, now = _comparable(self._settings.get(id, {})), _comparable(settings)
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise DataError(
                    f"output file {self._path} holds results made with {name} = {before.get(name)!r}, "
                    f"now it is {now.get(name)!r}; give another --output, or delete the file"
                )


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Records of the file, and how many torn lines (0 or 1) its end holds."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise DataError(f"output file {path} cannot be read: {error.strerror}") from None
    *whole, last = data.split(b"\n")
    records = [_parse(raw, path, number) for number, raw in enumerate(whole, start=1)]
    return records, int(bool(last))


def _parse(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(raw)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("id"), str) or "token_ids" not in record:
        raise DataError(f"output file {path}, line {number} is not a result of this command; give another --output")
    return record


def _replace(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_bytes(b"".join(_line(record) for record in records))
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"output file {path} cannot be written: {error.strerror}") from None


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings as JSON would give them back, without those that do not change a result."""
    plain = json.loads(json.dumps(settings))
    sampling = plain.pop("sampling", {})
    kept = {name: value for name, value in plain.items() if name not in _UNCOMPARED}
    return kept | {name: value for name, value in sampling.items() if name not in _UNCOMPARED_SAMPLING}
