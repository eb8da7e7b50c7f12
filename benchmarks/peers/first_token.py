"""Time to the first token of long prompts: every engine's plain configuration, one new token a request, no prefix kept.

Prompts are the beginnings of Spec-Bench's long ones, all cut to the same number of token ids. Turns are those of the other
comparison: one arm at a time, in an order drawn anew for each prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from benchmarks.peers.catalogue import Arm, all_arms
from benchmarks.peers.summary import probes_of
from benchmarks.peers.turns import Item, Plan, make_items
from benchmarks.peers.workfile import WorkFile
from benchmarks.prompts import encode, load_group
from benchmarks.report import Bar, wide_console
from benchmarks.stats import PairedRatio, paired_ratio, spread
from outrider.errors import ConfigError
from outrider.models.checkpoint import Checkpoint

__all__ = [
    "FIRST_TOKEN_COLUMNS",
    "cut_items",
    "first_token_arms",
    "first_token_cells",
    "first_token_plan",
    "first_token_result",
    "print_first_token",
]

CATEGORIES = ("summarization", "rag")
BAR = 1.1
"""Outrider's time to the first token over the fastest peer's must not be above this."""

FIRST_TOKEN_COLUMNS = ("arm", "first token", "quartiles", "as the engine says", "over the fastest peer", "turns")
WHOLE: dict[str, dict[str, Any]] = {
    "llamacpp": {"arguments": ["--batch-size", "2048", "--ubatch-size", "2048"]},
    "openvino": {"max_batched_tokens": 2048},
}
"""llama.cpp reads prompts in parts of 512 tokens by default, OpenVINO in parts of 256: both are run on whole prompts, too."""

Waits = Mapping[tuple[int, str], float]
"""Milliseconds by round and prompt."""


def first_token_arms() -> list[Arm]:
    """The plain arms, and for the peers that read prompts in parts an arm that reads them whole."""
    found = []
    for arm in all_arms(num_draft_tokens=1):
        if not arm.is_plain:
            continue
        found.append(arm)
        if arm.peer in WHOLE:
            name = f"{arm.name}-whole"
            found.append(replace(arm, name=name, plain=name, options={**arm.options, **WHOLE[arm.peer]}))
    return found


def first_token_plan(args: argparse.Namespace, checkpoint: Checkpoint, *, threads: int) -> Plan:
    """``--prompts`` prompts of ``--first-token`` ids each, and one more to warm the arms up with.

    Raises:
        ConfigError: several streams, or too few prompts of that length.
    """
    if args.streams != 1:
        raise ConfigError(f"--first-token times one request at a time; --streams {args.streams} does not go with it")
    rows = [row for row in load_group("spec_bench", traffic=args.traffic, full=True) if row.category in CATEGORIES]
    rendered = [(row.id, row.category, encode(checkpoint.tokenizer, row)) for row in rows]
    *items, warm = cut_items(rendered, args.first_token, args.prompts + 1)
    return Plan(
        items=items,
        warm=warm.prompts[0],
        tokens=1,
        streams=1,
        rounds=args.rounds,
        threads=threads,
        stop_ids=tuple(checkpoint.config.eos_token_ids),
    )


def cut_items(prompts: Sequence[tuple[str, str, list[int]]], length: int, count: int) -> list[Item]:
    """The first ``count`` prompts that are long enough, cut to ``length`` ids.

    Raises:
        ConfigError: there are fewer.
    """
    long = [(name, task, ids[:length]) for name, task, ids in prompts if len(ids) >= length]
    if len(long) < count:
        raise ConfigError(
            f"{len(long)} prompts have {length} tokens, {count} are needed (one warms up); "
            "give a smaller --first-token, or fewer --prompts"
        )
    return make_items(long[:count], 1)


def first_token_result(arms: Sequence[Arm], work: WorkFile) -> dict[str, Any]:
    """Rows in the order of arms; the fastest peer is picked on every second prompt, ratios are over the others."""
    waits = {arm.name: waits_of(work, arm.name) for arm in arms}
    picking = set(sorted({key for each in waits.values() for key in each})[::2])
    best = _fastest([arm.name for arm in arms if arm.peer != "outrider"], waits, picking)
    ratios = {name: _ratio(each, waits[best], picking) for name, each in waits.items() if best and name != best}
    bars = [
        Bar.of_ratio(f"first token, {arm.name} over {best}", ratio, BAR, at_least=False)
        for arm in arms
        if arm.peer == "outrider" and (ratio := ratios.get(arm.name))
    ]
    return {
        "fastest_peer": best,
        "rows": [_row(arm.name, work, waits[arm.name], ratios.get(arm.name)) for arm in arms],
        "bars": [bar.to_json() for bar in bars],
        "arms": {arm.name: work.arms[arm.name] for arm in arms if arm.name in work.arms},
        "probes": probes_of(work),
        "waits_ms": {
            name: {f"{turn + 1}, {item}": round(ms, 2) for (turn, item), ms in each.items()}
            for name, each in waits.items()
        },
    }


def waits_of(work: WorkFile, arm: str) -> Waits:
    """Milliseconds of each turn of one arm: the whole request of one new token, as its caller waits."""
    return {(turn, item): reply["wall_s"] * 1e3 for (turn, item, name), reply in work.turns.items() if name == arm}


def _fastest(peers: Sequence[str], waits: Mapping[str, Waits], picking: set[tuple[int, str]]) -> str:
    """The peer with the least median on the prompts that are for picking; empty without any."""
    medians = {
        name: spread(chosen).median
        for name in peers
        if (chosen := [ms for key, ms in waits[name].items() if key in picking])
    }
    return min(medians, key=lambda name: medians[name]) if medians else ""


def _ratio(ours: Waits, theirs: Waits, picking: set[tuple[int, str]]) -> PairedRatio | None:
    """Median of the ratios over the prompts that nothing was picked on."""
    both = [key for key in ours if key in theirs and key not in picking]
    return paired_ratio([ours[key] for key in both], [theirs[key] for key in both]) if both else None


def _row(arm: str, work: WorkFile, waits: Waits, ratio: PairedRatio | None) -> dict[str, Any]:
    reason = work.stopped.get(arm) or work.arms.get(arm, {}).get("unavailable") or ""
    if not waits:
        return {"arm": arm, "turns": 0, "unavailable": reason or "not measured yet"}
    answers = [reply["answers"][0] for (_, _, name), reply in work.turns.items() if name == arm]
    told = [answer["first_s"] * 1e3 for answer in answers if answer.get("first_s") is not None]
    return {
        "arm": arm,
        "turns": len(waits),
        "unavailable": reason,
        "first_token_ms": spread(list(waits.values())).to_json(),
        "told_ms": spread(told).to_json() if told else None,
        "ratio": None if ratio is None else ratio.to_json(),
    }


def first_token_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table: arm, median, quartiles, what the engine itself says, ratio to the fastest peer, turns."""
    if not row["turns"]:
        return (row["arm"], f"not available: {row['unavailable']}", "", "", "", "")
    waited, told, ratio = row["first_token_ms"], row["told_ms"], row["ratio"]
    return (
        row["arm"],
        f"{waited['median']:.0f} ms",
        f"{waited['lower_quartile']:.0f} to {waited['upper_quartile']:.0f}",
        "" if told is None else f"{told['median']:.0f} ms",
        "" if ratio is None else f"{ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})",
        f"{row['turns']}" + (f", then stopped: {row['unavailable']}" if row["unavailable"] else ""),
    )


def print_first_token(result: Mapping[str, Any], *, title: str) -> None:
    """The table, then the bars."""
    table = Table(title=title, title_justify="left")
    for column in FIRST_TOKEN_COLUMNS:
        table.add_column(column, overflow="fold")
    for row in result["rows"]:
        table.add_row(*first_token_cells(row))
    wide_console().print(table)
    for bar in result["bars"]:
        print(f"{bar['name']}: {bar['value']:.2f}x, bar {bar['limit']:g}x: {bar['verdict']}")
