"""The record of a run, a JSON object a line, appended after every turn, so that a run that was cut off goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, DataError

__all__ = ["WorkFile"]


class WorkFile:
    """Turns of arms, by (round, item, arm), and what else happened.

    Lines: a ``head`` with the settings; ``turn`` (round, item, arm, reply); ``arm`` (what it is, or why it is not
    available); ``stopped`` (an arm that failed in the middle); ``probe`` (round, item, what the machine could do).

    Raises:
        ConfigError: the file belongs to other settings.
        DataError: a line in the middle is broken. A broken last line was being written when the run was cut off.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.turns: dict[tuple[int, str, str], dict[str, Any]] = {}
        self.arms: dict[str, dict[str, Any]] = {}
        self.stopped: dict[str, str] = {}
        self.probes: list[dict[str, Any]] = []
        self.others: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._load() if path.exists() else []
        if not lines:
            self._append({"kind": "head", "settings": settings})
        elif lines[0].get("settings") != settings:
            raise ConfigError(
                f"{path} was measured with other settings ({_differences(lines[0].get('settings'), settings)}); "
                "name another --work file, or remove it"
            )
        for line in lines[1:]:
            self._take(line)

    def has(self, round_: int, item: str, arm: str) -> bool:
        """True if this turn was measured."""
        return (round_, item, arm) in self.turns

    def add(self, **line: Any) -> None:
        """Append a line and take it in; ``kind`` says what it is."""
        self._append(line)
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "turn":
            self.turns[line["round"], line["item"], line["arm"]] = line["reply"]
        elif kind == "arm":
            self.arms[line["arm"]] = line
            self.stopped.pop(line["arm"], None)
        elif kind == "stopped":
            self.stopped[line["arm"]] = line["reason"]
        elif kind == "probe":
            self.probes.append(line)
        else:
            self.others.append(line)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _load(self) -> list[dict[str, Any]]:
        text = self.path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        if rest:
            self.path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        found = []
        for number, line in enumerate(whole.split("\n") if whole else [], 1):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                raise DataError(f"{self.path} line {number} is not JSON; remove the file to start again") from None
        return found


def _differences(earlier: Any, now: dict[str, Any]) -> str:
    if not isinstance(earlier, dict):
        return "no settings"
    names = [name for name in now if earlier.get(name) != now[name]]
    return ", ".join(f"{name} {earlier.get(name)!r}, not {now[name]!r}" for name in names) or "another set of names"
