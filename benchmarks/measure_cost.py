"""What replay costs: seconds of scoring drafters on answers, beside the target's own single pass over the same texts.

The answers are written by the target first and kept (``--answers``), so that only scoring is timed. Each drafter is scored
with chains of 1 to 8 draft tokens at once; trees have one shape.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from outrider import load_target, make_drafter
from outrider.device import one_torch_thread
from outrider.engine.taps import wanted_taps
from outrider.measure.answers import AnsweredText, AnswerStore, answer_all, question_of
from outrider.measure.contenders import arms_of
from outrider.measure.reading import Ask, TrafficReader
from outrider.measure.replay import replay_group
from outrider.measure.target_pass import read_text
from outrider.models.base import LoadedTarget
from outrider.sampling.params import SamplingParams

LENGTHS = tuple(range(1, 9))


def texts_of(target: LoadedTarget, args: argparse.Namespace) -> list[AnsweredText]:
    """The answered requests."""
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with args.traffic.open("rb") as file:
        asks = itertools.islice((ask for ask in TrafficReader(file) if isinstance(ask, Ask)), args.limit)
        found = [question_of(ask, sampling, target, target.tokenizer) for ask in asks]
    questions = [question for question in found if not hasattr(question, "reason")]
    store = AnswerStore(args.answers, {"fingerprint": target.spec.fingerprint, "sampling": repr(sampling)})
    return list(answer_all(target, questions, store, batch_size=64, tokenizer=target.tokenizer))  # type: ignore[arg-type]


def score(target: LoadedTarget, spec: str, texts: Sequence[AnsweredText], group: int) -> float:
    """Seconds of scoring one drafter; the target's pass is not counted."""
    drafter = make_drafter(spec, target)
    assert drafter is not None
    keys, seconds = itertools.count(), 0.0
    arms = arms_of(spec, drafter, LENGTHS, texts[0].params, "auto")
    for start in range(0, len(texts), group):
        reads = [read_text(target, text, wanted_taps(drafter)) for text in texts[start : start + group]]
        begun = time.perf_counter()
        replay_group(drafter, reads, tuple(arms), keys=keys)
        seconds += time.perf_counter() - begun
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure_cost", description=__doc__)
    parser.add_argument("--traffic", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True, help="file of the target's answers, made or continued")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    run = describe_run("benchmarks.measure_cost", list(sys.argv[1:] if argv is None else argv))
    target = load_target(args.model, dtype=args.dtype)
    with one_torch_thread(target.spec.path.startswith("native")), torch.inference_mode():
        texts = texts_of(target, args)
        begun = time.perf_counter()
        for text in texts:
            read_text(target, text)
        single = time.perf_counter() - begun
        seconds = {spec: score(target, spec, texts, args.group) for spec in args.draft}
    rows: dict[str, Any] = {spec: {"seconds": took, "of_a_pass": took / single} for spec, took in seconds.items()}
    tokens = sum(len(text.output) for text in texts)
    print(f"{len(texts)} requests, {tokens} answer tokens; the target's pass {single:.1f} s")
    for spec, row in rows.items():
        print(f"{spec}: {row['seconds']:.1f} s, {row['of_a_pass']:.2f} of the pass")
    total = sum(seconds.values()) / single
    print(f"together {total:.2f} of the pass (bar: at most 4)")
    if args.out is not None:
        found = {"requests": len(texts), "tokens": tokens, "pass_seconds": single, "drafters": rows, "together": total}
        write_json(args.out, {**found, "run": run})
    return 0


if __name__ == "__main__":
    sys.exit(main())
