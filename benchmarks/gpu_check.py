"""One prepared check for a CUDA device, under five minutes: identity grid, scheduler, time of a pass against its rows, memory.

Identity: greedy and seeded, with the n-gram, suffix and self drafters (the last as a chain and as a tree) and a head (as a
chain, as a tree, and merged with suffix decoding), one and eight sequences at a time, in each precision, over slabs and, with
fewer drafters, over pages with recorded passes; every output compared with plain decoding of one sequence over slabs. A
difference is allowed only at a tie: a gap between the two tokens' scores below the printed tolerance, taken from plain
decoding alone against plain decoding in a batch (:mod:`outrider.audit.identity`).

The scheduler, compared with the same: requests that come one by one, are put back for want of memory, are cancelled, or come
again (:mod:`benchmarks.gpu_scheduler`). Needs no prompt files. ``--device cpu`` runs a small version.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.gpu_scheduler import check_scheduler
from benchmarks.gpu_subject import OUT_OF_TIME, Clock, Size, Subject, compared, params_of
from benchmarks.passes import ROW_COUNTS, time_passes
from benchmarks.prompts import encode, load_groups
from benchmarks.provenance import describe_run, peak_rss_bytes
from benchmarks.report import RESULTS, wide_console, write_json
from benchmarks.stats import spread
from outrider.audit.identity import run_control
from outrider.device import resolve_placement
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import HeadInfo, read_head, save_head
from outrider.drafters.shipped import shipped_heads
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.errors import OutriderError
from outrider.metrics import SpeculationStats
from outrider.models.base import LoadedTarget
from outrider.models.llama import LlamaTarget
from outrider.models.load import load_checkpoint
from outrider.models.paged import PagedTarget
from outrider.train.start import Start, initialise

TREE = "depth=3,width=2,num_nodes=6"
DRAFTERS = ("none", "ngram", "suffix", "self", f"self:{TREE}", "HEAD", f"HEAD:{TREE}", "merged:HEAD:num_nodes=8")
PAGED_DRAFTERS = ("none", "suffix", f"self:{TREE}", "HEAD")
"""``HEAD`` stands for a head's folder."""
SCHEDULED_TOKENS = 160
"""Answers of the scheduler's check: longer than the room that every sequence is given in advance."""
SIZES = {
    "cuda": Size(prompts=8, scheduled=4, tokens=64, num_draft_tokens=4, rounds=20, precisions=("float32", "bfloat16")),
    "cpu": Size(prompts=2, scheduled=2, tokens=16, num_draft_tokens=4, rounds=3, precisions=("float32", "bfloat16")),
}


def _generate(
    subject: Subject, drafter: str, prompts: dict[str, list[int]], kind: str, batch: int, size: Size
) -> list[GenerationResult]:
    target = subject.target
    config = EngineConfig(
        num_draft_tokens=size.num_draft_tokens, schedule="fixed", max_batch_size=batch, num_cached_prefixes=0
    )
    engine = Engine(target, drafter=subject.drafter(drafter), config=config)
    return engine.generate(list(prompts.values()), params_of(kind, size.tokens), ids=list(prompts))


Plain = dict[str, dict[str, GenerationResult]]
"""By kind of request and prompt id: decoded plainly, one sequence at a time, over slabs."""


def plain_results(slabs: Subject, prompts: dict[str, list[int]], size: Size) -> tuple[Plain, float]:
    """What everything is compared with, and the tolerance of ties."""
    plain = {}
    for kind in ("greedy", "seeded"):
        plain[kind] = dict(zip(prompts, _generate(slabs, "none", prompts, kind, 1, size), strict=True))
    return plain, run_control(slabs.target, prompts, list(plain["greedy"].values())).tolerance


