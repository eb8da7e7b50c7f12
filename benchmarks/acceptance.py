"""How many draft tokens fit: tokens a pass, accepted length and acceptance by position, for each drafter, k and category.

Counts do not depend on the machine, so any machine may run this, and sequences may share passes (``--batch``).
``--schedule fixed`` drafts k tokens at every step, which is what these rates are about. With several temperatures every
drafter is measured at each: above 0 drafts are kept less often, since the target draws and does not take its likeliest token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.arms import MODEL, Bench, Settings, progress_bar
from benchmarks.prompts import GROUPS, PromptRow, add_prompt_options
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, wide_console, write_json
from outrider.drafters.build import make_drafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.metrics import SpeculationStats
from outrider.sampling.params import SamplingParams

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: see the command's options."""

    dtype: str
    schedule: str
    batch: int
    is_fresh: bool
    params: SamplingParams


def measure(
    bench: Bench,
    plan: Plan,
    prompts: Sequence[tuple[PromptRow, list[int]]],
    *,
    drafter: str,
    num_draft_tokens: int,
) -> dict[str, Any]:
    """Pooled statistics by category and over all prompts."""
    by_category: dict[str, list[SpeculationStats]] = {}
    chunk = 1 if plan.is_fresh else plan.batch
    engine = _engine(bench, plan, drafter, num_draft_tokens)
    with progress_bar(f"{drafter}, k={num_draft_tokens}") as bar:
        task = bar.add_task("", total=len(prompts))
        for start in range(0, len(prompts), chunk):
            part = prompts[start : start + chunk]
            if plan.is_fresh:
                engine = _engine(bench, plan, drafter, num_draft_tokens)
            for (row, _), result in zip(part, engine.generate([ids for _, ids in part], plan.params), strict=True):
                by_category.setdefault(_category(row), []).append(result.stats)
            bar.advance(task, len(part))
    pooled = {name: SpeculationStats.pooled(each) for name, each in by_category.items()}
    pooled[ALL] = SpeculationStats.pooled(pooled.values())
    return {
        "drafter": drafter,
        "num_draft_tokens": num_draft_tokens,
        "temperature": plan.params.temperature,
        "prompts": {name: len(each) for name, each in by_category.items()},
        "categories": {name: stats.to_json(drafter) for name, stats in pooled.items()},
    }


def _category(row: PromptRow) -> str:
    return row.category if row.group == "spec_bench" else row.group


def _engine(bench: Bench, plan: Plan, drafter: str, num_draft_tokens: int) -> Engine:
    target = bench.target(plan.dtype)
    config = EngineConfig.from_dict(
        {
            "num_draft_tokens": num_draft_tokens,
            "schedule": plan.schedule,
            "max_batch_size": plan.batch,
            "num_cached_prefixes": 0,
        }
    )
    seed = bench.settings.seed
    return Engine(target, drafter=make_drafter(drafter, target), config=config, entropy=lambda: seed)


def print_measurements(measurements: Sequence[dict[str, Any]]) -> None:
    """Tokens a pass by category, then the rates by position over all prompts."""
    categories = list(measurements[0]["categories"])
    table = Table(title="tokens a pass (all passes counted)", title_justify="left")
    for column in ("drafter", "k", "temperature", *categories, "accepted length", "draft rate"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for each in measurements:
        total = each["categories"][ALL]
        cells = [_cell(each["categories"][name]["tokens_per_pass"]) for name in categories]
        rates = (_cell(total["accepted_length"]), _cell(total["draft_rate"]))
        table.add_row(*_arm(each), *cells, *rates)
    positions = Table(title="accepted / reached by position, all prompts", title_justify="left")
    deepest = max(len(each["categories"][ALL]["per_position"]) for each in measurements)
    for column in ("drafter", "k", "temperature", *(str(depth + 1) for depth in range(deepest))):
        positions.add_column(column, justify="left" if column == "drafter" else "right")
    for each in measurements:
        rates = [_rate(position) for position in each["categories"][ALL]["per_position"]]
        positions.add_row(*_arm(each), *rates)
    console = wide_console()
    console.print(table)
    console.print(positions)


def _arm(measurement: dict[str, Any]) -> tuple[str, ...]:
    return measurement["drafter"], str(measurement["num_draft_tokens"]), f"{measurement['temperature']:g}"


def _cell(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _rate(position: dict[str, int]) -> str:
    return f"{position['accepted'] / position['reached']:.2f}" if position["reached"] else "n/a"


def main(argv: list[str] | None = None) -> int:
    """Measure every drafter with every k."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    settings = Settings(model=args.model, tokens=args.tokens, traffic=args.traffic, limit=args.limit, seed=args.seed)
    bench = Bench(settings)
    params = [SamplingParams(temperature=temperature, max_tokens=args.tokens) for temperature in args.temperature]
    plan = Plan(dtype=args.dtype, schedule=args.schedule, batch=args.batch, is_fresh=args.fresh, params=params[0])
    try:
        full = [group for group in args.groups if args.full and group == "spec_bench"]
        prompts = [prompt for group in args.groups for prompt in bench.prompts(group, full=group in full)]
        measurements = [
            measure(bench, replace(plan, params=each), prompts, drafter=name, num_draft_tokens=k)
            for name in args.drafter
            for k in args.k
            for each in params
        ]
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    head = {"kind": "acceptance", **describe_run("benchmarks.acceptance", arguments), "settings": settings.to_json()}
    stamp = head["started"].replace(":", "").replace("+0000", "")
    path = args.out or RESULTS / f"acceptance-{stamp}.json"
    write_json(path, {**head, "measurements": measurements})
    print_measurements(measurements)
    print(f"result: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__)
    add_prompt_options(parser)
    parser.add_argument(
        "--drafter", nargs="+", default=["ngram", "suffix"], help="drafter specs, as --drafter elsewhere"
    )
    parser.add_argument("--k", type=int, nargs="+", default=[4, 8], help="draft tokens a step")
    parser.add_argument(
        "--groups", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS)
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or int8")
    parser.add_argument("--tokens", type=int, default=256, help="most new tokens a request")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="temperatures of the requests")
    parser.add_argument("--schedule", choices=("fixed", "adaptive"), default="fixed")
    parser.add_argument("--batch", type=int, default=8, help="sequences that share passes")
    parser.add_argument(
        "--fresh", action="store_true", help="a new drafter for every prompt: no memory across requests"
    )
    parser.add_argument("--full", action="store_true", help="the whole Spec-Bench instead of its subset")
    parser.add_argument("--limit", type=int, help="first prompts of each group only")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
