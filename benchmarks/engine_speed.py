"""Speed and memory of the engine on one model, one claim a section, arms paired and interleaved in one run.

Sections: transformers, passes, copy, spec_bench, prose, int8, batch, start, and drafts with ``--drafts``. The result file
is whole after every section; a run that was cut off goes on with ``--resume FILE``.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import MODEL, Bench, Settings
from benchmarks.prompts import add_prompt_options
from benchmarks.provenance import describe_run
from benchmarks.report import HISTORY, RESULTS, ResultFile, append_history, print_table
from benchmarks.sections import SECTIONS
from outrider.errors import OutriderError


def main(argv: list[str] | None = None) -> int:
    """Measure the chosen sections; print the table of bars and verdicts."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    settings = Settings(
        model=args.model,
        backend=args.backend,
        tokens=args.tokens,
        num_draft_tokens=args.num_draft_tokens,
        traffic=args.traffic,
        full=args.full,
        pairs=args.pairs,
        limit=args.limit,
        seed=args.seed,
        drafts=tuple(args.drafts),
    )
    head: dict[str, Any] = {
        "kind": "engine_speed",
        **describe_run("benchmarks.engine_speed", arguments),
        "settings": settings.to_json(),
    }
    try:
        result = _result_file(args, head)
        _measure(Bench(settings), args.only or _usual(settings), result)
    except (OutriderError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not args.no_history:
        append_history(head, result.bars(), result=result.path.name, path=args.history)
    print_table(result.bars(), title=f"engine speed, {settings.model}, {settings.tokens} new tokens")
    print(f"result: {result.path}")
    return 0


def _usual(settings: Settings) -> list[str]:
    """All sections; without drafts to compare, the one that compares them has nothing to do."""
    return [name for name in SECTIONS if name != "drafts" or settings.drafts]


def _measure(bench: Bench, names: list[str], result: ResultFile) -> None:
    for name in names:
        if result.has(name):
            print(f"{name}: already in {result.path.name}", file=sys.stderr)
            continue
        begun = time.perf_counter()
        section = SECTIONS[name](bench)
        result.add(replace(section, seconds=time.perf_counter() - begun))


def _result_file(args: argparse.Namespace, head: dict[str, Any]) -> ResultFile:
    if args.resume is not None:
        return ResultFile.resume(args.resume, head)
    stamp = head["started"].replace(":", "").replace("+0000", "")
    return ResultFile(args.out or RESULTS / f"engine_speed-{stamp}.json", head)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_speed", description=__doc__)
    add_prompt_options(parser)
    parser.add_argument(
        "--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--model", default=MODEL, help="alias, folder or hub id of the target")
    parser.add_argument("--backend", choices=("auto", "native", "pytorch"), default="auto", help="who runs the passes")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens a request")
    parser.add_argument("--num-draft-tokens", type=int, default=8, help="most draft tokens a step")
    parser.add_argument(
        "--drafts",
        nargs="+",
        default=[],
        metavar="DRAFTER@K",
        help="for the section drafts: drafters with their most draft tokens a step, as suffix@8 HEAD@4 "
        "merged:HEAD:num_nodes=9@9",
    )
    parser.add_argument("--full", action="store_true", help="all 480 Spec-Bench prompts instead of the subset of 30")
    parser.add_argument("--pairs", type=int, help="pairs (rounds, repeats) of every section instead of its own number")
    parser.add_argument(
        "--limit", type=int, help="first prompts of each group only: for trying the script, not for results"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0, help="keys the sampled requests")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/, named by time)")
    parser.add_argument(
        "--resume", type=Path, help="go on with this result file of the same commit, settings and machine"
    )
    parser.add_argument("--no-history", action="store_true", help="append no line to the history")
    parser.add_argument("--history", type=Path, default=HISTORY, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
