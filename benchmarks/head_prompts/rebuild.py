"""Fetch what the table names, convert it, and keep the rows that are the pinned ones.

Written where no network was at hand: converters were compared with rows of the real sources by eye, and whatever comes
out is held against the table's checksums, but no download has ever run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.head_prompts.convert import candidates
from benchmarks.head_prompts.table import PromptSource, digest, mark
from benchmarks.sources import GITHUB_RAW, RawFile, cache_dir, fetch_file
from outrider.errors import DataError

__all__ = ["Built", "build", "fetched", "from_folder"]

Row = dict[str, Any]
Reader = Callable[[PromptSource, str], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What came of one source: its rows, or why there are none."""

    source: PromptSource
    rows: tuple[Row, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        """One line for a user."""
        if self.problem:
            return f"not rebuilt: {self.source.rows} rows of {self.source.name}: {self.problem}"
        return f"rebuilt: {self.source.rows} rows of {self.source.name}"


def fetched(source: PromptSource, path: str) -> bytes:
    """A file of the source at its commit, through the benchmarks' cache."""
    place = f"{source.repository}/{source.commit}/{path}"
    return fetch_file(RawFile(name=f"head_prompts/{place}", urls=(f"{GITHUB_RAW}/{place}",)), cache_dir())


def from_folder(folder: Path) -> Reader:
    """Reads ``FOLDER/OWNER/REPOSITORY/PATH`` instead of downloading."""

    def read(source: PromptSource, path: str) -> bytes:
        place = folder / source.repository / path
        try:
            return place.read_bytes()
        except OSError as error:
            raise DataError(
                f"{place} cannot be read: {error.strerror}; put the file of {source.commit} there"
            ) from None

    return read


def build(source: PromptSource, read: Reader) -> Built:
    """The source's rows in the table's order, if all of them are the pinned ones."""
    if source.converter is None:
        return Built(source=source, problem="no converter")
    try:
        files = {path: read(source, path) for path in source.files}
        rows = _chosen(source, files)
    except DataError as error:
        return Built(source=source, problem=str(error))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return Built(source=source, problem=f"its files have another form ({type(error).__name__}: {error})")
    missing = [name for name in source.marks if name not in rows]
    if missing:
        return Built(source=source, problem=f"{len(missing)} rows are not the pinned ones, first {missing[0]}")
    if digest(rows.values()) != source.sha256:
        return Built(source=source, problem=f"digest {digest(rows.values())[:12]}, not {source.sha256[:12]}")
    return Built(source=source, rows=tuple(rows[name] for name in source.marks))


def _chosen(source: PromptSource, files: dict[str, bytes]) -> dict[str, Row]:
    """Of all candidates those with a wanted id and its mark; the first of several."""
    assert source.converter is not None
    chosen: dict[str, Row] = {}
    for candidate in candidates(source.converter, files):
        row = {**candidate, "source": source.name}
        if source.marks.get(row["id"]) == mark(row):
            chosen.setdefault(row["id"], row)
    return chosen
