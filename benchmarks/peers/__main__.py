"""Other engines on the same prompts, the same weights and the same machine, greedy, interleaved, in one table.

Peers (transformers, llama.cpp, OpenVINO GenAI, vLLM) are installed by your own pip into ``--root``, outside any repository;
llama.cpp is compiled there. Every arm is a process that stays up and is stopped (SIGSTOP) while it is not its turn. A run that
was cut off goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms import MODEL
from benchmarks.peers.catalogue import Arm, all_arms, choose
from benchmarks.peers.first_token import first_token_arms, first_token_plan, first_token_result, print_first_token
from benchmarks.peers.installs import NotAvailable
from benchmarks.peers.setups import Setups
from benchmarks.peers.summary import best_against_ours, print_table, probes_of, rows_of
from benchmarks.peers.turns import Item, Plan, make_items, measure
from benchmarks.peers.workfile import WorkFile
from benchmarks.prompts import PromptRow, add_prompt_options, encode, load_group
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, write_json
from outrider.errors import OutriderError
from outrider.models.checkpoint import Checkpoint
from outrider.models.fetch import cache_dir
from outrider.models.load import load_checkpoint

GROUPS = ("spec_bench", "humaneval", "tool_calls")


def main(argv: list[str] | None = None) -> int:
    """List, set up, or measure and print."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # arms that stand still are ended on the way out
    try:
        arms = choose(_arms(args), args.only)
        if args.list:
            print("\n".join(f"{arm.name}  (own plain: {arm.plain})" for arm in arms))
            return 0
        checkpoint = load_checkpoint(args.model, tool_rendering="system")
        setups = Setups(args.root.resolve(), model=args.model, checkpoint=checkpoint, jobs=args.jobs)
        if args.setup:
            return _set_up(arms, setups)
        run = _run_first_token if args.first_token else _run
        run(args, arms, checkpoint, setups, arguments)
    except (OutriderError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _arms(args: argparse.Namespace) -> list[Arm]:
    if args.first_token:
        return first_token_arms()
    return all_arms(num_draft_tokens=args.num_draft_tokens, drafters=args.draft)


def _set_up(arms: Sequence[Arm], setups: Setups) -> int:
    """Install and build only; status 1 if an arm cannot be had."""
    failed = 0
    for arm in arms:
        try:
            setups.prepare(arm)
            print(f"{arm.name}: ready", flush=True)
        except NotAvailable as error:
            failed += 1
            print(f"{arm.name}: not available: {error}", flush=True)
    return 1 if failed else 0


def _run(
    args: argparse.Namespace, arms: Sequence[Arm], checkpoint: Checkpoint, setups: Setups, arguments: list[str]
) -> None:
    name = "peers" if args.streams == 1 else f"peers_{args.streams}"
    plan = _plan(args, checkpoint)
    settings = {
        **{key: getattr(args, key) for key in ("model", "tokens", "streams", "per_task", "num_draft_tokens")},
        "threads": plan.threads,
        "groups": list(args.groups),
        "prompts": [item.name for item in plan.items],
        "fingerprint": checkpoint.fingerprint,
    }
    head = {"kind": name, **describe_run("benchmarks.peers", arguments), "settings": settings}
    work = WorkFile(args.work or setups.root / f"{name}.jsonl", settings)
    measure(arms, setups, plan, work, logs=setups.root / "logs")
    if args.streams == 1:
        _llama_bench(arms, setups, plan, work)
    out = args.out or RESULTS / f"{name}.json"
    write_json(out, {**head, **result_of(arms, work)})
    _print(arms, work, args)
    print(f"result: {out}\nraw turns: {work.path}")


def _run_first_token(
    args: argparse.Namespace, arms: Sequence[Arm], checkpoint: Checkpoint, setups: Setups, arguments: list[str]
) -> None:
    plan = first_token_plan(args, checkpoint, threads=_threads(args))
    settings = {
        **{key: getattr(args, key) for key in ("model", "first_token")},
        "threads": plan.threads,
        "prompts": [item.name for item in plan.items],
        "fingerprint": checkpoint.fingerprint,
    }
    head = {"kind": "first_token", **describe_run("benchmarks.peers", arguments), "settings": settings}
    work = WorkFile(args.work or setups.root / "first_token.jsonl", settings)
    measure(arms, setups, plan, work, logs=setups.root / "logs")
    result = first_token_result(arms, work)
    out = args.out or RESULTS / "first_token.json"
    write_json(out, {**head, **result})
    print_first_token(result, title=f"first token of {args.first_token} tokens, {args.model}, one request at a time")
    print(f"result: {out}\nraw turns: {work.path}")


def result_of(arms: Sequence[Arm], work: WorkFile) -> dict[str, Any]:
    """What the result file holds beside its head: rows, comparison with the fastest peer, machine probes, raw times."""
    names = {arm.name for arm in arms}
    return {
        "rows": [row.to_json() for row in rows_of(arms, work)],
        "against_fastest_peer": best_against_ours(arms, work),
        "arms": {name: record for name, record in work.arms.items() if name in names},
        "probes": probes_of(work),
        "llama_bench": {line["weights"]: line["tokens_per_s"] for line in work.others if line["kind"] == "llama_bench"},
        "raw": [
            {"round": round_, "item": item, "arm": arm, **_without_tokens(reply)}
            for (round_, item, arm), reply in work.turns.items()
            if arm in names
        ],
    }


def _without_tokens(reply: dict[str, Any]) -> dict[str, Any]:
    """Times and counts; the outputs themselves stay in the work file."""
    answers = reply["answers"]
    return {
        "tokens": [len(answer["tokens"]) for answer in answers],
        "first_s": [answer.get("first_s") for answer in answers],
        **{key: value for key, value in reply.items() if key != "answers"},
    }


def _print(arms: Sequence[Arm], work: WorkFile, args: argparse.Namespace) -> None:
    streams = "one stream" if args.streams == 1 else f"{args.streams} streams"
    print_table(rows_of(arms, work), title=f"peers, {args.model}, {args.tokens} new tokens, greedy, {streams}")
    for line in best_against_ours(arms, work):
        ratio = line["ratio"]
        print(f"{line['arm']}: {ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f}) of {line['against']}")
    for name, found in probes_of(work).items():
        print(f"{name}: {found['median']:.3g} ({found['lower_quartile']:.3g} to {found['upper_quartile']:.3g})")
    for line in work.others:
        if line["kind"] == "llama_bench":
            print(f"llama-bench {line['weights']}, empty context: {line['tokens_per_s']:.0f} tokens/s")


def _plan(args: argparse.Namespace, checkpoint: Checkpoint) -> Plan:
    tokenizer = checkpoint.tokenizer
    rows = [row for group in args.groups for row in pick(group, args.per_task, args.traffic)]
    rendered = [(row.id, row.category, encode(tokenizer, row)) for row in by_turns(rows)]
    items: list[Item] = make_items(rendered, args.streams)
    warm = encode(tokenizer, load_group("prose")[0])
    return Plan(
        items=items,
        warm=warm,
        tokens=args.tokens,
        streams=args.streams,
        rounds=args.rounds,
        threads=_threads(args),
        stop_ids=tuple(checkpoint.config.eos_token_ids),
    )


def _threads(args: argparse.Namespace) -> int:
    return args.threads or len(os.sched_getaffinity(0))


def pick(group: str, per_task: int, traffic: Path | None) -> list[PromptRow]:
    """The first ``per_task`` prompts of each task of a group: of the subset where it has as many, else of the whole set.

    A task is a category of Spec-Bench; the other groups are one task each.
    """
    chosen = _first(load_group(group, traffic=traffic), group, per_task)
    if len(chosen) < per_task * len({_task(row, group) for row in chosen}):
        chosen = _first(load_group(group, traffic=traffic, full=True), group, per_task)
    return chosen


def _first(rows: Sequence[PromptRow], group: str, per_task: int) -> list[PromptRow]:
    found: dict[str, list[PromptRow]] = {}
    for row in rows:
        found.setdefault(_task(row, group), []).append(row)
    return [row for each in found.values() for row in each[:per_task]]


def _task(row: PromptRow, group: str) -> str:
    return row.category if group == "spec_bench" else group


def by_turns(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The tasks in turn, so that a run that is cut off has seen all of them."""
    groups: dict[tuple[str, str], list[PromptRow]] = {}
    for row in rows:
        groups.setdefault((row.group, _task(row, row.group)), []).append(row)
    longest = max((len(each) for each in groups.values()), default=0)
    return [each[index] for index in range(longest) for each in groups.values() if index < len(each)]


def _llama_bench(arms: Sequence[Arm], setups: Setups, plan: Plan, work: WorkFile) -> None:
    """llama.cpp's own figure for each copy of the weights that was measured, once a run: no prompt, no server."""
    done = {line["weights"] for line in work.others if line["kind"] == "llama_bench"}
    used = {arm.weights for arm in arms if arm.peer == "llamacpp" and any(key[2] == arm.name for key in work.turns)}
    for weights in sorted(used - done):
        command = [*setups.llama_bench(weights), "-t", str(plan.threads)]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        if shown.returncode:
            print(f"llama-bench {weights} failed with status {shown.returncode}", file=sys.stderr)
            continue
        [entry] = json.loads(shown.stdout)
        work.add(kind="llama_bench", weights=weights, tokens_per_s=entry["avg_ts"], spread=entry["stddev_ts"])


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    add_prompt_options(parser)
    parser.add_argument("--list", action="store_true", help="name all arms and stop")
    parser.add_argument("--setup", action="store_true", help="install, build and convert only")
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM", help="arms, or all arms of a peer, by name")
    parser.add_argument("--root", type=Path, default=cache_dir() / "peers", help="folder of environments and builds")
    parser.add_argument("--model", default=MODEL, help="alias or GGUF file of the target")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="prompt groups")
    parser.add_argument("--per-task", type=_positive, default=3, help="prompts a task")
    parser.add_argument("--tokens", type=_positive, default=128, help="new tokens a prompt")
    parser.add_argument("--streams", type=_positive, default=1, help="requests at a time")
    parser.add_argument("--rounds", type=_positive, default=1, help="times that everything is run, with new drivers")
    parser.add_argument(
        "--first-token",
        type=_positive,
        metavar="LENGTH",
        help="time the first token of prompts of this many tokens, plain arms only; of what follows only --prompts, "
        "--rounds, --threads, --jobs, --work and --out count",
    )
    parser.add_argument("--prompts", type=_positive, default=16, help="how many prompts --first-token takes")
    parser.add_argument("--num-draft-tokens", type=_positive, default=8, help="most draft tokens a step of Outrider")
    parser.add_argument("--draft", nargs="+", default=[], metavar="SPEC", help="more drafters of Outrider")
    parser.add_argument("--threads", type=_positive, help="of every arm (default: the processors of this process)")
    parser.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--work", type=Path, help="the run's record (default: in --root)")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
