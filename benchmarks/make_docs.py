"""Renders tables of results into Markdown, between ``<!-- benchmarks:NAME -->`` and ``<!-- /benchmarks -->``.

NAME is ``engine_speed``, ``passes``, ``drafters``, ``spec_bench_tasks`` (all 480 prompts), ``drafts`` (heads beside
suffix), ``acceptance``, ``profile``, ``roofline``, ``parts``, ``perplexity``, ``peers``, ``peers_short`` (each engine's
fastest arms), ``peers_256`` (longer answers), ``peers_8`` (eight streams), ``first_token``, ``shape_1b``,
``scenarios``, one about heads: ``ablations``, ``train_speed``, ``temperatures``, ``changed_target``,
``interop_vllm``, ``head_scenarios``, or of the proofs ``audit_faults``, ``audit_drafters``, ``doctor_faults`` or
``replay_live``.
Numbers in documents are never typed by hand: ``python -m benchmarks.make_docs README.md docs/*.md`` writes them, ``--check``
says whether they are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import proof_tables
from benchmarks.head_tables import (
    table_of_ablations,
    table_of_changed_target,
    table_of_head_scenarios,
    table_of_interop,
    table_of_temperatures,
    table_of_train_speed,
)
from benchmarks.peers.tables import table_of_fastest_peers, table_of_first_token, table_of_peers
from benchmarks.report import RESULTS
from benchmarks.scenario_table import SCENARIO_COLUMNS, scenario_rows
from benchmarks.tables import bar_lines, markdown, number, provenance_line

MARK = re.compile(r"(<!-- benchmarks:(\w+) -->\n)(.*?)(<!-- /benchmarks -->)", re.DOTALL)


def newest(kind: str, folder: Path) -> dict[str, Any]:
    """The result of this kind that was started last.

    Raises:
        ValueError: there is none.
    """
    paths = [*folder.glob(f"{kind}-*.json"), *folder.glob(f"{kind}.json")]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if not found:
        raise ValueError(f"no result of kind {kind} in {folder}; run python -m benchmarks.{kind} first")
    return max((_flat(result) for result in found), key=lambda result: str(result.get("started")))


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    """Some results keep what describes their run in an entry of its own."""
    return {**result.get("run", {}), **result}


def table_of_bars(result: dict[str, Any]) -> str:
    """What, measured, interval, bar, verdict; then machine and versions."""
    rows = [("what", "measured", "95 % interval", "bar", "verdict")]
    for section in result["sections"].values():
        for bar in section["bars"]:
            interval = "" if bar["low"] is None else f"{number(bar['low'])} to {number(bar['high'])}"
            limit = f"{'≥' if bar['at_least'] else '≤'} {bar['limit']:g} {bar['unit']}"
            rows.append((bar["name"], f"{number(bar['value'])} {bar['unit']}", interval, limit, bar["verdict"]))
    return markdown(rows) + "\n" + provenance_line(result)


def table_of_passes(result: dict[str, Any]) -> str:
    """Milliseconds of a pass by rows and precision, with the ratio to one row."""
    summary = _section(result, "passes")["summary"]
    counts = list(next(iter(summary.values())))
    rows = [("rows of the pass", *counts)]
    for precision, each in summary.items():
        cells = [f"{each[n]['ms']['median']:.1f} ms ({each[n]['ratio_to_one_row']['value']:.2f}x)" for n in counts]
        rows.append((precision, *cells))
    return markdown(rows) + "\n" + provenance_line(result)


def table_of_drafters(result: dict[str, Any]) -> str:
    """Tokens a pass and speed-up of each drafter on each kind of prompt."""
    rows = [
        (
            "prompts",
            "drafter",
            "tokens a pass",
            "plain tokens/s",
            "tokens/s",
            "speed-up (95 % interval)",
            "equal outputs",
        )
    ]
    for name in ("copy", "spec_bench", "prose"):
        if name not in result["sections"]:
            continue
        section = result["sections"][name]
        plain = section["summary"]["plain"]
        for drafter, each in section["summary"].items():
            if drafter in ("plain", "by_category"):
                continue
            ratio = each["speed_up"]
            rows.append(
                (
                    section["title"],
                    drafter,
                    f"{each['tokens_per_pass']:.2f}",
                    f"{plain['tokens_per_s']:.0f}",
                    f"{each['tokens_per_s']:.0f}",
                    f"{ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
                    each["outputs_equal_to_plain"],
                )
            )
    return markdown(rows) + "\n" + provenance_line(result)


def table_of_tasks(result: dict[str, Any]) -> str:
    """Tokens a pass and speed-up of each drafter on each task of Spec-Bench, then over all."""
    summary = _section(result, "spec_bench")["summary"]
    tasks = {
        **summary["by_category"],
        "all": {name: summary[name] for name in summary if name not in ("plain", "by_category")},
    }
    drafters = list(tasks["all"])
    rows = [("task", "prompts", *(f"{name}: {what}" for name in drafters for what in ("tokens a pass", "speed-up")))]
    for task, each in tasks.items():
        cells = []
        for name in drafters:
            ratio = each[name]["speed_up"]
            cells += [
                f"{each[name]['tokens_per_pass']:.2f}",
                f"{ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
            ]
        rows.append((task, str(each[drafters[0]]["speed_up"]["pairs"]), *cells))
    equal = ", ".join(f"{name} {summary[name]['outputs_equal_to_plain']}" for name in drafters)
    return markdown(rows) + f"\nOutputs equal to plain decoding's, token by token: {equal}.\n" + provenance_line(result)


def table_of_drafts(result: dict[str, Any]) -> str:
    """Tokens a pass and speed-up of each arm of the section ``drafts`` by task, then over all, one table a precision."""
    parts = []
    for precision, arms in _section(result, "drafts")["summary"].items():
        tasks = list(next(iter(arms.values())))
        rows = [(precision, *tasks, "tokens/s", "equal outputs")]
        for arm, each in arms.items():
            cells = [
                f"{each[task]['tokens_per_pass']:.2f}, {each[task]['speed_up']['value']:.2f}x" for task in tasks[:-1]
            ]
            ratio = each["all"]["speed_up"]
            interval = "" if arm == "none" else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
            whole = f"{each['all']['tokens_per_pass']:.2f}, {ratio['value']:.2f}x{interval}"
            speed = f"{each['all']['tokens_per_s']:.0f}"
            rows.append((arm, *cells, whole, speed, each["all"]["outputs_equal_to_plain"]))
        parts.append(markdown(rows))
    return "\n".join(parts) + provenance_line(result)


def table_of_acceptance(result: dict[str, Any]) -> str:
    """Accepted length and tokens a pass of each drafter by category, then acceptance by position over all prompts."""
    measurements = result["measurements"]
    categories = list(measurements[0]["categories"])
    rows = [("drafter", *categories)]
    positions = [("drafter", *(f"draft {depth}" for depth in range(1, 9)))]
    for each in measurements:
        found = [each["categories"][name] for name in categories]
        rows.append(
            (each["drafter"], *(f"{one['accepted_length']:.2f} ({one['tokens_per_pass']:.2f})" for one in found))
        )
        rates = [f"{one['accepted'] / one['reached']:.2f}" for one in found[-1]["per_position"][:8] if one["reached"]]
        positions.append((each["drafter"], *rates, *[""] * (8 - len(rates))))
    counts = ", ".join(f"{name} {count}" for name, count in measurements[0]["prompts"].items())
    note = f"\nAccepted length (tokens a pass in brackets) by task; prompts: {counts}. Then kept of reached, by position.\n\n"
    return markdown(rows) + note + markdown(positions) + provenance_line(result)


def table_of_profile(result: dict[str, Any]) -> str:
    """Milliseconds and share of each part of a step."""
    profiles = result["profiles"]
    rows = [("part", *(f"{p['precision']}, batch {p['batch']}, drafter {p['drafter']}" for p in profiles))]
    for part in profiles[0]["parts_ms"]:
        cells = [(p["parts_ms"][part], sum(p["parts_ms"].values())) for p in profiles]
        rows.append((part, *(f"{ms:.2f} ms ({ms / total:.0%})" for ms, total in cells)))
    rows.append(("whole step, median", *(f"{p['step_ms']['median']:.2f} ms" for p in profiles)))
    return markdown(rows) + "\n" + provenance_line(result)


def table_of_roofline(result: dict[str, Any]) -> str:
    """Milliseconds of a native pass by rows, beside the time to read its weights once."""
    counts = [name.removeprefix("native ") for name in result["results"][0]["times_ms"] if name.startswith("native ")]
    rows = [("precision", "weights", "read once", *(f"{count} rows" if count != "1" else "1 row" for count in counts))]
    for each in result["results"]:
        times, megabytes = each["times_ms"], each["weight_bytes"] / 1e6
        read_ms = times["stream"]["median"]
        cells = [times[f"native {count}"]["median"] for count in counts]
        shown = (f"{ms:.1f} ms ({ms / read_ms:.2f} x reading, {ms / cells[0]:.2f} x first)" for ms in cells)
        read = f"{read_ms:.1f} ms ({megabytes / read_ms:.0f} GB/s)"
        rows.append((each["precision"], f"{megabytes:.0f} MB", read, *shown))
    return markdown(rows) + "\n" + provenance_line(result)


def table_of_parts(result: dict[str, Any]) -> str:
    """Where the time of a native pass over one row and over eight goes, and at which rate each part reads its weights."""
    columns = [(each, count) for each in result["results"] for count in ("1", "8") if count in each["parts_ms"]]
    rows = [("part", *(f"{each['precision']}, {count} row{'s' if count != '1' else ''}" for each, count in columns))]
    for part in result["results"][0]["part_bytes"]:
        rows.append((part, *(_part_cell(each, count, part) for each, count in columns)))
    return markdown(rows) + "\n" + provenance_line(result)


def _part_cell(each: dict[str, Any], count: str, part: str) -> str:
    ms, size = each["parts_ms"][count][part], each["part_bytes"][part]
    return f"{ms:.2f} ms" + (f" ({size / ms / 1e6:.0f} GB/s)" if size else "")


def table_of_perplexity(result: dict[str, Any]) -> str:
    """Perplexity and divergence of each precision, 4-bit rows with their note."""
    rows = [("precision", "MB a pass", "perplexity", "KL to float32, nats", "same likeliest token")]
    notes = []
    for each in result["results"]:
        star = "*" if each.get("note") else ""
        notes += [each["note"]] if star and each["note"] not in notes else []
        rows.append(
            (
                each["precision"] + star,
                f"{each['weight_bytes'] / 1e6:.0f}",
                f"{each['perplexity']:.3f}",
                f"{each['kl_nats']:.5f}",
                f"{each['same_best_token']:.1%}",
            )
        )
    notes = [f"\\{note}" for note in notes]
    return markdown(rows) + "\n" + "\n".join(notes) + "\n" + provenance_line(result)


def table_of_shape(result: dict[str, Any]) -> str:
    """The 1B shape: passes over one row and eight beside reading the weights, plain decoding beside llama.cpp's."""
    rows = [("precision", "read once", "1 row", "8 rows", "tokens/s", "llama.cpp", "over llama.cpp")]
    for each in result["results"]:
        times, megabytes, ratio = each["times_ms"], each["weight_bytes"] / 1e6, each["ratio"]
        read, one, eight = (times[name]["median"] for name in ("stream", "native 1", "native 8"))
        rows.append(
            (
                each["precision"],
                f"{read:.1f} ms ({megabytes / read:.0f} GB/s)",
                f"{one:.1f} ms ({each['one_row_over_stream']['value']:.2f} x reading)",
                f"{eight:.1f} ms ({each['eight_rows_over_one']['value']:.2f} x 1 row)",
                _rate_cell(each["tokens_per_s"]),
                f"{each['weights']}: {_rate_cell(each['llamacpp_tokens_per_s'])}",
                f"{ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
            )
        )
    return markdown(rows) + "\n" + "\n".join(bar_lines(result)) + "\n" + provenance_line(result)


