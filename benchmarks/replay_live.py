"""Does replay count what decoding counts? The same requests, one after the other, by both; every difference is listed.

In float32, and in every precision of the native path, the counts must be equal. A difference in another precision, or where
two drafts are equally likely to the last bit, is named with its request and arm, and with the ties that explain it.
``--schedule adaptive`` lets the planner decide how deep each pass drafts, and replays the plan that it made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from benchmarks.sources import read_jsonl
from outrider import load_target, make_drafter
from outrider.device import one_torch_thread
from outrider.drafters.base import Drafter, LawDrafter
from outrider.engine.taps import wanted_taps
from outrider.errors import ConfigError
from outrider.measure.answers import AnsweredText, Question, generated_text, limit_of, question_of
from outrider.measure.live import LiveRun, decode_live
from outrider.measure.planned import replay_plan
from outrider.measure.reading import Ask, TrafficReader
from outrider.measure.record import Counts, MeasureResult
from outrider.measure.replay import tree_shape
from outrider.measure.run import measure
from outrider.measure.settings import MeasureSettings
from outrider.measure.target_pass import read_text
from outrider.measure.ties import draft_ties
from outrider.models.base import LoadedTarget
from outrider.sampling.params import SamplingParams

Key = tuple[str, str]
Numbers = tuple[float, ...]
TOTALS = ("passes", "steps", "committed", "drafted", "accepted")


def counts_of(result: MeasureResult) -> dict[Key, Numbers]:
    """What each request and arm counted, without times; depths that nothing reached say nothing."""
    return {(record.id, record.arm.name): numbers_of(record.counts) for record in result.records}


def numbers_of(counts: Counts) -> Numbers:
    """The totals, then what was reached and kept by depth."""
    depth = sum(count > 0 for count in counts.reached)
    totals = tuple(getattr(counts, name) for name in TOTALS)
    return (*totals, *counts.reached[:depth], *counts.kept[:depth])


def compare_fixed(target: LoadedTarget, spec: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways, as the command counts, for every length of one drafter."""
    found: list[dict[Key, Numbers]] = []
    for source in ("replay", "live"):
        settings = MeasureSettings(
            drafters=(spec,),
            num_draft_tokens=tuple(args.k),
            sampling=sampling_of(args),
            source=source,  # type: ignore[arg-type]
            limit=args.limit,
            batch_size=1,
        )
        with args.traffic.open("rb") as file:
            found.append(counts_of(measure(target, file, settings)))
    replayed, live = found
    differing = [
        {"id": id, "arm": arm, "replay": replayed.get((id, arm)), "live": numbers}
        for (id, arm), numbers in live.items()
        if replayed.get((id, arm)) != numbers
    ]
    ids = {each["id"] for each in differing}
    ties = ties_of(target, spec, ids, args) if ids else []
    return {"pairs": len(live), "totals": totals_of(live.values()), "differing": differing, "ties": ties}


def compare_planned(target: LoadedTarget, spec: str, args: argparse.Namespace) -> dict[str, Any]:
    """The planner decodes; replay follows the plan that it made."""
    questions = questions_of(target, args)
    drafter, other = drafter_of(target, spec), drafter_of(target, spec)
    live: dict[str, Numbers] = {}
    differing: list[dict[str, Any]] = []
    refused: list[str] = []
    keys = itertools.count()
    for run in decode_live(target, drafter, questions, num_draft_tokens=max(args.k), batch_size=1, schedule="adaptive"):
        read = read_text(target, text_of(target, run), wanted_taps(other))
        live[run.question.request.id] = numbers_of(run.counts)
        try:
            scores = replay_plan(other, read, run.plan, key=next(keys))
        except ConfigError as error:
            refused.append(str(error))
            continue
        replayed = numbers_of(scores.counts[0])
        if replayed != live[run.question.request.id] or scores.marks != run.marks:
            differing.append({"id": run.question.request.id, "replay": replayed, "live": numbers_of(run.counts)})
    shown = {"pairs": len(live) - len(refused), "totals": totals_of(live.values()), "differing": differing}
    return {**shown, "refused": refused, "ties": []}


