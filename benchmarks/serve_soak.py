"""Thousands of requests, good and bad, against ``outrider serve``: what leaks, what faults, whose answer changes in company?

    python -m benchmarks.serve_soak --traffic DIR --requests 10000 --output soak.json
    python -m benchmarks.serve_soak --traffic DIR --requests 150 --tokens 16

Most are plain or streamed; others leave in the middle, are cut while they are sent, are no JSON, go over a limit, or come from
the fuzzer. At the end up to 200 of the answers are asked for again, alone and without speculation. It passes if

- no answer was 5xx and no client was left without one;
- the checked answers are what they are alone (float32, or the native pass: there it holds bit for bit);
- nothing runs or waits, and the cache holds nothing but prefixes kept for later;
- the server's resident memory behind a warm-up (a fifth of its requests) grew by at most 3 %.

The outcome is saved every few seconds. With ``--minutes`` it stops in time (status 3); the same command goes on from there,
with a server of its own whose memory is judged by itself. Status 1: something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.load.process import ServerProcess, serving
from benchmarks.load.soak import SoakPlan, SoakState, check_alone, soak
from benchmarks.prompts import add_prompt_options, load_groups
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, write_json

__all__ = ["Progress", "main"]

GROUPS = ("prose", "humaneval", "tool_calls", "copy_heavy")
UNFINISHED = 3


class Progress:
    """Saves the state, and tells about it: a bar on a terminal, else a line now and then.

    Args:
        path: of the outcome.
        head: what stands above the state.
        requests: how many there will be.
        every_s: seconds between two savings.
    """

    def __init__(self, path: Path, head: dict[str, Any], requests: int, *, every_s: float = 10.0) -> None:
        self._path, self._head, self._requests = path, head, requests
        self._every_s = every_s
        self._begun, self._last = time.monotonic(), 0.0

    def __call__(self, state: SoakState) -> None:
        """Say how far it is, if it was long since."""
        if time.monotonic() - self._last >= self._every_s:
            self.save(state)

    def save(self, state: SoakState) -> None:
        """Write the outcome and tell about it now."""
        self._last = time.monotonic()
        write_json(self._path, {**self._head, "soak": state.to_json()})
        share = state.done / self._requests
        bar = "#" * round(30 * share)
        growth = state.memory_growth
        memory = ", memory not judged yet" if growth is None else f", memory {growth:+.1%}"
        line = f"[{bar:<30}] {state.done}/{self._requests}, {len(state.faults)} faults{memory}, "
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{line}{self._last - self._begun:.0f} s", end=end, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the soak, or go on with it; 0 passed, 1 something did not hold, 3 time was up."""
    given = _parser().parse_args(arguments)
    form = {
        name: getattr(given, name)
        for name in ("target", "dtype", "draft", "requests", "concurrency", "tokens", "seed", "schedule")
    }
    head = {
        "run": describe_run("benchmarks.serve_soak", list(arguments if arguments is not None else sys.argv[1:])),
        "form": form,
    }
    state = _before(given.output, form)
    rows = [{"messages": row.messages} for row in load_groups(GROUPS, traffic=given.traffic)]
    plan = SoakPlan(
        requests=given.requests, concurrency=given.concurrency, rows=rows, tokens=given.tokens, seed=given.seed
    )
    progress = Progress(given.output, head, given.requests)
    with serving(_flags(given), log=given.output.with_suffix(".server.log")) as server:
        is_done = _run(server, plan, state, progress, minutes=given.minutes)
        if server.process.poll() is not None:
            state.faults.append(f"the server ended with status {server.process.returncode}")
    progress.save(state)
    shown = {name: value for name, value in state.to_json().items() if name not in ("memory", "kept", "checked")}
    print("\n" + json.dumps({**shown, "checked": len(state.checked)}, indent=1))
    return UNFINISHED if not is_done and not state.problems else int(bool(state.problems))


def _run(server: ServerProcess, plan: SoakPlan, state: SoakState, progress: Progress, *, minutes: float | None) -> bool:
    until = None if minutes is None else time.monotonic() + 60 * minutes

    async def work() -> bool:
        is_done = await soak(server.client, plan, state, pid=server.process.pid, until=until, on_progress=progress)
        if is_done:
            progress.save(state)
            await check_alone(server.client, plan, state)
        return is_done

    return asyncio.run(work())


def _before(path: Path, form: dict[str, Any]) -> SoakState:
    """Where an earlier run of the same form stopped; a new state if there is none, or it had come to its end."""
    if not path.exists():
        return SoakState()
    data = json.loads(path.read_text(encoding="utf-8"))
    state = SoakState.from_json(data["soak"]) if data.get("form") == form else SoakState()
    return state if state.done < form["requests"] else SoakState()


def _flags(given: argparse.Namespace) -> list[str]:
    flags = ["--target", given.target, "--dtype", given.dtype, "--max-batch-size", "32", "--tool-rendering", "system"]
    return flags if given.draft == "none" else [*flags, "--draft", given.draft, "--schedule", given.schedule]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve_soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_prompt_options(parser)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40, help="most output tokens of a request (default 40)")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command goes on")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft", default="suffix:max_nodes=20000", help="its memory must be full when it is warm")
    parser.add_argument("--schedule", default="adaptive", choices=("fixed", "adaptive"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "serve_soak.json")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