def identity_grid(
    plain: Plain,
    subjects: Sequence[tuple[Subject, Sequence[str]]],
    prompts: dict[str, list[int]],
    size: Size,
    tolerance: float,
    clock: Clock,
) -> list[dict[str, Any]]:
    """Every path with its drafters, kind and batch against plain decoding."""
    cells: list[dict[str, Any]] = []
    for kind, (subject, drafters) in itertools.product(plain, subjects):
        for drafter, batch in itertools.product(drafters, (1, 8)):
            if (subject, drafter, batch) != (subjects[0][0], "none", 1):
                cell = {"path": subject.target.spec.path, "kind": kind, "drafter": drafter, "batch": batch}
                cells.append(cell | _cell(subject, prompts, plain[kind], cell, size, tolerance, clock))
    return cells


def _cell(
    subject: Subject,
    prompts: dict[str, list[int]],
    plain: dict[str, GenerationResult],
    cell: dict[str, Any],
    size: Size,
    tolerance: float,
    clock: Clock,
) -> dict[str, Any]:
    if clock.is_over:
        return {"verdict": OUT_OF_TIME}
    begun = time.perf_counter()
    results = _generate(subject, cell["drafter"], prompts, cell["kind"], cell["batch"], size)
    seconds = time.perf_counter() - begun
    triples = [(cell["kind"], each) for each in zip(prompts.values(), plain.values(), results, strict=True)]
    stats = SpeculationStats.pooled(result.stats for result in results)
    return {
        **compared(subject.target, triples, size.tokens, tolerance),
        "tokens_per_pass": round(stats.tokens_per_pass or 0.0, 3),
        "tokens_per_s": round(sum(len(result.token_ids) for result in results) / seconds, 1),
    }


def pass_times(target: LoadedTarget, rounds: int) -> dict[str, Any]:
    """Milliseconds of a pass by rows, and the ratio to one row."""
    times = time_passes(target, ROW_COUNTS, cached=300, rounds=rounds)
    one = spread(times[1]).median
    return {
        str(count): {"ms": spread(ms).to_json(), "ratio_to_one_row": round(spread(ms).median / one, 3)}
        for count, ms in times.items()
    }


def memory(target: LlamaTarget) -> dict[str, float]:
    """Peak memory of the device (CUDA) or process (CPU) beside the weights, in MB."""
    is_cuda = target.spec.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(target.spec.device) if is_cuda else peak_rss_bytes()
    return {"peak_mb": round(peak / 1e6, 1), "weights_mb": round(target.num_weight_bytes() / 1e6, 1)}


def check_precision(checkpoint: Any, precision: str, device: str, size: Size, clock: Clock) -> dict[str, Any]:
    """The whole check in one precision."""
    target = LlamaTarget(checkpoint, resolve_placement(precision, device))
    rows = load_groups(("copy_heavy", "prose"))
    stride = max(1, len(rows) // size.prompts)
    prompts = {row.id: encode(checkpoint.tokenizer, row) for row in rows[::stride][: size.prompts]}
    if target.spec.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.spec.device)
    paged = PagedTarget(target)
    with tempfile.TemporaryDirectory() as folder:
        head = _head_for(target, Path(folder))
        slabs, pages = Subject(target=target, head=head), Subject(target=paged, head=head)
        plain, tolerance = plain_results(slabs, prompts, size)
        few = dict(list(prompts.items())[: size.scheduled])
        longer = replace(size, tokens=SCHEDULED_TOKENS)
        alone, _ = plain_results(slabs, few, longer)
        subjects = ((slabs, DRAFTERS), (pages, PAGED_DRAFTERS))
        scheduler = [
            row
            for subject in ((pages, slabs) if target.spec.device.type == "cuda" else (slabs,))
            for row in check_scheduler(alone, subject, few, longer, tolerance, clock)
        ]
        cells = identity_grid(plain, subjects, prompts, size, tolerance, clock)
    return {
        "identity": {"tolerance": tolerance, "cells": cells},
        "scheduler": scheduler,
        "head": "random weights" if folder in str(head) else head.name,
        "memory": memory(target),
        "passes": {each.spec.path: pass_times(each, size.rounds) for each in (target, paged)},
    }


