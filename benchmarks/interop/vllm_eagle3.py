"""An exported head in vLLM beside the same head in our engine: same prompts, greedy, chains of the same length.

The head is exported (``outrider export --to vllm``), checked, and loaded by vLLM's CPU build in an environment of its own
(:mod:`benchmarks.peers`). Accepted length and the rate at each position must agree within 0.05; how both are counted says
:mod:`benchmarks.interop.counting`. Texts may differ: two bfloat16 engines round differently, and a tie is a tie.

vLLM's answers are kept as they come, so that a run that was cut off goes on; its counters, its record of every step and its
log are kept beside the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.arms import MODEL
from benchmarks.interop.counting import Answer, Counts, count_own, count_whole, shared_lengths, worst_gap
from benchmarks.peers.__main__ import by_turns
from benchmarks.peers.catalogue import Arm
from benchmarks.peers.installs import NotAvailable
from benchmarks.peers.process import Driver, DriverError
from benchmarks.peers.setups import DRIVERS, Ready, Setups
from benchmarks.peers.workfile import WorkFile
from benchmarks.prompts import PromptRow, add_prompt_options, encode, load_group
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, wide_console, write_json
from benchmarks.sources import read_jsonl
from outrider.drafters.build import make_drafter
from outrider.drafters.head_folder import read_head
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import DataError, OutriderError
from outrider.export.check import check_exported
from outrider.export.folder import export_head
from outrider.export.vllm import VLLM
from outrider.models.checkpoint import Checkpoint
from outrider.models.fetch import cache_dir
from outrider.models.load import load_checkpoint, load_target
from outrider.sampling.params import SamplingParams

TOLERANCE = 0.05
ARM = "vllm-eagle3"
CHUNK = 10


def main(argv: list[str] | None = None) -> int:
    """Export, run both, compare; status 1 if they disagree."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    try:
        checkpoint = load_checkpoint(args.model, tool_rendering="system")
        prompts = [encode(checkpoint.tokenizer, row) for row in _rows(args)]
        checked = _export(args, checkpoint)
        theirs, work = _run_vllm(args, checkpoint, prompts)
        ours, described = _run_outrider(args, prompts)
        result = compare(ours, theirs, num_draft_tokens=args.num_draft_tokens, max_tokens=args.tokens)
    except (OutriderError, NotAvailable, DriverError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    head = {"kind": "interop_vllm_eagle3", **describe_run("benchmarks.interop.vllm_eagle3", arguments)}
    raw = {"vllm": work.arms[ARM], "turns": [turn for _, turn in sorted(work.turns.items())], "log": _log(args)}
    write_json(args.out, {**head, "outrider": described, "check": checked, **result})
    write_json(args.out.with_name(args.out.stem + "_raw.json"), _without_root(raw, args))
    print_result(result)
    print(f"result: {args.out}")
    return 0 if result["agrees"] else 1


def compare(
    ours: Sequence[Answer], theirs: Sequence[Answer], *, num_draft_tokens: int, max_tokens: int
) -> dict[str, Any]:
    """Counts of both, by their own rules, over whole steps, and over whole steps of the same text; and whether they agree."""
    lengths = shared_lengths(ours, theirs)
    both = (ours, theirs)
    own = [count_own(each, num_draft_tokens) for each in both]
    whole = [count_whole(each, num_draft_tokens, max_tokens=max_tokens) for each in both]
    same = [count_whole(each, num_draft_tokens, max_tokens=max_tokens, lengths=lengths) for each in both]
    return {
        "prompts": len(ours),
        "identical_outputs": sum(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True)),
        "shared_tokens": sum(lengths),
        "counts": {"whole steps": _named(whole), "same text": _named(same), "each its own": _named(own)},
        "gaps": {"whole steps": _gap(whole), "same text": _gap(same), "each its own": _gap(own)},
        "tolerance": TOLERANCE,
        "agrees": _gap(whole) <= TOLERANCE,
    }


def _gap(counts: Sequence[Counts]) -> float:
    return round(worst_gap(*counts), 4)


def _named(counts: Sequence[Counts]) -> dict[str, Any]:
    return {name: each.to_json() for name, each in zip(("outrider", "vllm"), counts, strict=True)}


