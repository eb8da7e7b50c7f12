"""Tables of the proofs: planted faults of the audit and of the doctor, sound drafters, replay against live."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["doctor_rows", "drafter_rows", "fault_rows", "replay_rows"]

Rows = list[tuple[str, ...]]


def fault_rows(result: dict[str, Any]) -> Rows:
    """Planted fault, what it does, tokens until the alarm, what gave it away; the sound engine last."""
    rows: Rows = [("planted fault", "what it does", "sampling", "tokens", "what gave it away")]
    for row in sorted(result["rows"], key=lambda row: row["fault"] == "none"):
        said = row["cause"] if row["is_caught"] else f"no alarm, evidence 10^{row['evidence']:+.1f}"
        rows.append((row["fault"], row["what"], row["sampling"], str(row["tokens"]), said))
    return rows


def drafter_rows(result: dict[str, Any]) -> Rows:
    """Drafter, sampling, audit, how much, verdict."""
    rows: Rows = [("drafter", "sampling", "audit", "tokens", "drafts kept", "verdict")]
    for row in result["rows"]:
        if row["kind"] == "identity":
            said = f"{row['verdict']} ({row['num_identical']} of {row['num_outputs']} outputs)"
        else:
            said = f"{row['verdict']}, evidence 10^{row['evidence']:+.1f}"
        kept = f"{row['accepted']} of {row['drafted']}"
        rows.append((shown(row["drafter"]), row["sampling"], row["kind"], str(row["num_tokens"]), kept, said))
    return rows


def doctor_rows(result: dict[str, Any]) -> Rows:
    """Planted fault, what came out first, its evidence."""
    rows: Rows = [("planted", "came out first", "tokens a pass as served", "evidence")]
    for row in result["rows"]:
        first = row["first"]
        said = "healthy" if first is None else f"`{first['cause']}` {first['status']}"
        mark = "" if row["is_right"] else " (NOT the planted one)"
        rows.append(
            (row["fault"], said + mark, f"{row['acceptance']['served']:.2f}", row["evidence"].replace("|", "/"))
        )
    return rows


def replay_rows(result: dict[str, Any]) -> Rows:
    """Drafter, lengths, pairs of request and arm, totals, how many differ."""
    rows: Rows = [("drafter", "draft tokens", "precision", "pairs", "passes", "drafted", "accepted", "differ")]
    for row in result["drafters"]:
        totals = [f"{row['totals'][name]:.0f}" for name in ("passes", "drafted", "accepted")]
        lengths = ", ".join(map(str, row["k"]))
        lengths = f"planned, up to {lengths}" if row["schedule"] == "adaptive" else lengths
        about = (shown(row["draft"]), lengths, row["dtype"], str(row["pairs"]))
        rows.append((*about, *totals, str(len(row["differing"]))))
    return rows


def shown(drafter: str) -> str:
    """A head by the last part of its path."""
    return re.sub(r"[^:,]*/", "", drafter)
