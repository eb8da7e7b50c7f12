"""Does serving with speculation pay, and does it ever cost? Load on one server, alternating between arms.

    python -m benchmarks.serve_load --traffic DIR --target smollm2-135m-instruct --draft suffix \
        --concurrency 1 2 4 8 16 32 --arms off idle fixed:4 fixed:8 adaptive --mixes creative code tool_calls copy

The script starts the server in a process of its own and measures in slices: at one concurrency and with one mix of prompts
each arm gets ``--seconds``, in an order that changes every round, so that a slow moment of the machine hits all alike. What
counts is what the server generated in a slice. Ratios are pooled over rounds with a bootstrap interval; of fixed lengths the
best is picked on the even rounds and compared on the odd ones. The client's own processor time is reported, since it is taken
from the server on a small machine.

A mix with a head of random weights is this script with ``--draft`` naming that head. Prompts of ``creative`` and ``copy`` are
this repository's; ``code`` and ``tool_calls`` come from ``--traffic`` (humaneval.jsonl, tool_calls.jsonl).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.load.client import Client
from benchmarks.load.slices import Arm, SliceResult, parse_arm, run_slice
from benchmarks.prompts import load_group
from benchmarks.provenance import ROOT, describe_run
from benchmarks.report import RESULTS, write_json
from benchmarks.stats import alternate, pooled_ratio, spread

__all__ = ["compare_arms", "main"]

MIXES: dict[str, tuple[str, dict[str, Any]]] = {
    "creative": ("prose", {"temperature": 1.0}),
    "code": ("humaneval", {"temperature": 0}),
    "tool_calls": ("tool_calls", {"temperature": 0}),
    "copy": ("copy_heavy", {"temperature": 0}),
}
"""Name of a mix: group of prompts, sampling fields."""


def main(arguments: list[str] | None = None) -> None:
    """Run the slices and write a result file."""
    given = _parser().parse_args(arguments)
    head = describe_run("benchmarks.serve_load", list(arguments if arguments is not None else sys.argv[1:]))
    process, place = _start(given)
    try:
        client = Client(place["host"], place["port"])
        head |= {"settings": place["settings"]}
        head["cells"] = asyncio.run(_all_cells(client, given))
        print(json.dumps([{k: v for k, v in cell.items() if k != "slices"} for cell in head["cells"]], indent=1))
        write_json(given.output or RESULTS / f"serve_load-{int(time.time())}.json", head)
    finally:
        process.terminate()
        process.wait(60)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("-k", "--num-draft-tokens", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--traffic", type=Path, help="folder of normalised prompt files; without it they are fetched")
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--arms", nargs="+", type=parse_arm, default=[parse_arm("off"), parse_arm("adaptive")])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a slice")
    parser.add_argument("--rounds", type=int, default=12, help="slices of each arm in a cell")
    parser.add_argument("--tokens", type=int, default=128, help="max_tokens of a request")
    parser.add_argument("--output", type=Path)
    return parser


def _start(given: argparse.Namespace) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """The server's process and what it says of itself."""
    values = {
        "target": given.target,
        "draft": given.draft,
        "dtype": given.dtype,
        "num_draft_tokens": given.num_draft_tokens,
        "tool_rendering": "system",
        **({"threads": given.threads} if given.threads else {}),
    }
    command = [sys.executable, "-m", "benchmarks.load.host", "--settings", json.dumps(values)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"the server did not start (status {process.wait()})")
    place: dict[str, Any] = json.loads(line)
    return process, place


def _rows(mix: str, traffic: Path | None) -> list[dict[str, Any]]:
    group, _ = MIXES[mix]
    rows = load_group(group, traffic=traffic)
    return [{"messages": row.messages, "tools": row.tools} for row in rows]


async def _all_cells(client: Client, given: argparse.Namespace) -> list[dict[str, Any]]:
    cells = []
    for mix in given.mixes:
        rows = _rows(mix, given.traffic)
        for concurrency in given.concurrency:
            cell = {"mix": mix, "concurrency": concurrency}
            slices = await _cell(client, rows, concurrency, MIXES[mix][1], given)
            cells.append({**cell, **compare_arms(slices), "slices": [each.to_json() for each in slices]})
    return cells


async def _cell(
    client: Client, rows: Sequence[dict[str, Any]], concurrency: int, fields: dict[str, Any], given: argparse.Namespace
) -> list[SliceResult]:
    sampling = {**fields, "max_tokens": given.tokens}
    arms: dict[str, Arm] = {arm.name: arm for arm in given.arms}

    async def one(name: str, turn: int, seconds: float) -> SliceResult:
        return await run_slice(
            client, arms[name], rows, concurrency=concurrency, seconds=seconds, sampling=sampling, seed=turn
        )

    for name in arms:  # warm up: caches, compiled passes, the planner's evidence
        await one(name, 0, min(5.0, given.seconds))
    return [
        await one(name, turn, given.seconds) for turn in range(given.rounds) for name in alternate(list(arms), turn)
    ]


def compare_arms(slices: Sequence[SliceResult]) -> dict[str, Any]:
    """Speed of each arm with its spread, each by ``off``, and ``adaptive`` by the best fixed length.

    Slices are paired by their round: the i-th of each arm.
    """
    speeds: dict[str, list[float]] = {}
    for each in slices:
        speeds.setdefault(each.arm, []).append(each.tokens_per_s)
    out: dict[str, Any] = {
        "arms": {name: {"tokens_per_s": spread(values).to_json()} for name, values in speeds.items()}
    }
    out["client_cpu_share"] = round(sum(s.client_cpu_s for s in slices) / sum(s.seconds for s in slices), 4)
    for name, values in speeds.items():
        if "off" in speeds and name != "off":
            out["arms"][name]["by_off"] = pooled_ratio(values, speeds["off"]).to_json()
    fixed = {name: values for name, values in speeds.items() if name.startswith("fixed")}
    if fixed and "adaptive" in speeds and len(speeds["adaptive"]) > 1:
        best = max(fixed, key=lambda name: sum(fixed[name][::2]))
        ratio = pooled_ratio(speeds["adaptive"][1::2], fixed[best][1::2])
        out["adaptive_by_best_fixed"] = {"best": best, **ratio.to_json()}
    return out


if __name__ == "__main__":
    main()
