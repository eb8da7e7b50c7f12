"""One prepared check for a CUDA device, under five minutes: identity grid, time of a pass against its rows, memory.

Identity: greedy and seeded, with the n-gram, suffix and self drafters (the last as a chain and as a tree) and a head (as a
chain, as a tree, and merged with suffix decoding), one and eight sequences at a time, in each precision, over slabs and, with
fewer drafters, over pages with recorded passes; every output compared with plain decoding of one sequence over slabs. A
difference is allowed only at a tie: a gap between the two tokens' scores below the printed tolerance, taken from plain
decoding alone against plain decoding in a batch (:mod:`outrider.audit.identity`). Needs no prompt files. ``--device cpu`` runs
a small version.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.passes import ROW_COUNTS, time_passes
from benchmarks.prompts import encode, load_groups
from benchmarks.provenance import describe_run, peak_rss_bytes
from benchmarks.report import RESULTS, wide_console, write_json
from benchmarks.stats import spread
from outrider.audit.identity import explain, run_control
from outrider.device import resolve_placement
from outrider.drafters.base import Drafter
from outrider.drafters.build import make_drafter
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
from outrider.sampling.params import SamplingParams
from outrider.train.start import Start, initialise

TREE = "depth=3,width=2,num_nodes=6"
DRAFTERS = ("none", "ngram", "suffix", "self", f"self:{TREE}", "HEAD", f"HEAD:{TREE}", "merged:HEAD:num_nodes=8")
PAGED_DRAFTERS = ("none", "suffix", f"self:{TREE}", "HEAD")
"""``HEAD`` stands for a head's folder."""
OUT_OF_TIME = "not run: out of time"
TEMPERATURE = 0.8
SEED = 20240229


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is run."""

    prompts: int
    tokens: int
    num_draft_tokens: int
    rounds: int
    precisions: tuple[str, ...]


SIZES = {
    "cuda": Size(prompts=8, tokens=64, num_draft_tokens=4, rounds=20, precisions=("float32", "bfloat16")),
    "cpu": Size(prompts=2, tokens=16, num_draft_tokens=4, rounds=3, precisions=("float32", "bfloat16")),
}


class Clock:
    """Seconds since the start against a budget: what does not fit is named, never dropped silently."""

    def __init__(self, budget_s: float) -> None:
        self._begun = time.perf_counter()
        self._budget_s = budget_s

    @property
    def is_over(self) -> bool:
        """True once the budget is spent."""
        return time.perf_counter() - self._begun > self._budget_s


def _params(kind: str, tokens: int) -> SamplingParams:
    if kind == "greedy":
        return SamplingParams(max_tokens=tokens)
    return SamplingParams(max_tokens=tokens, temperature=TEMPERATURE, seed=SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked: one path of one precision, and the head that drafts for it."""

    target: LoadedTarget
    head: Path

    def drafter(self, name: str) -> Drafter | None:
        """A drafter by its name above."""
        return make_drafter(name.replace("HEAD", str(self.head)), self.target)


def _generate(
    subject: Subject, drafter: str, prompts: dict[str, list[int]], kind: str, batch: int, size: Size
) -> list[GenerationResult]:
    target = subject.target
    config = EngineConfig(
        num_draft_tokens=size.num_draft_tokens, schedule="fixed", max_batch_size=batch, num_cached_prefixes=0
    )
    engine = Engine(target, drafter=subject.drafter(drafter), config=config)
    return engine.generate(list(prompts.values()), _params(kind, size.tokens), ids=list(prompts))


def identity_grid(
    slabs: Subject, pages: Subject, prompts: dict[str, list[int]], size: Size, clock: Clock
) -> dict[str, Any]:
    """Every path, drafter, kind and batch against plain decoding of one sequence over slabs."""
    cells: list[dict[str, Any]] = []
    tolerance = 0.0
    for kind in ("greedy", "seeded"):
        plain = _generate(slabs, "none", prompts, kind, 1, size)
        if kind == "greedy":
            tolerance = run_control(slabs.target, prompts, plain).tolerance
        for subject, drafters in ((slabs, DRAFTERS), (pages, PAGED_DRAFTERS)):
            for drafter, batch in itertools.product(drafters, (1, 8)):
                if (subject, drafter, batch) != (slabs, "none", 1):
                    cell = {"path": subject.target.spec.path, "kind": kind, "drafter": drafter, "batch": batch}
                    cells.append(cell | _cell(subject, prompts, plain, cell, size, tolerance, clock))
    return {"tolerance": tolerance, "cells": cells}


def _cell(
    subject: Subject,
    prompts: dict[str, list[int]],
    plain: Sequence[GenerationResult],
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
    params = _params(cell["kind"], size.tokens)
    triples = zip(prompts.values(), plain, results, strict=True)
    found = [explain(subject.target, ids, a, b, params=params, tolerance=tolerance) for ids, a, b in triples]
    differences = [asdict(each) for each in found if each is not None]
    num_bugs = sum(each["verdict"] == "bug" for each in differences)
    stats = SpeculationStats.pooled(result.stats for result in results)
    return {
        "equal": len(prompts) - len(differences),
        "ties": len(differences) - num_bugs,
        "different": num_bugs,
        "differences": differences,
        "tokens_per_pass": round(stats.tokens_per_pass or 0.0, 3),
        "tokens_per_s": round(sum(len(result.token_ids) for result in results) / seconds, 1),
        "verdict": "different" if num_bugs else "identical up to ties" if differences else "identical",
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
        identity = identity_grid(slabs, pages, prompts, size, clock)
    return {
        "identity": identity,
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


def print_report(report: dict[str, Any]) -> None:
    """Tables of the check."""
    console = wide_console()
    for precision, part in report["precisions"].items():
        title = f"{precision}: identity against plain, one sequence (tie tolerance {part['identity']['tolerance']:.2g})"
        table = Table(title=title, title_justify="left")
        for column in (
            "path",
            "kind",
            "drafter",
            "batch",
            "equal",
            "ties",
            "different",
            "tokens a pass",
            "tokens/s",
            "verdict",
        ):
            table.add_column(column)
        for cell in part["identity"]["cells"]:
            names = (
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
            table.add_row(*(str(cell.get(name, "")) for name in names))
        console.print(table)
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
    verdicts = [cell["verdict"] for part in report["precisions"].values() for cell in part["identity"]["cells"]]
    print(f"{_conclusion(verdicts)}; {report['seconds']:.0f} s; result: {path}")
    return 0 if all(verdict.startswith("identical") for verdict in verdicts) else 1


def _conclusion(verdicts: Sequence[str]) -> str:
    num_bad, num_late = verdicts.count("different"), verdicts.count(OUT_OF_TIME)
    if num_bad:
        return f"NOT identical in {num_bad} of {len(verdicts)} cells"
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
