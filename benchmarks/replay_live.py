"""Does replay count what decoding counts? The same requests, one after the other, by both; every difference is listed.

In float32, and in every precision of the native path, the counts must be equal. A difference in another precision, or where
two drafts are equally likely to the last bit, is named with its request and arm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from outrider import load_target
from outrider.measure.record import Counts, MeasureResult
from outrider.measure.run import measure
from outrider.measure.settings import MeasureSettings
from outrider.sampling.params import SamplingParams

Key = tuple[str, str]


def counts_of(result: MeasureResult) -> dict[Key, tuple[float, ...]]:
    """What each request and arm counted, without times; depths that nothing reached say nothing."""
    return {(record.id, record.arm.name): _numbers(record.counts) for record in result.records}


def _numbers(counts: Counts) -> tuple[float, ...]:
    depth = sum(count > 0 for count in counts.reached)
    totals = (counts.passes, counts.steps, counts.committed, counts.drafted, counts.accepted)
    return (*totals, *counts.reached[:depth], *counts.kept[:depth])


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
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    run = describe_run("benchmarks.replay_live", list(sys.argv[1:] if argv is None else argv))
    target = load_target(args.model, dtype=args.dtype)
    sampling = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)
    found: list[dict[Key, tuple[float, ...]]] = []
    for source in ("replay", "live"):
        settings = MeasureSettings(
            drafters=tuple(args.draft),
            num_draft_tokens=tuple(args.k),
            sampling=sampling,
            source=source,  # type: ignore[arg-type]
            limit=args.limit,
            batch_size=1,
        )
        with args.traffic.open("rb") as file:
            found.append(counts_of(measure(target, file, settings)))
    replayed, live = found
    differing = [key for key in live if replayed.get(key) != live[key]]
    for id, arm in differing:
        print(f"{id}, {arm}: replay {replayed.get((id, arm))}, live {live[id, arm]}")
    print(f"{len(live)} pairs of request and arm, {len(differing)} differ")
    if args.out is not None:
        write_json(args.out, {"pairs": len(live), "differing": differing, "run": run})
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
