"""Result files, bars with verdicts, the history line, and the printed table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.stats import MIN_PAIRS_NEAR_ONE, NEAR_ONE, PairedRatio

__all__ = ["Bar", "ResultFile", "Section", "append_history", "print_table", "wide_console", "write_json"]

HERE = Path(__file__).parent
RESULTS = HERE / "results"
HISTORY = HERE / "history.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A measured value against a limit.

    Attributes:
        name: what is compared, in words.
        value: the measured value; low, high: its 95 % interval where one was computed.
        at_least: True if the value must not be below the limit, else it must not be above it.
        unit: ``x`` for ratios, else the unit.
        pairs: pairs or repeats behind the value; 0 where there is only one value.
    """

    name: str
    value: float
    limit: float
    at_least: bool = True
    unit: str = "x"
    low: float | None = None
    high: float | None = None
    pairs: int = 0

    @property
    def verdict(self) -> str:
        """``met`` or ``missed``, and what weakens it: an interval across the limit, too few pairs near 1."""
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        notes = []
        if self.low is not None and self.high is not None and self.low < self.limit < self.high:
            notes.append("interval crosses the bar")
        if self.unit == "x" and abs(self.limit - 1) <= NEAR_ONE and self.pairs < MIN_PAIRS_NEAR_ONE:
            notes.append(f"fewer than {MIN_PAIRS_NEAR_ONE} pairs")
        return ("met" if met else "missed") + (f" ({', '.join(notes)})" if notes else "")

    @staticmethod
    def of_ratio(name: str, ratio: PairedRatio, limit: float, *, at_least: bool = True) -> Bar:
        """A bar on a paired ratio."""
        return Bar(
            name=name,
            value=ratio.value,
            limit=limit,
            at_least=at_least,
            low=ratio.low,
            high=ratio.high,
            pairs=ratio.pairs,
        )

    def to_json(self) -> dict[str, Any]:
        """The bar with its verdict."""
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "low": None if self.low is None else round(self.low, 4),
            "high": None if self.high is None else round(self.high, 4),
            "limit": self.limit,
            "at_least": self.at_least,
            "unit": self.unit,
            "pairs": self.pairs,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What one section measured: bars, summaries by arm, notes, and the raw values behind them."""

    name: str
    title: str
    bars: Sequence[Bar] = ()
    summary: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    raw: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "title": self.title,
            "bars": [bar.to_json() for bar in self.bars],
            "summary": self.summary,
            "notes": list(self.notes),
            "raw": self.raw,
            "seconds": round(self.seconds, 1),
        }


class ResultFile:
    """A result that is whole on disk after every section, so that a run cut off loses only the section it was in."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {**head, "sections": {}}

    @staticmethod
    def resume(path: Path, head: dict[str, Any]) -> ResultFile:
        """Go on with an earlier file of the same commit and settings; sections measured there are kept.

        Raises:
            ValueError: the file was measured under another commit, other settings or on another machine.
        """
        result = ResultFile(path, head)
        earlier = json.loads(path.read_text(encoding="utf-8"))
        for name in ("settings", "git", "machine"):
            if earlier.get(name) != head.get(name):
                raise ValueError(f"{path} was measured with another {name}; start a new file (leave --resume out)")
        result.data["sections"] = earlier["sections"]
        return result

    def has(self, name: str) -> bool:
        """True if the section was measured."""
        return name in self.data["sections"]

    def add(self, section: Section) -> None:
        """Add a section and write the file."""
        self.data["sections"][section.name] = section.to_json()
        write_json(self.path, self.data)

    def bars(self) -> list[dict[str, Any]]:
        """All bars, in order."""
        return [bar for section in self.data["sections"].values() for bar in section["bars"]]


def write_json(path: Path, data: Any) -> None:
    """Write a whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def append_history(head: dict[str, Any], bars: Sequence[dict[str, Any]], *, result: str, path: Path = HISTORY) -> None:
    """Add one line that names the run and its bars; earlier lines are never touched."""
    line = {
        "started": head["started"],
        "commit": head["git"]["commit"],
        "changed_files": head["git"]["changed_files"],
        "processor": head["machine"]["processor"],
        "torch": head["versions"].get("torch"),
        "command": head["command"],
        "result": result,
        "bars": {bar["name"]: [bar["value"], bar["verdict"]] for bar in bars},
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def wide_console() -> Console:
    """The terminal as it is; into a file or pipe 140 columns, so that no table is broken up."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def print_table(bars: Sequence[dict[str, Any]], *, title: str) -> None:
    """The table of bars and verdicts."""
    table = Table(title=title, title_justify="left")
    for column in ("what", "measured", "95 % interval", "bar", "verdict"):
        table.add_column(column, overflow="fold")
    for bar in bars:
        interval = "" if bar["low"] is None else f"{_number(bar['low'])} to {_number(bar['high'])}"
        limit = f"{'>=' if bar['at_least'] else '<='} {bar['limit']:g} {bar['unit']}"
        colour = "green" if bar["verdict"].startswith("met") else "red"
        measured = f"{_number(bar['value'])} {bar['unit']}"
        table.add_row(bar["name"], measured, interval, limit, f"[{colour}]{bar['verdict']}[/{colour}]")
    wide_console().print(table)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
