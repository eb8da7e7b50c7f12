"""What every rendered table is made of: Markdown, numbers as people read them, and where a result comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["bar_lines", "markdown", "number", "provenance_line"]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def bar_lines(result: dict[str, Any]) -> list[str]:
    """A list of the result's bars, each with its ratio, interval and verdict."""
    return [
        f"- {bar['name']}: {bar['value']:.2f}x ({bar['low']:.2f} to {bar['high']:.2f}), "
        f"bar {'≥' if bar['at_least'] else '≤'} {bar['limit']:g}x: {bar['verdict']}"
        for bar in result["bars"]
    ]


def provenance_line(result: dict[str, Any]) -> str:
    """Machine, versions, commit and command in one sentence."""
    machine, versions, git = result["machine"], result["versions"], result["git"]
    shown = ", ".join(f"{name} {versions[name]}" for name in ("outrider", "torch", "transformers") if name in versions)
    processor = f"{machine['processor']} ({', '.join(machine['flags'])})"
    return (
        f"\n{processor}, {machine['threads']} threads; {shown}; commit {str(git['commit'])[:10]}; "
        f"{result['started'][:10]}; `{result['command']}`\n"
    )
