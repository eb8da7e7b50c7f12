"""What constraints cost, and what forced tokens give back: masks at batch 8, and JSON output with drafts against plain.

Cost compares passes of eight sequences each, plain decoding on both sides: free text against JSON that cannot end within the
measured tokens. Speed compares whole answers under one schema: plain decoding against each drafter, token ids equal. Arms
take turns in going first; every ratio is over pairs of neighbouring runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from benchmarks.stats import alternate, paired_ratio
from outrider import Engine, EngineConfig, SamplingParams, load_target, make_drafter
from outrider.engine.result import GenerationResult
from outrider.models.base import LoadedTarget
from outrider.sampling.constraint import StructuredOutputs

TEXTS = (
    "Maria Keller, 34, moved from Graz to Porto in 2019 and works there as a marine biologist.",
    "The ferry Aurora left Turku at 20:55 with 812 passengers and reached Stockholm the next morning.",
    "Order 5521: two blue lamps and one oak table, to be delivered to Jonas Lind in Bergen on 3 May.",
    "Dr. Amara Obi, 51, leads a clinic in Lagos with forty nurses; before that she taught in Accra.",
    "The recipe needs three eggs, 200 g of flour and a lemon; it bakes for forty minutes at 180 degrees.",
    "Flight LX 318 from Zurich to London was late by 25 minutes because of fog over the Channel.",
    "Tom Baker sold his bakery in Leeds for 240,000 pounds in 2021 and bought a small farm in Wales.",
    "The bridge over the Aare, 186 metres long, was built in 1844 and rebuilt twice after floods.",
)
RECORD = {
    "type": "object",
    "properties": {
        "subject": {"type": "string", "maxLength": 40},
        "category": {"enum": ["person", "place", "event", "thing"]},
        "numbers_mentioned": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "locations_mentioned": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "is_about_travel": {"type": "boolean"},
        "one_sentence_summary": {"type": "string", "maxLength": 120},
    },
    "required": [
        "subject",
        "category",
        "numbers_mentioned",
        "locations_mentioned",
        "is_about_travel",
        "one_sentence_summary",
    ],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": RECORD, "minItems": 50}
CONSTRAINTS = {
    "json schema": StructuredOutputs(json=ENDLESS),
    "json object": StructuredOutputs(json={"type": "object", "minProperties": 200}),
    "regex": StructuredOutputs(regex=r"([A-Z][a-z]+,? ?([a-z]+[ ,.]){1,12}\n?){200,}"),
}
DRAFTERS = ("forced", "suffix")


def prompts(instruction: str) -> list[list[dict[str, str]]]:
    """One chat for each text."""
    return [[{"role": "user", "content": f"{instruction}\n\n{text}"}] for text in TEXTS]


def pass_ms(results: Sequence[GenerationResult], batch_size: int) -> float:
    """Milliseconds of a decode pass of the full batch: the median over passes."""
    steps = [step for step in results[0].steps if not step.is_prefill and step.batch_size == batch_size]
    return statistics.median(step.draft_ms + step.verify_ms + step.other_ms for step in steps)


def measure_cost(target: LoadedTarget, *, pairs: int, tokens: int) -> list[dict[str, Any]]:
    """Constrained over unconstrained pass time at batch 8, for each kind of constraint."""
    engine = Engine(target, config=EngineConfig(num_cached_prefixes=0))
    chats = prompts("Describe this text as a list of JSON records.")
    found = []
    for name, constraint in CONSTRAINTS.items():
        fields = {
            "free": SamplingParams(max_tokens=tokens, ignore_eos=True),
            "constrained": SamplingParams(max_tokens=tokens, structured_outputs=constraint),
        }
        ms: dict[str, list[float]] = {"free": [], "constrained": []}
        for turn in range(pairs):
            for arm in alternate(list(fields), turn):
                ms[arm].append(pass_ms(engine.generate(chats, fields[arm]), len(chats)))
        ratio = paired_ratio(ms["constrained"], ms["free"])
        medians = {arm: statistics.median(values) for arm, values in ms.items()}
        print(f"{name}: {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of free passes; {medians} ms a pass")
        found.append({"constraint": name, "ratio": ratio.to_json(), "ms": ms})
    return found


def measure_speed(target: LoadedTarget, *, pairs: int, is_tight: bool) -> list[dict[str, Any]]:
    """Speed of whole JSON answers over plain decoding's, one request at a time, for each drafter."""
    constraint = StructuredOutputs(json=RECORD, disable_any_whitespace=is_tight)
    params = SamplingParams(max_tokens=256, structured_outputs=constraint)
    chats = prompts("Describe this text as one JSON record.")
    config = EngineConfig(num_cached_prefixes=0)
    found = []
    for drafter in DRAFTERS:
        seconds: dict[str, list[float]] = {"none": [], drafter: []}
        outputs: dict[str, set[tuple[int, ...]]] = {"none": set(), drafter: set()}
        passes: list[float] = []
        for turn in range(pairs):
            for arm in alternate(list(seconds), turn):
                engine = Engine(target, drafter=make_drafter(arm, target), config=config)
                begun = time.perf_counter()
                results = [engine.generate([chat], params)[0] for chat in chats]
                seconds[arm].append(time.perf_counter() - begun)
                outputs[arm].update(result.token_ids for result in results)
                if arm == drafter:
                    passes += [result.stats.tokens_per_pass or 1.0 for result in results]
        ratio = paired_ratio(seconds["none"], seconds[drafter])
        is_identical = outputs["none"] == outputs[drafter]
        print(
            f"{'tight' if is_tight else 'free whitespace'}, {drafter}: {ratio.value:.2f} times plain "
            f"[{ratio.low:.2f}, {ratio.high:.2f}], {statistics.mean(passes):.2f} tokens a pass, identical: {is_identical}"
        )
        found.append({"drafter": drafter, "is_tight": is_tight, "ratio": ratio.to_json(), "is_identical": is_identical})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammar", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a request, where cost is measured")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    target = load_target(args.model, dtype=args.dtype)
    cost = measure_cost(target, pairs=args.pairs, tokens=args.tokens)
    speed = [each for tight in (True, False) for each in measure_speed(target, pairs=args.pairs, is_tight=tight)]
    if args.out:
        run = describe_run("benchmarks.grammar", sys.argv[1:] if argv is None else argv)
        write_json(args.out, {"run": run, "path": target.spec.path, "cost": cost, "speed": speed})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