def print_result(result: dict[str, Any]) -> None:
    """One row an engine and way of counting."""
    table = Table(title="accepted length, and share of steps that kept a draft at each position", title_justify="left")
    size = len(result["counts"]["whole steps"]["vllm"]["rates"])
    for column in ("counting", "engine", "steps", "accepted length", *(str(i + 1) for i in range(size))):
        table.add_column(column, justify="left" if column in ("counting", "engine") else "right")
    for key, engines in result["counts"].items():
        for engine, counts in engines.items():
            rates = [f"{rate:.3f}" for rate in counts["rates"]]
            table.add_row(key, engine, str(counts["steps"]), f"{counts['accepted_length']:.3f}", *rates)
    wide_console().print(table)
    verdict = "within" if result["agrees"] else "NOT within"
    gaps = ", ".join(f"{key} {gap:.3f}" for key, gap in result["gaps"].items())
    print(f"largest differences: {gaps}; over whole steps {verdict} {result['tolerance']}")
    print(
        f"{result['identical_outputs']} of {result['prompts']} outputs identical, {result['shared_tokens']} tokens shared"
    )


def _rows(args: argparse.Namespace) -> list[PromptRow]:
    """Chats of a file of one's own, or the first prompts of Spec-Bench, its tasks in turn."""
    if args.rows is None:
        return by_turns(load_group("spec_bench", traffic=args.traffic, full=True))[: args.prompts]
    try:
        found = read_jsonl(args.rows.read_bytes(), str(args.rows))
    except OSError as error:
        raise DataError(f"{args.rows} cannot be read: {error.strerror}") from None
    return [
        PromptRow(id=str(index), group="rows", category="rows", messages=row["messages"], tools=row.get("tools"))
        for index, row in enumerate(found[: args.prompts])
    ]


