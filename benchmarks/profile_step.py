"""Where the time of a decode step goes, at batch 1 and 32: matrices, attention, small operations, drafter, sampling, Python.

Two measurements are put together. Clocks around the target's forward and the engine's own step reports split a step into
forward, drafting, sampling with verdict, and the rest; no profiler runs then. A second, short run profiles the forward
alone and gives the shares of its operations; what it takes beyond them is Python and dispatch (the profiler makes these
look somewhat larger than they are). The shares are applied to the time that the forward takes unprofiled.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.table import Table

from benchmarks.arms import MODEL, Bench, Settings
from benchmarks.prompts import add_prompt_options
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, wide_console, write_json
from benchmarks.stats import spread
from outrider.cache.base import Cache
from outrider.device import synchronize
from outrider.drafters.build import make_drafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.models.base import ForwardResult, GreedyResult, LoadedTarget, PackedRows

T = TypeVar("T")

PARTS = ("matrices", "attention", "small operations", "Python of the forward", "drafter", "sampling", "engine")
MATRIX_WORDS = ("linear", "addmm", "aten::mm", "bmm", "matmul", "_int_mm", "pack_mm", "baddbmm", "scaled_mm")
ATTENTION_WORDS = ("scaled_dot_product", "flash_attention", "efficient_attention")
PROFILED_PASSES = 8


class WatchedTarget:
    """A target that notes how long each forward took, and can profile it. Everything else is the target's own."""

    def __init__(self, target: LoadedTarget) -> None:
        self._target = target
        self.forward_ms: list[float] = []
        self.profiled_ms: list[float] = []
        self.operations: list[dict[str, float]] = []
        self.is_profiling = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> ForwardResult:
        """The target's forward, watched."""
        return self._watched(lambda: self._target.forward(rows, cache, taps=taps))

    def forward_greedy(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> GreedyResult:
        """The target's greedy forward, watched."""
        return self._watched(lambda: self._target.forward_greedy(rows, cache, taps=taps))

    def _watched(self, forward: Callable[[], T]) -> T:
        if self.is_profiling:
            return self._profiled(forward)
        begun = time.perf_counter()
        result = forward()
        synchronize(self._target.spec.device)
        self.forward_ms.append((time.perf_counter() - begun) * 1e3)
        return result

    def _profiled(self, forward: Callable[[], T]) -> T:
        with torch.autograd.profiler.profile(use_kineto=False) as profiler:
            begun = time.perf_counter()
            result = forward()
            self.profiled_ms.append((time.perf_counter() - begun) * 1e3)
        self.operations.append(
            {
                event.key: event.self_cpu_time_total / 1e3
                for event in profiler.key_averages()
                if event.self_cpu_time_total
            }
        )
        return result


def group_operations(operations: dict[str, float]) -> dict[str, float]:
    """Milliseconds of one forward by part."""
    parts = dict.fromkeys(("matrices", "attention", "small operations"), 0.0)
    for name, ms in operations.items():
        if any(word in name for word in ATTENTION_WORDS):
            parts["attention"] += ms
        elif any(word in name for word in MATRIX_WORDS):
            parts["matrices"] += ms
        else:
            parts["small operations"] += ms
    return parts


def profile_batch(bench: Bench, precision: str, drafter: str, batch: int, steps: int) -> dict[str, Any]:
    """Parts of a step in milliseconds (medians over ``steps`` steps), their shares, and the costliest operations."""
    watched = WatchedTarget(bench.target(precision))
    engine = _started_engine(bench, watched, drafter, batch)
    walls, drafts, samplings = [], [], []
    for _ in range(steps):
        num_before = len(watched.forward_ms)
        begun = time.perf_counter()
        events = engine.step()
        walls.append((time.perf_counter() - begun) * 1e3)
        report = next(event.report for event in events if event.report is not None)
        drafts.append(report.draft_ms)
        samplings.append(report.verify_ms - sum(watched.forward_ms[num_before:]))
    forward_ms = spread(watched.forward_ms[-steps:]).median
    watched.is_profiling = True
    while len(watched.operations) < PROFILED_PASSES and engine.has_work:
        engine.step()
    wall_ms, draft_ms, sampling_ms = (spread(values).median for values in (walls, drafts, samplings))
    parts = split_forward(forward_ms, watched.operations, watched.profiled_ms)
    parts |= {
        "drafter": draft_ms,
        "sampling": sampling_ms,
        "engine": max(0.0, wall_ms - forward_ms - draft_ms - sampling_ms),
    }
    return {
        "precision": precision,
        "drafter": drafter,
        "batch": batch,
        "step_ms": spread(walls).to_json(),
        "forward_ms": spread(watched.forward_ms[-steps:]).to_json(),
        "parts_ms": {name: round(parts[name], 3) for name in PARTS},
        "costliest": _costliest(watched.operations),
    }


def _started_engine(bench: Bench, watched: WatchedTarget, drafter: str, batch: int) -> Engine:
    """An engine whose ``batch`` sequences have read their prompts and decoded a few warm-up steps."""
    config = EngineConfig(
        max_batch_size=batch, num_cached_prefixes=0, num_draft_tokens=bench.settings.num_draft_tokens, schedule="fixed"
    )
    engine = Engine(watched, drafter=make_drafter(drafter, bench.target(watched.spec.precision)), config=config)
    for _, ids in bench.mixed_prompts(batch):
        engine.submit(ids, bench.greedy(ignore_eos=True))
    for _ in range(4):
        engine.step()
    return engine


def split_forward(
    forward_ms: float, operations: Sequence[dict[str, float]], profiled_ms: Sequence[float]
) -> dict[str, float]:
    """``forward_ms`` divided as the profiled passes divide, what is no operation being Python."""
    whole = sum(profiled_ms)
    grouped = [group_operations(each) for each in operations]
    parts = {name: forward_ms * sum(each[name] for each in grouped) / whole for name in grouped[0]}
    return parts | {"Python of the forward": max(0.0, forward_ms - sum(parts.values()))}


def _costliest(operations: Sequence[dict[str, float]], count: int = 10) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in operations:
        for name, ms in each.items():
            total[name] = total.get(name, 0.0) + ms / len(operations)
    ranked = sorted(total.items(), key=lambda pair: -pair[1])[:count]
    return {name: round(ms, 3) for name, ms in ranked}


def print_profiles(profiles: Sequence[dict[str, Any]]) -> None:
    """One column a profile, milliseconds and share of the step."""
    table = Table(title="where a step's time goes: ms (share)", title_justify="left")
    table.add_column("part")
    for each in profiles:
        table.add_column(f"{each['precision']}, batch {each['batch']}, {each['drafter']}", justify="right")
    for name in PARTS:
        cells = [(each["parts_ms"][name], sum(each["parts_ms"].values())) for each in profiles]
        table.add_row(name, *(f"{ms:.2f} ({ms / total:.0%})" for ms, total in cells))
    table.add_row("step, median", *(f"{each['step_ms']['median']:.2f}" for each in profiles), style="bold")
    wide_console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Profile every combination of batch and drafter."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    tokens = args.steps + PROFILED_PASSES + 8
    bench = Bench(
        Settings(model=args.model, backend="pytorch", tokens=tokens * (1 + args.num_draft_tokens), traffic=args.traffic)
    )
    try:
        profiles = [
            profile_batch(bench, args.dtype, drafter, batch, args.steps)
            for batch in args.batch
            for drafter in args.drafter
        ]
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    head = {"kind": "profile_step", **describe_run("benchmarks.profile_step", arguments)}
    stamp = head["started"].replace(":", "").replace("+0000", "")
    path = args.out or RESULTS / f"profile_step-{stamp}.json"
    write_json(path, {**head, "profiles": profiles})
    print_profiles(profiles)
    print(f"result: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_step", description=__doc__)
    add_prompt_options(parser)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or int8")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--drafter", nargs="+", default=["none", "suffix"])
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="steps behind each median")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
