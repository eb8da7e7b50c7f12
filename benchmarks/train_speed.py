"""How fast a head is trained: model FLOPs of its updates against plain matrix products of the same shapes, in one run.

Counted are 6 operations a weight for every position that the head applies it to (forward and both gradients): what is
recomputed is not counted, and neither is the target's pass. The bar asks of the native kernels 55 % of the rate that
PyTorch's products of these very shapes reach between the turns; the same updates without native kernels run beside them.
Loss-masked positions a second are of whole updates, the target's states lying in memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.head_tables import train_speed_rows
from benchmarks.report import HISTORY, RESULTS, append_history, print_table, wide_console, write_json
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from benchmarks.training_turns import Material

ARMS = ("native", "pytorch")


def main(argv: list[str] | None = None) -> int:
    """Measure every cell of the grid; the result file is whole after each."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    # As `outrider train` does, before PyTorch is loaded: its threads are not to spin where the kernels' own want to run.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from benchmarks.provenance import describe_run

    head = {"kind": "train_speed", **describe_run("benchmarks.train_speed", arguments)}
    stamp = head["started"].replace(":", "").replace("+0000", "")
    path = args.out or RESULTS / f"train_speed-{stamp}.json"
    try:
        result = _measure(args, head, path)
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not args.no_history:
        append_history(head, result["bars"], result=path.name, path=args.history)
    _print(result)
    print(f"result: {path}")
    return 0


def _measure(args: argparse.Namespace, head: dict[str, Any], path: Path) -> dict[str, Any]:
    from benchmarks.training_turns import Cell, bar_of, measure_cell, native_kernels, summary_of
    from outrider.device import keep_prepared_products

    keep_prepared_products()
    kernels = native_kernels() if "native" in args.arm else None
    material = _material(args)
    settings = {"kernels": kernels, "turns": args.turns, "updates": args.updates, "corpus": material.to_json()}
    result: dict[str, Any] = {**head, "settings": settings, "cells": [], "bars": []}
    for positions, entries, threads in itertools.product(args.batch_positions, args.draft_vocab, args.threads):
        cell = Cell(batch_positions=positions, draft_vocab=entries, threads=threads)
        print(cell.name, file=sys.stderr, flush=True)
        turns = measure_cell(cell, material, arms=args.arm, turns=args.turns, updates=args.updates)
        result["cells"].append(summary_of(cell, turns))
        result["bars"] += [bar_of(cell, turns).to_json()] if kernels else []
        write_json(path, result)
    return result


def _material(args: argparse.Namespace) -> Material:
    from benchmarks.training_turns import prepare
    from outrider.models.load import load_target

    print("answers and taps", file=sys.stderr, flush=True)
    target = load_target(args.model, dtype="bfloat16", device="cpu", tool_rendering="system")
    with tempfile.TemporaryDirectory() as folder:
        answers = args.answers or Path(folder) / "answers.jsonl"
        return prepare(target, args.traffic, answers, limit=args.limit, max_answer_tokens=args.max_answer_tokens)


def _print(result: dict[str, Any]) -> None:
    first, *rows = train_speed_rows(result)
    table = Table(title="updates in turns, median (quartiles)", title_justify="left")
    for column in first:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    wide_console().print(table)
    if result["bars"]:
        print_table(result["bars"], title="model FLOPs a second against plain matrix products")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_speed", description=__doc__)
    parser.add_argument("traffic", type=Path, metavar="TRAFFIC.jsonl", help="prompts, as outrider train takes them")
    parser.add_argument("--batch-positions", type=_count, nargs="+", default=[512, 1024], help="of an update")
    parser.add_argument("--draft-vocab", type=_count, nargs="+", default=[8192, 12288], help="entries of the head")
    parser.add_argument("--threads", type=_count, nargs="+", default=[1, 2])
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=list(ARMS), help="with native kernels, and without")
    parser.add_argument("--turns", type=_count, default=8, help="of each arm")
    parser.add_argument("--updates", type=_count, default=3, help="of a turn")
    parser.add_argument("--limit", type=_count, default=48, help="first rows of the traffic that are used")
    parser.add_argument("--max-answer-tokens", type=_count, default=256)
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="answers of an earlier run on the same traffic (training/answers.jsonl); what is missing is added",
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="alias, folder or hub id of the target")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/, named by time)")
    parser.add_argument("--no-history", action="store_true", help="append no line to the history")
    parser.add_argument("--history", type=Path, default=HISTORY, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
