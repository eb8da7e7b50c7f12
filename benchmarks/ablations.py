"""What each choice of the training recipe brings: one change at a time, so many loss-masked positions each, the same data.

Every variant is a run of ``outrider train eagle3`` itself, in a folder of its own below ``--work``; the target's answers are
made once and shared, and so are stored taps (``--taps-from``) by all variants that read the same layers. A run that was cut
off goes on, one that is finished is only read. A variant is judged by tokens a pass on held-out prompts (the engine, greedy,
chains of four), best and last evaluation of its run.

Off-policy variants train on the file's own reference answers for a share of the rows; they use only rows that have one, and
so have a base of their own (``off-policy 0``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, wide_console, write_json
from outrider.errors import DataError, OutriderError
from outrider.files import read_lines
from outrider.models.load import load_checkpoint

BASE: Mapping[str, str] = {
    "--init": "target-layer:29",
    "--unroll": "4",
    "--batch-positions": "1024",
    "--lr": "0.001",
    "--draft-vocab": "8192",
    "--tap-layers": "2,15,27",
}
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "base": {},
    "random start": {"--init": "random"},
    "start from the target's head": {"--init": "target-head"},
    "vocabulary 4096": {"--draft-vocab": "4096"},
    "vocabulary 12288": {"--draft-vocab": "12288"},
    "vocabulary 16384": {"--draft-vocab": "16384"},
    "taps 9,20,30": {"--tap-layers": "9,20,30"},
    "taps 15,27,30": {"--tap-layers": "15,27,30"},
    "tap 30 alone": {"--tap-layers": "30"},
    "two layers": {"--layers": "2"},
    "learning rate 0.0003": {"--lr": "0.0003"},
    "learning rate 0.003": {"--lr": "0.003"},
    "batch 256": {"--batch-positions": "256"},
    "batch 4096": {"--batch-positions": "4096"},
    "loss tv": {"--loss": "tv"},
    "loss lk": {"--loss": "lk"},
    "unroll 2": {"--unroll": "2"},
    "off-policy 0": {},
    "off-policy 50": {},
    "off-policy 100": {},
}
_OFF_POLICY = "off-policy "


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What all variants share.

    Attributes:
        traffic: prompts. answers: the target's, as a training run wrote them (``training/answers.jsonl``).
        taps: of an earlier run on the same texts (``training/taps``), for variants that read its layers.
        work: folder of the runs. positions: loss-masked ones of each run. common: flags of all runs.
    """

    traffic: Path
    answers: Path
    taps: Path | None
    work: Path
    positions: int
    model: str
    common: Sequence[str]


def run_variant(study: Study, name: str) -> dict[str, Any]:
    """Train one variant, or go on with it; returns its flags and what was measured."""
    folder = study.work / name.replace(" ", "-").replace("'", "").replace(",", "-")
    flags = {**BASE, **VARIANTS[name]}
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = _traffic(study, name, folder)
        command = [sys.executable, "-m", "outrider", "train", "eagle3", str(source), "--out", str(folder)]
        command += ["--target", study.model, "--positions", str(study.positions), "--epochs", "1000", *study.common]
        command += [part for pair in flags.items() for part in pair]
        if name.startswith(_OFF_POLICY):
            command += ["--answers", "keep", "--taps", "store"]  # few and short texts, shown many times
        elif _share_taps(study, flags, folder):
            command += ["--taps", "store"]
        if (folder / "training").exists() and (folder / "training" / "state.pt").exists():
            command += ["--resume"]
        print(f"{name}: {' '.join(command[3:])}", file=sys.stderr, flush=True)
        subprocess.run(command, check=True)
        (folder / "done").touch()
    return {"variant": name, "flags": flags, **_measured(folder)}


def _measured(folder: Path) -> dict[str, Any]:
    lines = list(read_lines(folder / "training" / "log.jsonl"))
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    updates = [line for line in lines if line["kind"] == "update"]
    best = max(evaluations, key=lambda line: float(line["tokens_per_pass"]))
    return {
        "best": best["tokens_per_pass"],
        "last": evaluations[-1]["tokens_per_pass"],
        "kept_at_depth": best["kept_at_depth"],
        "agreement_along_texts": best["agreement_along_texts"],
        "positions": evaluations[-1]["positions"],
        "updates": updates[-1]["update"],
        "masked_positions_per_s": updates[-1]["masked_positions_per_s"],
        "share_of_matrix_rate": updates[-1]["share_of_matrix_rate"],
        "curve": [[line["positions"], line["tokens_per_pass"]] for line in evaluations],
    }