def _export(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    """Write the head for vLLM, and what the check says of it.

    Raises:
        DataError: it found something wrong.
    """
    exported = export_head(read_head(args.head), checkpoint, VLLM, _exported_folder(args))
    report = check_exported(exported)
    if not report.is_sound:
        raise DataError(f"the exported head is not sound: {report.problems[0]}")
    return {"engine": report.engine, "tensors": len(report.tensors), "ids": len(report.ids)}


def _exported_folder(args: argparse.Namespace) -> Path:
    folder: Path = args.root.resolve() / "interop" / args.head.resolve().name
    return folder


def _run_vllm(
    args: argparse.Namespace, checkpoint: Checkpoint, prompts: Sequence[list[int]]
) -> tuple[list[Answer], WorkFile]:
    """All prompts through vLLM, some at a time; those that an earlier run decoded are taken from its record."""
    exported = _exported_folder(args)
    weights = (exported / "model.safetensors").stat()
    settings = {
        **{key: getattr(args, key) for key in ("model", "tokens", "num_draft_tokens", "streams", "float32_logits")},
        "head": args.head.resolve().name,
        "head_bytes": weights.st_size,
        "head_digest": _digest(exported / "model.safetensors"),
        "prompts": [len(prompt) for prompt in prompts],
    }
    work = WorkFile(args.work or args.root / "interop" / f"{exported.name}.jsonl", settings)
    chunks = [list(prompts[start : start + CHUNK]) for start in range(0, len(prompts), CHUNK)]
    left = [index for index in range(len(chunks)) if not work.has(0, str(index), ARM)]
    if left:
        ready = _ready(args, checkpoint)
        driver = Driver(ready, _start(args, prompts), log=_log_file(args), start_s=900.0, request_s=600.0)
        try:
            work.add(kind="arm", arm=ARM, **{key: value for key, value in driver.about.items() if key != "ready"})
            for index in left:
                request = {
                    "prompts": chunks[index],
                    "max_tokens": args.tokens,
                    "stop_ids": list(checkpoint.config.eos_token_ids),
                }
                work.add(kind="turn", round=0, item=str(index), arm=ARM, reply=driver.ask(request))
                print(f"vllm: {min(CHUNK * (index + 1), len(prompts))} of {len(prompts)}", file=sys.stderr, flush=True)
        finally:
            driver.close()
    replies = [work.turns[0, str(index), ARM] for index in range(len(chunks))]
    return [_their_answer(answer) for reply in replies for answer in reply["answers"]], work


def _their_answer(answer: dict[str, Any]) -> Answer:
    steps = answer["steps"] or {"per_step_drafted": [], "per_step_accepted": []}
    return Answer(
        tokens=tuple(answer["tokens"]),
        drafted=tuple(steps["per_step_drafted"]),
        accepted=tuple(steps["per_step_accepted"]),
    )


def _ready(args: argparse.Namespace, checkpoint: Checkpoint) -> Ready:
    """vLLM's environment, as the peers' comparison prepares it, with the driver for heads."""
    setups = Setups(args.root.resolve(), model=args.model, checkpoint=checkpoint, jobs=1)
    arm = Arm(name=ARM, peer="vllm", weights="bf16", plain=ARM)
    options = {"head": str(_exported_folder(args)), "num_draft_tokens": args.num_draft_tokens}
    options["float32_logits"] = args.float32_logits
    return dataclasses.replace(setups.prepare(arm), driver=DRIVERS / "drive_vllm_eagle3.py", options=options)


def _start(args: argparse.Namespace, prompts: Sequence[list[int]]) -> dict[str, Any]:
    longest = max(len(prompt) for prompt in prompts)
    context = -(-(longest + args.tokens + 72) // 256) * 256
    return {"threads": len(os.sched_getaffinity(0)), "streams": args.streams, "context": context}


def _run_outrider(args: argparse.Namespace, prompts: Sequence[list[int]]) -> tuple[list[Answer], dict[str, Any]]:
    """The same with our engine in bfloat16, every step drafting the whole chain."""
    target = load_target(args.model, dtype="bfloat16", device="cpu", tool_rendering="system")
    config = EngineConfig.from_dict(
        {
            "num_draft_tokens": args.num_draft_tokens,
            "schedule": "fixed",
            "max_batch_size": args.streams,
            "num_cached_prefixes": 0,
        }
    )
    engine = Engine(target, drafter=make_drafter(str(args.head), target), config=config)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    answers = []
    for result in engine.generate([list(prompt) for prompt in prompts], params):
        steps = [step for step in result.steps if step.drafter and not step.is_prefill]
        drafted, accepted = (tuple(getattr(step, name) for step in steps) for name in ("drafted", "accepted"))
        answers.append(Answer(tokens=tuple(result.token_ids), drafted=drafted, accepted=accepted))
    described = {"path": target.spec.path, "precision": target.spec.precision, "fingerprint": target.spec.fingerprint}
    return answers, described


def _digest(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _log_file(args: argparse.Namespace) -> Path:
    path: Path = args.root.resolve() / "logs" / f"{ARM}.log"
    return path


def _log(args: argparse.Namespace) -> list[str]:
    """What vLLM itself said about heads and speculation."""
    if not _log_file(args).is_file():
        return []
    lines = _log_file(args).read_text(encoding="utf-8", errors="replace").splitlines()
    words = ("eagle", "speculat", "specdecoding", "draft", "aux")
    return [line for line in lines if any(word in line.lower() for word in words)]


def _without_root(value: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The same without this machine's paths, so that it may be published."""
    text = json.dumps(value, ensure_ascii=False)
    found: dict[str, Any] = json.loads(text.replace(json.dumps(str(args.root.resolve()))[1:-1], "ROOT"))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interop.vllm_eagle3", description=__doc__)
    add_prompt_options(parser)
    parser.add_argument("head", type=Path, help="folder of a head")
    parser.add_argument("--model", default=MODEL, help="alias or folder of the target")
    parser.add_argument("--prompts", type=int, default=100, help="how many prompts")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="JSON Lines with messages instead of Spec-Bench")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens a prompt")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="length of a chain")
    parser.add_argument("--streams", type=int, default=8, help="requests at a time")
    parser.add_argument(
        "--float32-logits", action="store_true", help="let vLLM's LM head run in float32: fewer ties, closer texts"
    )
    parser.add_argument("--root", type=Path, default=cache_dir() / "peers", help="folder of the peers' environments")
    parser.add_argument("--work", type=Path, help="record of vLLM's answers (default: in --root)")
    parser.add_argument("--out", type=Path, default=RESULTS / "interop_vllm.json", help="result file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
