"""Time of the native pass by rows, against reading its weights once and against the PyTorch pass.

Everything is interleaved in one run: each round reads the weights (the probe), then runs each row count on each path, in
an order shuffled anew. All passes stand on the same cache and are undone. Ratios are of medians; the fastest of each is
shown too, because on a busy machine it is what the code can do.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import describe_run
from benchmarks.stats import spread
from outrider.device import PRECISIONS, Placement
from outrider.models.base import PackedRows
from outrider.models.config import LlamaConfig, RopeConfig
from outrider.models.llama import LlamaTarget
from outrider.models.llama_weights import RandomWeights, WeightSource
from outrider.models.load import load_checkpoint
from outrider.models.native import NativeTarget

ROW_COUNTS = (1, 2, 4, 8, 12, 16, 32, 64)
RANDOM_1B = "random-1b"
LLAMA_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_width=64,
    norm_eps=1e-5,
    max_positions=131072,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
    rope=RopeConfig(theta=500000.0),
)


class CheapWeights(RandomWeights):
    """The 1B shape with weights drawn in a second: time does not depend on their values."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, without drawing it."""
        return self._shape(name)

    def tensor(self, name: str) -> Tensor:
        """One short random row, repeated."""
        shape = self._shape(name)
        if len(shape) == 1:
            return torch.ones(shape)
        row = torch.randn(shape[1] + 61, generator=torch.Generator().manual_seed(self.seed)) / shape[1] ** 0.5
        return torch.stack([row[shift : shift + shape[1]] for shift in range(61)]).repeat(shape[0] // 61 + 1, 1)[
            : shape[0]
        ]


class Bench:
    """One target on one cache; ``run(count)`` is a pass of that many rows, undone."""

    def __init__(self, target: Any, *, cached: int, row_counts: Sequence[int]) -> None:
        self._target, self._cached = target, cached
        draw = random.Random(0)
        tokens = [draw.randrange(target.spec.vocab_size) for _ in range(cached + max(row_counts))]
        self._cache = target.new_cache()
        self._slot = self._cache.allocate(cached + max(row_counts))
        self._rows = {count: self._pack(tokens[cached : cached + count], cached, None) for count in row_counts}
        target.forward(self._pack(tokens[:cached], 0, (cached - 1,)), self._cache)

    def _pack(self, tokens: list[int], start: int, logit_rows: tuple[int, ...] | None) -> PackedRows:
        device = self._target.spec.device
        return PackedRows.pack([tokens], slots=[self._slot], starts=[start], device=device, logit_rows=logit_rows)

    def run(self, count: int, method: Callable[..., Any]) -> Any:
        """One pass by ``method`` of the target."""
        result = method(self._rows[count], self._cache)
        self._cache.keep(self._slot, base=self._cached, path=())
        return result


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of a call."""
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


def measure(
    source: WeightSource, precision: Any, *, row_counts: Sequence[int], cached: int, rounds: int, with_torch: bool
) -> dict[str, Any]:
    """All arms of one precision, interleaved."""
    placement = Placement(device=torch.device("cpu"), precision=precision)
    native = NativeTarget(source, placement)
    bench = Bench(native, cached=cached, row_counts=row_counts)
    calls: dict[str, Callable[[], Any]] = {"stream": native.stream_weights}
    for count in row_counts:
        calls[f"native {count}"] = lambda count=count: bench.run(count, native.forward)
        calls[f"greedy {count}"] = lambda count=count: bench.run(count, native.forward_greedy)
    if with_torch:
        other = LlamaTarget(source, placement)
        other_bench = Bench(other, cached=cached, row_counts=row_counts)
        calls |= {f"pytorch {count}": lambda count=count: other_bench.run(count, other.forward) for count in row_counts}
    times: dict[str, list[float]] = {name: [] for name in calls}
    parts: dict[int, list[dict[str, float]]] = {count: [] for count in row_counts}
    draw = random.Random(1)
    for turn in range(rounds + 2):
        for name in draw.sample(list(calls), len(calls)):
            elapsed = timed(calls[name])
            if turn >= 2:
                times[name].append(elapsed)
        for count in row_counts:
            parts[count].append(bench.run(count, native.profile))
    return {
        "precision": precision,
        "path": native.spec.path,
        "threads": torch.get_num_threads(),
        "weight_bytes": native.num_weight_bytes(),
        "part_bytes": native.part_bytes(),
        "times_ms": {name: spread(values).to_json() for name, values in times.items()},
        "parts_ms": {
            count: {part: spread([turn[part] for turn in turns]).median for part in turns[0]}
            for count, turns in parts.items()
        },
    }


def print_tables(result: dict[str, Any], row_counts: Sequence[int]) -> None:
    """Passes by rows, then where the time of one and of eight rows goes."""
    times, weights = result["times_ms"], result["weight_bytes"]
    stream = times["stream"]["median"]
    one = times[f"native {row_counts[0]}"]["median"]
    print(f"\n{result['path']}, {result['precision']}, {result['threads']} threads; {weights / 1e6:.1f} MB of weights")
    print(
        f"reading them once: {stream:.2f} ms ({weights / stream / 1e6:.1f} GB/s), fastest {times['stream']['low']:.2f} ms"
    )
    print("| rows | native ms | fastest | x reading | x first | greedy ms | pytorch ms | native is faster |")
    print("|---|---|---|---|---|---|---|---|")
    for count in row_counts:
        native, greedy = times[f"native {count}"], times[f"greedy {count}"]["median"]
        other = times.get(f"pytorch {count}", {}).get("median")
        compared = "- | -" if other is None else f"{other:.2f} | {other / native['median']:.2f}x"
        print(
            f"| {count} | {native['median']:.2f} | {native['low']:.2f} | {native['median'] / stream:.2f} "
            f"| {native['median'] / one:.2f} | {greedy:.2f} | {compared} |"
        )
    for count in (count for count in row_counts if count in (1, 8, 64)):
        print(f"\n| part at {count} rows | MB | ms | GB/s |\n|---|---|---|---|")
        for part, ms in result["parts_ms"][count].items():
            size = result["part_bytes"][part]
            print(f"| {part} | {size / 1e6:.1f} | {ms:.2f} | {size / ms / 1e6:.1f} |")


def main() -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_pass", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help=f"alias, file or folder, or {RANDOM_1B}")
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "int8"], choices=PRECISIONS[1:])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROW_COUNTS))
    parser.add_argument("--cached", type=int, default=256, help="tokens cached before each pass")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--no-pytorch", action="store_true", help="leave the PyTorch pass out")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    results = []
    for precision in args.precision:
        results.append(
            measure(
                _source(args.model, args.layers),
                precision,
                row_counts=args.rows,
                cached=args.cached,
                rounds=args.rounds,
                with_torch=not args.no_pytorch,
            )
        )
        print_tables(results[-1], args.rows)
    if args.out:
        run = describe_run("benchmarks.native_pass", sys.argv[1:])
        args.out.write_text(json.dumps({"run": run, "results": results}, indent=1) + "\n")
    return 0


def _source(model: str, num_layers: int | None) -> WeightSource:
    if model == RANDOM_1B:
        config = LLAMA_1B if num_layers is None else replace(LLAMA_1B, num_layers=num_layers)
        return CheapWeights(config=config, seed=0)
    return load_checkpoint(model)


if __name__ == "__main__":
    raise SystemExit(main())