def table_of_scenarios(result: dict[str, Any]) -> str:
    """The last run of each acceptance scenario at full size."""
    return markdown([SCENARIO_COLUMNS, *scenario_rows(result)])


def _rate_cell(rate: dict[str, Any]) -> str:
    return f"{rate['median']:.1f} ({rate['lower_quartile']:.1f} to {rate['upper_quartile']:.1f})"


def _plain_table(rows_of: Callable[[dict[str, Any]], Sequence[Sequence[str]]]) -> Callable[[dict[str, Any]], str]:
    return lambda result: markdown(rows_of(result)) + provenance_line(result)


RENDERERS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "engine_speed": ("engine_speed", table_of_bars),
    "passes": ("engine_speed", table_of_passes),
    "drafters": ("engine_speed", table_of_drafters),
    "spec_bench_tasks": ("spec_bench_480", table_of_tasks),
    "drafts": ("drafts", table_of_drafts),
    "acceptance": ("acceptance", table_of_acceptance),
    "profile": ("profile_step", table_of_profile),
    "roofline": ("native_pass", table_of_roofline),
    "parts": ("native_pass", table_of_parts),
    "perplexity": ("perplexity", table_of_perplexity),
    "peers": ("peers", table_of_peers),
    "peers_short": ("peers", table_of_fastest_peers),
    "peers_256": ("peers_256", table_of_peers),
    "peers_8": ("peers_8", table_of_peers),
    "shape_1b": ("shape_1b", table_of_shape),
    "first_token": ("first_token", table_of_first_token),
    "scenarios": ("scenarios", table_of_scenarios),
    "ablations": ("ablations", table_of_ablations),
    "temperatures": ("temperatures", table_of_temperatures),
    "changed_target": ("perturbed", table_of_changed_target),
    "train_speed": ("train_speed", table_of_train_speed),
    "interop_vllm": ("interop_vllm", table_of_interop),
    "head_scenarios": ("head_scenarios", table_of_head_scenarios),
    "audit_faults": ("audit_faults", _plain_table(proof_tables.fault_rows)),
    "audit_drafters": ("audit_drafters", _plain_table(proof_tables.drafter_rows)),
    "doctor_faults": ("doctor_faults", _plain_table(proof_tables.doctor_rows)),
    "replay_live": ("replay_live", _plain_table(proof_tables.replay_rows)),
}


def render(text: str, folder: Path) -> str:
    """The document with every marked table written anew.

    Raises:
        ValueError: an unknown name, or no result to render.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in RENDERERS:
            raise ValueError(f"table {name!r} is unknown; allowed: {', '.join(RENDERERS)}")
        kind, renderer = RENDERERS[name]
        return f"{match.group(1)}{renderer(newest(kind, folder))}{match.group(4)}"

    return MARK.sub(replace, text)


def _section(result: dict[str, Any], name: str) -> dict[str, Any]:
    if name not in result["sections"]:
        raise ValueError(f"the newest {result['kind']} result has no section {name}")
    section: dict[str, Any] = result["sections"][name]
    return section


def main(argv: list[str] | None = None) -> int:
    """Write the tables of the named documents, or check them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.make_docs", description=__doc__)
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a table is out of date")
    args = parser.parse_args(argv)
    stale = []
    try:
        for path in args.documents:
            text = path.read_text(encoding="utf-8")
            rendered = render(text, args.results)
            if rendered != text:
                stale.append(path)
                if not args.check:
                    path.write_text(rendered, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in stale:
        print(f"{path}: {'out of date' if args.check else 'written'}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
