"""Scenarios S13 (training data, mask, resume) and S15 (export) on the real model, through the commands that a user types.

Twelve rows, most of them messy, are trained on by ``outrider train eagle3``; a shipped head is exported and taken back. Each
check says what was seen. A check that was done before is taken from the result file, so that a run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.arms import MODEL
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, wide_console, write_json
from outrider.drafters.build import make_drafter
from outrider.export.check import check_exported
from outrider.export.folder import read_exported
from outrider.files import read_lines
from outrider.models.base import LoadedTarget
from outrider.models.load import load_checkpoint, load_target
from outrider.traffic import read_rows
from outrider.train.corpus import read_corpus
from outrider.train.evaluate import decode_held_out

_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
_CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
_QUESTION = {"role": "user", "content": "Why is the sky blue?"}
_ANSWER = "The sky is blue because the air scatters blue light more than red light."

Chat = list[dict[str, Any]]
ROWS: Mapping[str, Chat | str] = {
    "single turn": [_QUESTION, {"role": "assistant", "content": _ANSWER}],
    "three turns": [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Green is a colour that many people like."},
        {"role": "user", "content": "Another one?"},
        {"role": "assistant", "content": "Red is another one, and so is yellow."},
        {"role": "user", "content": "A third?"},
        {"role": "assistant", "content": "Violet would be the third."},
    ],
    "system, tools, tool result": [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny, 21 degrees"},
        {"role": "assistant", "content": "It is sunny, with 21 degrees."},
    ],
    "reasoning": [
        {"role": "user", "content": "What is 17 times 3?"},
        {"role": "assistant", "content": "<think>\n17 times 3 is 51.\n</think>\n\nIt is 51."},
    ],
    "empty list": [],
    "assistant first": [
        {"role": "assistant", "content": "Welcome, what would you like to know?"},
        {"role": "user", "content": "How tall is Everest?"},
        {"role": "assistant", "content": "Everest is 8,849 metres tall."},
    ],
    "empty assistant text": [{"role": "user", "content": "Say nothing."}, {"role": "assistant", "content": ""}],
    "nothing trained": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "No answer here."}],
    "33,000 tokens": [
        {"role": "user", "content": "word " * 33_000},
        {"role": "assistant", "content": "That was long."},
    ],
    "duplicate": [_QUESTION, {"role": "assistant", "content": _ANSWER}],
    "broken line": '{"messages": [{"role": "user", "content": "half a',
    "non-Latin": [
        {"role": "user", "content": "Как дела? 你好吗？"},
        {"role": "assistant", "content": "Хорошо, спасибо. 我很好，谢谢。"},
    ],
}
NUM_UPDATES = 100
KILLED_BEHIND = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all checks share: the head to export, the target's name, a folder to work in, threads of the commands."""

    head: Path
    model: str
    work: Path
    threads: int

    @property
    def rows(self) -> Path:
        """The twelve rows as a file."""
        path = self.work / "rows.jsonl"
        if not path.exists():
            lines = [
                row
                if isinstance(row, str)
                else json.dumps({"id": name, "messages": row} | ({"tools": _TOOLS} if "tool" in name else {}))
                for name, row in ROWS.items()
            ]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def outrider(self, *words: str | Path, fails: bool = False) -> str:
        """Run a command; returns what it printed."""
        command = [sys.executable, "-m", "outrider", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, f"{' '.join(command[2:])} ended with {done.returncode}: {said[-1500:]}"
        return said

    def train_words(self, out: Path, *more: str | Path, rows: Path | None = None) -> list[str | Path]:
        """``outrider train eagle3`` on the rows as they are, their own answers kept."""
        words: list[str | Path] = ["train", "eagle3", rows or self.rows, "--target", self.model, "--out", out]
        words += ["--tool-rendering", "system", "--held-out", "0", "--init", "target-layer:29"]
        threads = [] if "--threads" in more else ["--threads", str(self.threads)]
        answers = [] if "--temperature" in more else ["--answers", "keep"]
        return [*words, *answers, *threads, *more]

    def fresh(self, name: str) -> Path:
        """An empty place for a run."""
        shutil.rmtree(self.work / name, ignore_errors=True)
        return self.work / name

    def target(self) -> LoadedTarget:
        """The target, here."""
        return load_target(self.model, dtype="bfloat16", device="cpu", tool_rendering="system")


Seen = tuple[bool, str]


def preview(bench: Bench) -> Seen:
    """S13 (a): each row with its trained tokens marked; rows left out are counted by reason."""
    said = bench.outrider("train", "eagle3", bench.rows, "--target", bench.model, "--tool-rendering", "system",
                          "--answers", "keep", "--preview", "12")  # fmt: skip
    expected = {
        "three turns": 3, "single turn": 1, "system, tools, tool result": 2, "reasoning": 1,
        "assistant first": 2, "non-Latin": 1,
    }  # fmt: skip
    found = re.finditer(r"^row (.+?) \(line.*?\n(.*?)(?=^row |^left out|\Z)", said, re.M | re.S)
    runs = {match.group(1): re.findall(r"⟦(.*?)⟧", match.group(2), re.S) for match in found}
    counts = {name: len(turns) for name, turns in runs.items()}
    leaked = [name for name, turns in runs.items() if any("<|im_start|>" in turn for turn in turns)]
    reasons = "; ".join(re.findall(r"^left out: (.*)$", said, re.M))
    shown = f"{len(counts)} rows shown, {sum(counts.values())} assistant turns marked"
    return counts == expected and not leaked, f"{shown}, headers in {len(leaked)} of them; left out: {reasons}"


def nothing_trained(bench: Bench) -> Seen:
    """S13 (a): a file without a token to train on is an error."""
    path = bench.work / "nothing.jsonl"
    path.write_text(json.dumps({"messages": ROWS["nothing trained"]}) + "\n", encoding="utf-8")
    said = bench.outrider(*bench.train_words(bench.fresh("nothing"), rows=path), fails=True)
    return "nothing to train on" in said, said.strip().splitlines()[-1]


def rendered_alike(bench: Bench) -> Seen:
    """S13 (b): token ids are those that the engine's chat renderer gives."""
    tokenizer = load_checkpoint(bench.model, tool_rendering="system").tokenizer
    assert tokenizer is not None
    inputs = read_rows(bench.rows.read_bytes(), name="rows")
    corpus = read_corpus(inputs, tokenizer, wants_answers=True, max_length=2048)
    alike = [
        list(text.tokens)
        == tokenizer.encode_chat([dict(m) for m in text.messages], tools=[dict(t) for t in text.tools] or None)
        for text in corpus.texts
    ]
    return all(alike) and len(alike) >= 6, f"{sum(alike)} of {len(alike)} prompts equal"


def disk(bench: Bench) -> Seen:
    """S13 (c): the forecast against what lies there afterwards; a budget below it is refused."""
    out = bench.fresh("disk")
    said = bench.outrider(*bench.train_words(out, "--taps", "store", "--epochs", "1"))
    forecast = float(re.findall(r"disk ([\d.]+) GB", said)[0])
    files = [path for path in out.rglob("*") if path.is_file() and path.suffix in (".safetensors", ".pt")]
    found = sum(path.stat().st_size for path in files) / 1e9
    refused = bench.outrider(
        *bench.train_words(bench.fresh("small"), "--taps", "store", "--disk-budget", "0.0001"), fails=True
    )
    reason = refused.strip().splitlines()[-1].partition("; ")[0]
    return abs(forecast - found) <= 0.1 * found, f"forecast {forecast:.3f} GB, found {found:.3f} GB; {reason}"


def overfit(bench: Bench) -> Seen:
    """S13 (d): one row, its answer written greedily by the target, 300 updates: the served head keeps what it drafts there."""
    row, out = bench.work / "one.jsonl", bench.fresh("one")
    row.write_text(bench.rows.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    words = ("--temperature", "0", "--max-answer-tokens", "128", "--epochs", "300", "--taps", "store")
    bench.outrider(*bench.train_words(out, *words, rows=row))
    target = bench.target()
    assert target.tokenizer is not None
    prompt = target.tokenizer.encode_chat([_QUESTION])
    drafter = make_drafter(str(out), target)
    assert drafter is not None
    stats = decode_held_out(target, drafter, [prompt], max_tokens=128, num_draft_tokens=4).stats
    share = stats.accepted / max(stats.drafted, 1)
    return (
        share >= 0.95,
        f"{stats.accepted} of {stats.drafted} draft tokens kept ({share:.3f}), {stats.tokens_per_pass:.2f} tokens a pass",
    )


def killed(bench: Bench) -> Seen:
    """S13 (e): ended by SIGKILL in the middle and resumed, against a run that nobody disturbed."""
    more = ("--epochs", "1000", "--batch-positions", "32", "--save-every", "2", "--taps", "store")
    limit = ("--positions", str(NUM_UPDATES * 40))
    whole, cut = bench.fresh("whole"), bench.fresh("cut")
    bench.outrider(*bench.train_words(whole, *more, *limit))
    words = [sys.executable, "-m", "outrider", *map(str, bench.train_words(cut, *more, *limit))]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and _last_update(cut) < KILLED_BEHIND:
        time.sleep(0.05)
    was_running = process.poll() is None
    process.kill()
    process.wait()
    killed_at = _last_update(cut)
    said = bench.outrider(*bench.train_words(cut, *more, *limit, "--resume"))
    left, right = (_updates(each) for each in (whole, cut))
    names = ("update", "loss", "positions", "learning_rate")
    is_same = [[line[name] for name in names] for line in left] == [[line[name] for name in names] for line in right]
    tensors = [load_file(each / "model.safetensors") for each in (whole, cut)]
    is_equal = all(tensor.equal(tensors[1][name]) for name, tensor in tensors[0].items())
    [went_on] = re.findall(r"going on behind update (\d+) of (\d+)", said)
    seen = f"killed behind update {killed_at}, went on behind {went_on[0]} of {went_on[1]}; losses, rows and rates "
    seen += ("equal" if is_same else "NOT equal") + f", weights {'equal' if is_equal else 'NOT equal'} bit for bit"
    return was_running and is_same and is_equal, seen


def _updates(out: Path) -> list[dict[str, Any]]:
    path = out / "training" / "log.jsonl"
    return [line for line in read_lines(path) if line["kind"] == "update"] if path.exists() else []


def _last_update(out: Path) -> int:
    try:
        lines = _updates(out)
    except ValueError:  # a line that is being written
        return 0
    return int(lines[-1]["update"]) if lines else 0


def large_vocabulary(bench: Bench) -> Seen:
    """S13 (f): more draft tokens than the data has different ones."""
    out = bench.fresh("vocabulary")
    said = bench.outrider(*bench.train_words(out, "--draft-vocab", "32000", "--epochs", "2"))
    target = bench.target()
    drafter = make_drafter(str(out), target)
    assert drafter is not None and target.tokenizer is not None
    prompt = target.tokenizer.encode_chat([_QUESTION])
    stats = decode_held_out(target, drafter, [prompt], max_tokens=32, num_draft_tokens=4).stats
    [line] = re.findall(r"draft vocabulary: (.*)", said)
    return stats.drafted > 0 and line.startswith("32000 "), f"{line}; the head drafts ({stats.drafted} tokens)"


def not_finite(bench: Bench) -> Seen:
    """S13 (g): an infinite number in a stored tap stops the run by the row's name; no head of such numbers is left behind."""
    out = bench.fresh("infinite")
    more = ("--taps", "store", "--batch-positions", "16")
    bench.outrider(*bench.train_words(out, *more, "--epochs", "1"))
    _spoil_tap(out / "training" / "taps")
    (out / "training" / "state.pt").unlink()
    said = bench.outrider(*bench.train_words(out, *more, "--epochs", "2"), fails=True)
    line = said.strip().splitlines()[-1]
    is_named = any(name in line for name in ROWS)
    is_finite = all(bool(tensor.isfinite().all()) for tensor in load_file(out / "model.safetensors").values())
    return is_named and is_finite, f"{line}; the head in the folder is {'' if is_finite else 'NOT '}finite"


def _spoil_tap(folder: Path) -> None:
    """Write infinity into the last text's last row, with the checksum that belongs to it."""
    import hashlib

    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    shard = folder / manifest["shards"][-1]["file"]
    tensors = load_file(shard)
    tensors["taps"][-1] = float("inf")
    save_file(tensors, shard)
    manifest["shards"][-1]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def workers(bench: Bench) -> Seen:
    """S13 (h): two threads make the same answers and the same taps as one."""
    made = []
    for threads in ("1", "2"):
        out = bench.fresh(f"threads{threads}")
        words = ("--temperature", "0,0.7,1.0", "--max-answer-tokens", "48", "--taps", "store", "--epochs", "1")
        bench.outrider(*bench.train_words(out, *words, "--threads", threads))
        training = out / "training"
        answers = {line["id"]: line["tokens"] for line in read_lines(training / "answers.jsonl")}
        manifest = json.loads((training / "taps" / "manifest.json").read_text(encoding="utf-8"))
        made.append((answers, manifest))
    tokens = sum(map(len, made[0][0].values()))
    is_same = made[0] == made[1]
    said = f"{len(made[0][0])} answers ({tokens} tokens) and {len(made[0][1]['shards'])} shard of taps"
    return is_same, f"{said} {'equal' if is_same else 'NOT equal'} by checksum"


def round_trip(bench: Bench) -> Seen:
    """S15: to each engine's layout and back, bit for bit; every key is listed, a hundred ids are looked up."""
    seen = []
    is_right = True
    for engine in ("vllm", "sglang"):
        there, back = bench.fresh(f"{engine}-there"), bench.fresh(f"{engine}-back")
        printed = bench.outrider("export", bench.head, "--to", engine, "--out", there, "--json").splitlines()
        said = json.loads(next(line for line in printed if line.startswith("{")))
        bench.outrider("import", there, "--out", back)
        first, last = (load_file(each / "model.safetensors") for each in (bench.head, back))
        is_equal = set(first) == set(last) and all(_same_bits(first[name], last[name]) for name in first)
        cards = [json.loads((each / "config.json").read_text(encoding="utf-8")) for each in (bench.head, back)]
        names = ("head", "target_name", "target_fingerprint", "template_hash")
        is_right &= is_equal and said["is_sound"] and all(cards[0].get(name) == cards[1].get(name) for name in names)
        used = sum(key["is_used"] for key in said["keys"])
        seen.append(
            f"{said['engine']}: {len(first)} tensors {'equal' if is_equal else 'NOT equal'}, {used} keys used and "
            f"{len(said['keys']) - used} ignored, {len(said['ids'])} ids looked up"
        )
    return is_right, "; ".join(seen)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.view(torch.uint8).equal(other.view(torch.uint8))


def deleted_tensor(bench: Bench) -> Seen:
    """S15: the check fails for every single tensor that is deleted, and names it."""
    there = bench.fresh("vllm-there")
    bench.outrider("export", bench.head, "--to", "vllm", "--out", there)
    tensors = load_file(there / "model.safetensors")
    with safe_open(there / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    named = 0
    for name in tensors:
        save_file({n: t for n, t in tensors.items() if n != name}, there / "model.safetensors", metadata=metadata)
        report = check_exported(read_exported(there))
        named += any(name in problem for problem in report.problems)
    said = bench.outrider("import", there, "--check", fails=True).strip().splitlines()
    problem = next(line for line in said if line.startswith("problem: "))
    return named == len(tensors), f"{named} of {len(tensors)} deletions named; the command fails: {problem}"


CHECKS: Mapping[str, Callable[[Bench], Seen]] = {
    "S13 a: preview and reasons": preview,
    "S13 a: nothing to train on": nothing_trained,
    "S13 b: rendered as the engine renders": rendered_alike,
    "S13 c: disk forecast": disk,
    "S13 d: one row by heart": overfit,
    "S13 e: kill -9 and resume": killed,
    "S13 f: draft vocabulary of 32,000": large_vocabulary,
    "S13 g: a number that is not finite": not_finite,
    "S13 h: two threads or one": workers,
    "S15: there and back": round_trip,
    "S15: a deleted tensor": deleted_tensor,
}


def print_checks(results: Sequence[Mapping[str, Any]]) -> None:
    """One row a check."""
    table = Table(title="training and export, scenario by scenario", title_justify="left")
    for column in ("check", "verdict", "seen"):
        table.add_column(column)
    for each in results:
        table.add_row(each["check"], each["verdict"], each["seen"])
    wide_console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Run the checks that the result file does not hold yet; status 1 if one failed."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(head=args.head.resolve(), model=args.model, work=args.work.resolve(), threads=args.threads)
    before = json.loads(args.out.read_text(encoding="utf-8"))["results"] if args.out.exists() else []
    done = {each["check"]: each for each in before if each["verdict"] == "passed"}
    head = {"kind": "head_scenarios", **describe_run("benchmarks.head_scenarios", arguments)}
    for name in args.only or CHECKS:
        if name in done:
            continue
        try:
            is_right, seen = CHECKS[name](bench)
        except AssertionError as error:
            is_right, seen = False, str(error)
        done[name] = {"check": name, "verdict": "passed" if is_right else "failed", "seen": seen}
        print(f"{name}: {done[name]['verdict']}: {seen}", file=sys.stderr, flush=True)
        write_json(args.out, {**head, "results": [done[each] for each in CHECKS if each in done]})
    results = [done[each] for each in CHECKS if each in done]
    print_checks(results)
    print(f"result: {args.out}")
    return 0 if all(each["verdict"] == "passed" for each in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head_scenarios", description=__doc__)
    parser.add_argument("head", type=Path, help="folder of the head that is exported")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help="; ".join(CHECKS))
    parser.add_argument("--threads", type=int, default=1, help="of the commands")
    parser.add_argument("--out", type=Path, default=RESULTS / "head_scenarios.json")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
