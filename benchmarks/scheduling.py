"""What a long prompt costs those who are already streaming: gaps between their tokens while it is read, by chunk.

``streams`` sequences decode greedily; then one prompt of ``prompt`` tokens arrives. For each chunk (prompt tokens a pass
while others decode; ``whole`` reads the prompt in one pass) the gaps between tokens of the streams while it is read, and
the time to its own first token. Rounds of all chunks alternate, so that a drift of the machine hits all alike. Besides, the
same rows as one mixed pass and as two passes, which is why passes are mixed. Prompts are made up: token ids only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from benchmarks.stats import spread
from outrider import Engine, EngineConfig, SamplingParams, load_target
from outrider.models.base import LoadedTarget, PackedRows

WHOLE = 65536
WARM_STEPS = 6


@dataclass
class Gaps:
    """Milliseconds between a stream's tokens, and to the arrival's first one."""

    calm: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Spreads, with the 95th percentile of the gaps while the prompt was read."""
        ordered = sorted(self.reading)
        return {
            "gap_calm_ms": spread(self.calm).to_json(),
            "gap_while_reading_ms": spread(self.reading).to_json(),
            "gap_while_reading_p95_ms": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
            "first_token_ms": spread(self.first_token).to_json(),
        }


def made_up(count: int, vocab_size: int, step: int) -> list[int]:
    """Token ids that no two prompts share a beginning of."""
    return [(step + 37 * index * step) % (vocab_size - 1) for index in range(count)]


def arrival(target: LoadedTarget, *, chunk: int, streams: int, prompt: int, gaps: Gaps) -> None:
    """Let a prompt arrive while the streams run; adds to ``gaps``."""
    config = EngineConfig(prefill_while_decoding=chunk, num_cached_prefixes=0, num_draft_tokens=0)
    engine = Engine(target, config=config)
    vocab = target.spec.vocab_size
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    for index in range(streams):
        engine.submit(made_up(64, vocab, index + 2), params, id=f"stream-{index}")
    while engine.stats().running < streams:
        engine.step()
    before = time.perf_counter()
    for _ in range(WARM_STEPS):
        engine.step()
        gaps.calm.append((time.perf_counter() - before) * 1e3)
        before = time.perf_counter()
    engine.submit(made_up(prompt, vocab, 1), SamplingParams(max_tokens=1), id="arrival")
    begun = before
    is_reading = True
    while is_reading:
        events = engine.step()
        now = time.perf_counter()
        gaps.reading.append((now - before) * 1e3)
        before = now
        is_reading = all(event.id != "arrival" for event in events)
    gaps.first_token.append((before - begun) * 1e3)


def mixed_or_apart(target: LoadedTarget, *, streams: int, chunk: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of decoding rows and a chunk as one pass, and as two, alternating."""
    cache, vocab, device = target.new_cache(), target.spec.vocab_size, target.spec.device
    slots = [cache.allocate(512) for _ in range(streams + 1)]
    for slot in slots:
        rows = PackedRows.pack([made_up(256, vocab, 3)], slots=[slot], starts=[0], device=device, logit_rows=())
        target.forward_greedy(rows, cache)
    tokens = [[7]] * streams

    def timed(parts: Sequence[tuple[list[list[int]], list[int]]]) -> float:
        begun = time.perf_counter()
        for texts, places in parts:
            wanted = tuple(range(streams)) if len(texts) >= streams else ()
            packed = PackedRows.pack(texts, slots=places, starts=[256] * len(texts), device=device, logit_rows=wanted)
            target.forward_greedy(packed, cache)
        took = (time.perf_counter() - begun) * 1e3
        for slot in slots:
            cache.keep(slot, base=256, path=())
        return took

    part = made_up(chunk, vocab, 5)
    one: list[float] = []
    two: list[float] = []
    for _ in range(rounds + 1):
        one.append(timed([([*tokens, part], slots)]))
        two.append(timed([(tokens, slots[:-1]), ([part], slots[-1:])]))
    return {"chunk": chunk, "mixed_ms": spread(one[1:]).to_json(), "apart_ms": spread(two[1:]).to_json()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backend", choices=("auto", "native", "pytorch"), default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 128, 256, WHOLE])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    target = load_target(args.model, dtype=args.dtype, backend=args.backend)
    gaps = {chunk: Gaps() for chunk in args.chunks}
    with torch.inference_mode():
        for _ in range(args.rounds):
            for chunk in args.chunks:
                arrival(target, chunk=chunk, streams=args.streams, prompt=args.prompt, gaps=gaps[chunk])
        passes = [
            mixed_or_apart(target, streams=args.streams, chunk=chunk, rounds=args.rounds)
            for chunk in args.chunks
            if chunk <= 256
        ]
    results = {"whole" if chunk == WHOLE else str(chunk): each.to_json() for chunk, each in gaps.items()}
    print(
        f"{args.streams} streams, a prompt of {args.prompt} tokens arrives; {target.spec.path}, {target.spec.precision}"
    )
    for name, each in results.items():
        print(
            f"chunk {name:>5}: gap {each['gap_calm_ms']['median']:.1f} ms before, while it is read "
            f"{each['gap_while_reading_ms']['median']:.1f} (p95 {each['gap_while_reading_p95_ms']:.1f}, "
            f"worst {each['gap_while_reading_ms']['high']:.1f}); its first token {each['first_token_ms']['median']:.0f} ms"
        )
    for each in passes:
        print(
            f"{args.streams} rows and a chunk of {each['chunk']}: one pass {each['mixed_ms']['median']:.1f} ms, "
            f"two passes {each['apart_ms']['median']:.1f} ms"
        )
    if args.out:
        run = describe_run("benchmarks.scheduling", sys.argv[1:] if argv is None else argv)
        settings = {"streams": args.streams, "prompt": args.prompt, "precision": target.spec.precision}
        write_json(args.out, {"run": run, "settings": settings, "arrivals": results, "passes": passes})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