def totals_of(found: Any) -> dict[str, float]:
    """Sums over requests and arms."""
    sums = [sum(column) for column in zip(*(numbers[: len(TOTALS)] for numbers in found), strict=True)]
    return dict(zip(TOTALS, sums, strict=True))


def ties_of(target: LoadedTarget, spec: str, ids: set[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Equally likely drafts in the texts that were counted differently."""
    drafter = drafter_of(target, spec)
    if not isinstance(drafter, LawDrafter) or tree_shape(drafter) is not None:
        return []
    questions = [question for question in questions_of(target, args) if question.request.id in ids]
    keys = itertools.count()
    found = []
    for run in decode_live(target, None, questions, num_draft_tokens=0, batch_size=1):
        read = read_text(target, text_of(target, run), wanted_taps(drafter))
        found += draft_ties(drafter, read, max(args.k), key=next(keys))
    return [asdict(tie) for tie in found]


def questions_of(target: LoadedTarget, args: argparse.Namespace) -> list[Question]:
    """The requests that are compared."""
    with args.traffic.open("rb") as file:
        asks = itertools.islice((ask for ask in TrafficReader(file) if isinstance(ask, Ask)), args.limit)
        found = [question_of(ask, sampling_of(args), target, target.tokenizer) for ask in asks]
    return [question for question in found if isinstance(question, Question)]


def text_of(target: LoadedTarget, run: LiveRun) -> AnsweredText:
    """What a decoding said, as a text to score."""
    limit = limit_of(run.question, target)
    return generated_text(run.question, run.output, limit=limit, tokenizer=target.tokenizer)


def drafter_of(target: LoadedTarget, spec: str) -> Drafter:
    """A fresh drafter."""
    drafter = make_drafter(spec, target)
    assert drafter is not None, "nothing can be compared without drafts"
    return drafter


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Of all requests."""
    return SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Count twice and compare; exit status 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_live", description=__doc__)
    parser.add_argument("--traffic", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft", nargs="+", default=["ngram", "suffix", "slice:8"])
    parser.add_argument("-k", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, help="for requests above temperature 0")
    parser.add_argument("--schedule", choices=("fixed", "adaptive"), default="fixed")
    parser.add_argument(
        "--record", type=Path, help="JSON Lines, one drafter a line; those that are there are not repeated"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    run = describe_run("benchmarks.replay_live", list(sys.argv[1:] if argv is None else argv))
    target = load_target(args.model, dtype=args.dtype)
    rows = rows_of(target, args)
    pairs, differing = sum(row["pairs"] for row in rows), sum(len(row["differing"]) for row in rows)
    print(f"{pairs} pairs of request and arm, {differing} differ")
    if args.out is not None:
        found = {"limit": args.limit, "pairs": pairs, "num_differing": differing, "drafters": rows}
        write_json(args.out, {**found, "run": run})
    return int(differing > 0)


def rows_of(target: LoadedTarget, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a drafter, kept as it comes."""
    rows: list[dict[str, Any]] = []
    if args.record is not None and args.record.exists():
        rows = read_jsonl(args.record.read_bytes(), args.record.name)
    for spec in args.draft:
        about = {"draft": spec, "k": args.k, "dtype": args.dtype, "schedule": args.schedule, "seed": args.seed}
        about |= {"temperature": args.temperature, "max_tokens": args.max_tokens, "traffic": args.traffic.name}
        if any(about.items() <= row.items() for row in rows):
            continue
        compare = compare_fixed if args.schedule == "fixed" else compare_planned
        with one_torch_thread(target.spec.path.startswith("native")), torch.inference_mode():
            rows.append({**about, "path": target.spec.path, **compare(target, spec, args)})
        print(json.dumps(rows[-1]), flush=True)
        if args.record is not None:
            with args.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return rows


if __name__ == "__main__":
    sys.exit(main())