def _evaluations(log: Path) -> list[dict[str, Any]]:
    """What more positions bring: the evaluations of a long run."""
    names = ("positions", "tokens_per_pass", "agreement_along_texts")
    return [{name: line[name] for name in names} for line in read_lines(log) if line["kind"] == "evaluation"]


def _traffic(study: Study, name: str, folder: Path) -> Path:
    """The file that a variant trains on; the target's answers are laid beside it."""
    if name.startswith(_OFF_POLICY):
        return _mixed(study, int(name.removeprefix(_OFF_POLICY)) / 100, folder / "mixed.jsonl")
    shared = folder / "training" / "answers.jsonl"
    if not shared.exists():
        shared.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(study.answers, shared)
    return study.traffic


def _share_taps(study: Study, flags: Mapping[str, str], folder: Path) -> bool:
    """Link the earlier run's shards into a variant's folder if it reads the same layers; training checks the texts itself.

    The manifest is copied, since a run may write it anew; shards are never changed once they are written.
    """
    if study.taps is None:
        return False
    made_from = json.loads((study.taps / "manifest.json").read_text(encoding="utf-8"))["made_from"]
    if ",".join(map(str, made_from["tap_layers"])) != flags["--tap-layers"]:
        return False
    shared = folder / "training" / "taps"
    if not (shared / "manifest.json").exists():
        shared.mkdir(parents=True, exist_ok=True)
        for shard in study.taps.glob("*.safetensors"):
            (shared / shard.name).unlink(missing_ok=True)
            os.link(shard, shared / shard.name)
        shutil.copyfile(study.taps / "manifest.json", shared / "manifest.json")
    return True


def _mixed(study: Study, share: float, path: Path) -> Path:
    """Rows that have a reference, each with it (for the share) or with the target's answer as its last message."""
    tokenizer = load_checkpoint(study.model).tokenizer
    if tokenizer is None:
        raise DataError(f"{study.model} has no tokenizer; off-policy variants need text")
    answers = {line["id"]: line["tokens"] for line in read_lines(study.answers)}
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as out:
        # Not splitlines, which ends lines at characters that may stand in JSON strings.
        for row in map(json.loads, filter(str.strip, study.traffic.read_text(encoding="utf-8").split("\n"))):
            reference = row.get("reference")
            if not isinstance(reference, str) or row["id"] not in answers:
                continue
            is_reference = draw.random() < share
            text = reference if is_reference else tokenizer.decode(answers[row["id"]])
            answer = {"role": "assistant", "content": text}
            out.write(json.dumps({**row, "messages": [*row["messages"], answer]}, ensure_ascii=False) + "\n")
    return path


def print_study(results: Sequence[Mapping[str, Any]]) -> None:
    """One row a variant, best first."""
    table = Table(title="tokens a pass on held-out prompts, one change at a time", title_justify="left")
    for column in ("variant", "best", "last", "kept by depth", "positions", "positions/s"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for each in sorted(results, key=lambda result: -float(result["best"])):
        kept = " ".join(f"{rate:.2f}" for rate in each["kept_at_depth"])
        numbers = (f"{each['best']:.3f}", f"{each['last']:.3f}", kept, f"{each['positions']}")
        table.add_row(each["variant"], *numbers, f"{each['masked_positions_per_s']:.0f}")
    wide_console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen variants; the result file is whole after each."""
    arguments = sys.argv[1:] if argv is None else argv
    args, common = _parser().parse_known_args(arguments)
    study = Study(
        traffic=args.traffic,
        answers=args.answers,
        taps=args.taps_from,
        work=args.work,
        positions=args.positions,
        model=args.model,
        common=common,
    )
    head = {"kind": "ablations", **describe_run("benchmarks.ablations", arguments), "positions": args.positions}
    head["long_run"] = _evaluations(args.long_run) if args.long_run else []
    results: list[dict[str, Any]] = []
    try:
        for name in args.only or VARIANTS:
            results.append(run_variant(study, name))
            write_json(args.out, {**head, "results": results})
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: the run ended with status {error.returncode}; run this again to go on", file=sys.stderr)
        return 1
    print_study(results)
    print(f"result: {args.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablations",
        description=__doc__,
        epilog="Other flags go to every training run, as --tool-rendering system or --threads 1.",
    )
    parser.add_argument("traffic", type=Path, metavar="TRAFFIC.jsonl")
    parser.add_argument("--answers", type=Path, required=True, help="training/answers.jsonl of a run on this file")
    parser.add_argument("--taps-from", type=Path, help="training/taps of that run, made by --taps store")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--long-run", type=Path, metavar="LOG", help="training/log.jsonl of a long run, kept beside")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--positions", type=int, default=500_000, help="loss-masked positions of each run")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=RESULTS / "ablations.json")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
