"""Tables of other engines for the documents."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.first_token import FIRST_TOKEN_COLUMNS, first_token_cells
from benchmarks.tables import bar_lines, markdown, number, provenance_line

__all__ = ["table_of_fastest_peers", "table_of_first_token", "table_of_peers"]


def table_of_peers(result: dict[str, Any]) -> str:
    """One line an arm, those that could not be had included; then Outrider against the fastest peer, and the machine."""
    rows = [("arm", "tokens/s", "quartiles", "with prompt", "first token", "x own plain", "tokens/pass", "agrees")]
    for row in result["rows"]:
        rows.append(_peer_cells(row))
    lines = [
        f"- {each['arm']}: {each['ratio']['value']:.2f}x ({each['ratio']['low']:.2f} to {each['ratio']['high']:.2f}) "
        f"of {each['against']}, the fastest peer"
        for each in result["against_fastest_peer"]
    ]
    lines += [f"- {name}: median {each['median']:.3g}" for name, each in result["probes"].items()]
    lines += [
        f"- llama-bench {name}, empty context: {each:.0f} tokens/s" for name, each in result["llama_bench"].items()
    ]
    return markdown(rows) + "\n" + "\n".join(lines) + "\n" + provenance_line(result)


def _peer_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if not row["turns"]:
        return (row["arm"], f"not available: {row['unavailable']}", *[""] * 6)
    ratio = row["speed_up"]
    return (
        row["arm"],
        number(row["tokens_per_s"]),
        f"{number(row['lower_quartile'])} to {number(row['upper_quartile'])}",
        number(row["request_tokens_per_s"]),
        "" if row["first_token_ms"] is None else f"{number(row['first_token_ms'])} ms",
        "" if ratio is None else f"{ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
        "" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}",
        "" if row["agreement"] is None else f"{row['agreement']:.0%} ({row['identical']})",
    )


def table_of_fastest_peers(result: dict[str, Any]) -> str:
    """Each peer's fastest plain arm and its fastest of all, then every arm of Outrider with its ratio to the fastest peer."""
    ratios = {each["arm"]: each["ratio"] for each in result["against_fastest_peer"]}
    arms = [row for row in result["rows"] if row["turns"]]
    shown = []
    for peer in dict.fromkeys(row["arm"].split("-")[0] for row in arms):
        own = sorted((row for row in arms if row["arm"].startswith(f"{peer}-")), key=lambda row: -row["tokens_per_s"])
        plain = [row for row in own if row["arm"].endswith("-plain")][:1]
        shown += own if peer == "outrider" else list({row["arm"]: row for row in (*plain, own[0])}.values())
    rows = [("arm", "tokens/s", "quartiles", "tokens/pass", "over the fastest peer")]
    for row in shown:
        name, rate, quartiles, *_, per_pass, _ = _peer_cells(row)
        ratio = ratios.get(row["arm"])
        compared = "" if ratio is None else f"{ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"
        rows.append((name.split(":")[0], rate, quartiles, per_pass, compared))
    return markdown(rows) + provenance_line({**result, "command": result["command"].split(" --only")[0] + " ..."})


def table_of_first_token(result: dict[str, Any]) -> str:
    """Milliseconds to the first token of each plain arm, and Outrider's ratios to the fastest peer against the bar."""
    rows = [FIRST_TOKEN_COLUMNS, *(first_token_cells(row) for row in result["rows"])]
    lines = [f"- {name}: median {each['median']:.3g}" for name, each in result["probes"].items()]
    return markdown(rows) + "\n" + "\n".join([*bar_lines(result), *lines]) + "\n" + provenance_line(result)