def _head_for(target: LlamaTarget, folder: Path) -> Path:
    """A head that came along for this very target, else one with random weights, which is as exact and never right."""
    for path in shipped_heads().values():
        if read_head(path).info.target_fingerprint == target.spec.fingerprint:
            return path
    head = EagleHead(EagleConfig.for_target(target.config, draft_vocab_size=1024))
    initialise(head, tuple(range(1024)), target.checkpoint, Start(), seed=0)
    save_head(folder / "random", head, HeadInfo.for_target(target))
    return folder / "random"


GRID_COLUMNS = (
    "path",
    "kind",
    "drafter",
    "batch",
    "equal",
    "ties",
    "different",
    "tokens_per_pass",
    "tokens_per_s",
    "verdict",
)
SCHEDULER_COLUMNS = (
    "path",
    "situation",
    "drafter",
    "equal",
    "ties",
    "different",
    "cancelled",
    "num_preemptions",
    "reused_tokens",
    "tokens_per_s",
    "verdict",
)


def _table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.replace("_per_", "/").replace("num_", "").replace("_", " "))
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    return table


def print_report(report: dict[str, Any]) -> None:
    """Tables of the check."""
    console = wide_console()
    for precision, part in report["precisions"].items():
        title = f"{precision}: identity against plain, one sequence (tie tolerance {part['identity']['tolerance']:.2g})"
        console.print(_table(title, GRID_COLUMNS, part["identity"]["cells"]))
        console.print(_table(f"{precision}: the scheduler, against the same", SCHEDULER_COLUMNS, part["scheduler"]))
        passes = Table(title=f"{precision}: one pass, 300 tokens cached; memory {part['memory']}", title_justify="left")
        passes.add_column("path")
        for count in next(iter(part["passes"].values())):
            passes.add_column(f"{count} rows")
        for path, times in part["passes"].items():
            shown = (f"{each['ms']['median']:.2f} ms, {each['ratio_to_one_row']:.2f}x" for each in times.values())
            passes.add_row(path, *shown)
        console.print(passes)


def main(argv: list[str] | None = None) -> int:
    """Run the check; status 1 if an output differs by more than a tie or something did not fit the time."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    size, begun = SIZES["cpu" if args.device == "cpu" else "cuda"], time.perf_counter()
    head = {"kind": "gpu_check", **describe_run("benchmarks.gpu_check", arguments)}
    report: dict[str, Any] = {**head, "precisions": {}}
    path = args.out or RESULTS / f"gpu_check-{head['started'].replace(':', '').replace('+0000', '')}.json"
    try:
        checkpoint = load_checkpoint(args.model, tool_rendering="system")
        for precision in size.precisions:
            clock = Clock(args.budget_s / len(size.precisions))
            report["precisions"][precision] = check_precision(checkpoint, precision, args.device, size, clock)
            report["seconds"] = round(time.perf_counter() - begun, 1)
            write_json(path, report)
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(report)
    parts = report["precisions"].values()
    verdicts = [row["verdict"] for part in parts for row in (*part["identity"]["cells"], *part["scheduler"])]
    print(f"{_conclusion(verdicts)}; {report['seconds']:.0f} s; result: {path}")
    return 0 if all(verdict.startswith("identical") for verdict in verdicts) else 1


def _conclusion(verdicts: Sequence[str]) -> str:
    num_late = verdicts.count(OUT_OF_TIME)
    num_bad = sum(not verdict.startswith("identical") for verdict in verdicts) - num_late
    if num_bad:
        return f"NOT as it should be in {num_bad} of {len(verdicts)} cells"
    if num_late:
        return f"identical in all cells that ran; {num_late} of {len(verdicts)} did not fit the time"
    return f"identical in all {len(verdicts)} cells (ties: {verdicts.count('identical up to ties')})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for the small version")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="alias, folder, GGUF file or hub id")
    parser.add_argument("--budget-s", type=float, default=240, help="seconds after which no further cell is started")
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
