"""The table of prompt sources (``sources.json``), and how a row is told apart from another one.

A row's canonical form is its JSON with sorted keys and ASCII escapes. A source's digest is the SHA-256 of its rows in
that form, one a line, in order of their ids. A row's *mark* is the first four hex digits of the SHA-256 of its own form:
enough to name the row that differs and to choose between a few candidates; the source's digest has the last word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import DataError

__all__ = ["TABLE", "Finding", "PromptSource", "by_source", "check_rows", "digest", "load_table", "mark", "name_of"]

Row = dict[str, Any]

TABLE = Path(__file__).parent / "sources.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """One public source of prompts.

    Attributes:
        name: the rows' ``source`` field.
        repository, commit, files: where it lies on GitHub; a folder's name stands for many files.
        licence: of the data. note: how it was normalised.
        rows, sha256: number and digest of its rows.
        prefix: what all ids begin with.
        converter: name in :data:`benchmarks.head_prompts.convert.CONVERTERS`; ``None``: nobody wrote one.
        marks: of each chosen row by id, if there is a converter.
    """

    name: str
    repository: str
    commit: str
    files: tuple[str, ...]
    licence: str
    note: str
    rows: int
    sha256: str
    prefix: str = ""
    converter: str | None = None
    marks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong with the rows of one source; ``changed`` holds the ids of rows that are not the pinned ones."""

    source: str
    problem: str
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for a user."""
        more = f"; first {', '.join(self.changed[:3])}" if self.changed else ""
        return f"{self.source}: {self.problem}{more}"


def load_table(path: Path = TABLE) -> tuple[PromptSource, ...]:
    """All sources, those with most rows first."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return tuple(_source(value) for value in values["sources"])


def _source(value: Mapping[str, Any]) -> PromptSource:
    """``picks`` is a text of ``ID:MARK`` words; the ids lack their common prefix."""
    prefix = value.get("prefix", "")
    picks = [word.rsplit(":", 1) for word in value.get("picks", "").split()]
    return PromptSource(
        name=value["name"],
        repository=value["repository"],
        commit=value["commit"],
        files=tuple(value["files"]),
        licence=value["licence"],
        note=value["note"],
        rows=value["rows"],
        sha256=value["sha256"],
        prefix=prefix,
        converter=value.get("converter"),
        marks={prefix + name: row_mark for name, row_mark in picks},
    )


def _canonical(row: Row) -> bytes:
    return json.dumps(row, sort_keys=True, ensure_ascii=True).encode()


def name_of(row: Row) -> str:
    """The row's id, or a word for its absence."""
    return str(row.get("id", "(no id)"))


def mark(row: Row) -> str:
    """Four hex digits that change when the row does."""
    return hashlib.sha256(_canonical(row)).hexdigest()[:4]


def digest(rows: Iterable[Row]) -> str:
    """SHA-256 of the rows, whatever their order in the file."""
    lines = [_canonical(row) for row in sorted(rows, key=name_of)]
    return hashlib.sha256(b"".join(line + b"\n" for line in lines)).hexdigest()


def by_source(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows under the name in their ``source`` field."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row.get("source", "(no source)")), []).append(row)
    return groups


def check_rows(rows: Sequence[Row], table: Sequence[PromptSource]) -> list[Finding]:
    """Compare a prompt file with the table; an empty list says that every source agrees.

    Raises:
        DataError: there is not one row.
    """
    if not rows:
        raise DataError("the prompt file holds no rows; give the JSON Lines file that the head was trained on")
    groups = by_source(rows)
    known = {source.name for source in table}
    findings = [finding for source in table if (finding := _compare(source, groups.get(source.name, [])))]
    unknown = [
        Finding(source=name, problem=f"unknown source, {len(group)} rows")
        for name, group in groups.items()
        if name not in known
    ]
    return findings + unknown


def _compare(source: PromptSource, rows: Sequence[Row]) -> Finding | None:
    if digest(rows) == source.sha256:
        return None
    changed = tuple(name_of(row) for row in rows if source.marks and source.marks.get(name_of(row)) != mark(row))
    if len(rows) != source.rows:
        return Finding(source=source.name, problem=f"{len(rows)} rows, not {source.rows}", changed=changed)
    return Finding(source=source.name, problem=f"digest {digest(rows)[:12]}, not {source.sha256[:12]}", changed=changed)
