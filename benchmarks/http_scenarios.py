"""Acceptance scenarios over HTTP: the server as a user starts it, against the library's own plain output.

    python -m benchmarks.http_scenarios --traffic DIR --small --output scenarios.json
    python -m benchmarks.http_scenarios --traffic DIR --drafters suffix ngram --only S1 S5 leaving

For each drafter the command ``outrider serve`` is started in a process of its own, and every scenario asks it, streamed and
whole, what the library answers in this process without any drafter. Tokens, text, reasons and counts must be equal,
log-probabilities within 1e-3. After each scenario a plain request must be answered as ever and no memory may be held.

Outcomes are written one by one. A scenario that has passed in the same form is not run again by the same command: start it
anew (``--again`` runs all). Each step is told on standard error, and the server's own log lies beside the output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.load.process import ServerProcess, serving
from benchmarks.prompts import add_prompt_options, load_group
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, write_json
from benchmarks.scenario_parts import DRAFTERS, TREE
from benchmarks.wire import behaviour, output
from benchmarks.wire.asking import Library
from benchmarks.wire.setup import SMALL, Sizes, Wire
from outrider import load_target

__all__ = ["SCENARIOS", "run_scenario"]

SCENARIOS: Mapping[str, Callable[[Wire], Awaitable[dict[str, Any]]]] = {
    "S1": output.greedy_identity,
    "S2": output.sampled_law,
    "S3": output.seeds,
    "S4": output.penalties,
    "S5": output.logprobs,
    "S6": output.limits_and_choices,
    "S7": output.stops,
    "S8": behaviour.streaming,
    "S9": behaviour.tool_calls,
    "S10": behaviour.json_under_load,
    "S11": behaviour.odd_prompts,
    "mates": behaviour.batch_mates,
    "leaving": behaviour.leaving,
    "limits": behaviour.limits,
    "prefixes": behaviour.prefixes,
    "wishes": behaviour.wishes,
    "refusals": behaviour.refusals,
}
MAX_WAITING, MAX_BATCH_SIZE = 64, 16


async def run_scenario(name: str, wire: Wire) -> dict[str, Any]:
    """One scenario: its verdict, how long it took, and what it saw."""
    begun = time.perf_counter()
    try:
        seen, verdict = await SCENARIOS[name](wire), "passed"
        await wire.is_well()
    except Exception as error:
        seen, verdict = {"error": f"{type(error).__name__}: {error}"[:2000]}, "failed"
    return {"verdict": verdict, "seconds": round(time.perf_counter() - begun, 1), "seen": seen}


def main(arguments: list[str] | None = None) -> int:
    """Run the scenarios; 1 if one of them failed."""
    given = _parser().parse_args(arguments)
    sizes = SMALL if given.small else Sizes()
    head = describe_run("benchmarks.http_scenarios", list(arguments if arguments is not None else sys.argv[1:]))
    form = {"target": given.target, "dtype": given.dtype, "schedule": given.schedule, "sizes": asdict(sizes)}
    found = _before(given.output, json.loads(json.dumps(form)))
    rows = [{"messages": r.messages, "tools": r.tools} for r in load_group("tool_calls", traffic=given.traffic)]
    library = Library(load_target(given.target, dtype=given.dtype, tool_rendering="system"))
    for drafter in given.drafters:
        entries = found.setdefault(drafter, {})
        names = [n for n in given.only if given.again or entries.get(n, {}).get("verdict") != "passed"]
        if not names:
            continue
        log = given.output.with_suffix(".server.log")
        with serving(_flags(given, drafter), log=log) as server:
            wire = Wire(
                client=server.client,
                library=library,
                sizes=sizes,
                drafter=drafter,
                rows=rows,
                max_waiting=MAX_WAITING,
                max_batch_size=MAX_BATCH_SIZE,
            )
            for name in names:
                entries[name] = _run(name, wire, server)
                write_json(given.output, {"run": head, "form": form, "drafters": found})
    Console(width=110).print(_table(found))
    outcomes = [entry["verdict"] for entries in found.values() for entry in entries.values()]
    return int(any(verdict != "passed" for verdict in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http_scenarios",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_prompt_options(parser)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="precision of the target (default float32)")
    parser.add_argument("--schedule", default="fixed", choices=("fixed", "adaptive"), help="who decides about drafting")
    parser.add_argument("--drafters", nargs="+", default=["none", *DRAFTERS, TREE], metavar="SPEC")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--small", action="store_true", help="a few requests each: minutes instead of hours")
    parser.add_argument("--again", action="store_true", help="run what has passed, too")
    parser.add_argument("--output", type=Path, default=RESULTS / "http_scenarios.json")
    return parser


def _flags(given: argparse.Namespace, drafter: str) -> list[str]:
    """The command line of the server."""
    flags = ["--target", given.target, "--dtype", given.dtype, "--tool-rendering", "system"]
    flags += ["--max-waiting", str(MAX_WAITING), "--max-batch-size", str(MAX_BATCH_SIZE)]
    return flags if drafter == "none" else [*flags, "--draft", drafter, "-k", "8", "--schedule", given.schedule]


def _run(name: str, wire: Wire, server: ServerProcess) -> dict[str, Any]:
    print(f"{wire.drafter}: {name} {SCENARIOS[name].__doc__}", file=sys.stderr, flush=True)
    entry = asyncio.run(run_scenario(name, wire))
    if server.process.poll() is not None:
        entry = {**entry, "verdict": "failed", "server": f"ended with status {server.process.returncode}"}
    print(f"  {entry['verdict']} in {entry['seconds']} s: {entry['seen']}", file=sys.stderr, flush=True)
    return entry


def _before(path: Path, form: Mapping[str, Any]) -> dict[str, Any]:
    """Outcomes of an earlier run of the same form."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    outcomes: dict[str, Any] = data["drafters"] if data["form"] == form else {}
    return outcomes


def _table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("scenario", *found)
    names = [name for name in SCENARIOS if any(name in entries for entries in found.values())]
    for name in names:
        table.add_row(name, *(_cell(entries.get(name)) for entries in found.values()))
    return table


def _cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    requests: Sequence[int] = [entry["seen"]["requests"]] if "requests" in entry["seen"] else []
    return entry["verdict"] + "".join(f", {count} requests" for count in requests)


if __name__ == "__main__":
    raise SystemExit(main())
