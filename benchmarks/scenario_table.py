"""The table of the acceptance scenarios at full size, from the last recorded run of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SCENARIO_COLUMNS", "scenario_rows"]

SCENARIO_COLUMNS = ("scenario", "run", "drafters", "verdict", "seen", "minutes", "commit")
_TITLES = {
    "S1": "S1 greedy output is plain output",
    "S2": "S2 sampled output has plain decoding's law",
    "S3": "S3 a seed fixes the output, alone and in company",
    "S4": "S4 penalties are exact, and hurt nobody else",
    "S5": "S5 log-probabilities are plain decoding's",
    "S6": "S6 token limits and choices",
    "S7": "S7 stop tokens and strings",
    "S11": "S11 odd prompts",
}


def scenario_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a recorded run; small runs and entries that are no scenarios are left out."""
    rows = []
    for name, entry in sorted(result.items(), key=lambda item: (int(item[0].split(",")[0][1:]), item[0])):
        scenario, *run = name.split(", ")
        if "small" in run:
            continue
        drafters = [str(drafter) for drafter in entry["drafters"]]
        rows.append(
            (
                _TITLES[scenario],
                ", ".join(each for each in run if each not in drafters),
                ", ".join(drafters),
                entry["verdict"],
                _seen(scenario, entry["seen"]),
                f"{entry['seconds'] / 60:.0f}",
                str(entry["run"]["git"]["commit"])[:10],
            )
        )
    return rows


def _seen(scenario: str, seen: Mapping[str, Any]) -> str:
    if "error" in seen:
        return str(seen["error"])
    if scenario == "S1":
        return f"{len(seen['arms'])} arms, {len(seen['ties'])} numeric ties"
    if scenario == "S2":
        return _seen_laws(seen)
    if scenario == "S5":
        return f"largest difference {seen['largest difference']:.1g}"
    return ""


def _seen_laws(seen: Mapping[str, Any]) -> str:
    parts = [f"{seen['seeded calls equal']} seeded calls equal"]
    laws = {name: each for name, each in seen.items() if isinstance(each, Mapping)}
    if laws:
        values = ", ".join(f"{each['p']:.2f}" for each in laws.values())
        parts.append(f"p of each drafter {values}; {sum(each['drafted'] for each in laws.values())} drafts")
    parts += [f"wrong temperature p = {each:.4f}" for name, each in seen.items() if name.endswith("wrong control")]
    return "; ".join(parts)
