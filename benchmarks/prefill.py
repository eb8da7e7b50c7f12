"""How fast prompts are read: milliseconds and matrix rate by length and chunk, beside the rate of one large product.

The probe multiplies matrices of the model's own shapes with the library's packed bfloat16 product; a prompt's rate counts
the layers' matrices only, so what attention and norms take shows as the gap to the probe.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from benchmarks.stats import spread
from outrider import load_target
from outrider.models.base import LoadedTarget, PackedRows
from outrider.models.linear import PackedMatrix, can_pack_bfloat16

CASES = ((256, 256), (512, 512), (1000, 512), (1000, 128), (2000, 512))
"""Tokens of a prompt, tokens of a chunk."""


def matrix_rate(num_rows: int, num_in: int, num_out: int, *, rounds: int) -> float:
    """GFLOP/s of one product, the fastest of some rounds; 0 where the library has no packed bfloat16 product."""
    if not can_pack_bfloat16(torch.device("cpu")):
        return 0.0
    matrix = PackedMatrix(torch.randn(num_out, num_in).to(torch.bfloat16))
    x_RD = torch.randn(num_rows, num_in).to(torch.bfloat16)
    matrix(x_RD)
    return 2e-6 * num_rows * num_in * num_out / min(timed(lambda: matrix(x_RD)) for _ in range(rounds))


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


def read_prompt(target: LoadedTarget, num_tokens: int, chunk: int, *, rounds: int) -> dict[str, float]:
    """Time of a prompt up to its first token, and how many operations of the layers' matrices that is a second."""
    cache = target.new_cache()
    slot = cache.allocate(num_tokens)
    tokens = [(37 * index) % (target.spec.vocab_size - 1) for index in range(num_tokens)]

    def read() -> None:
        for start in range(0, num_tokens, chunk):
            part = tokens[start : start + chunk]
            wanted = (len(part) - 1,) if start + chunk >= num_tokens else ()
            rows = PackedRows.pack([part], slots=[slot], starts=[start], device=target.spec.device, logit_rows=wanted)
            target.forward_greedy(rows, cache)
        cache.keep(slot, base=0, path=())

    read()
    times = spread([timed(read) for _ in range(rounds)])
    return {"tokens": num_tokens, "chunk": chunk, "ms": times.median, "fastest_ms": times.low}


def num_layer_weights(target: Any) -> int:
    """Weights of the layers' matrices, one multiplication and one addition each a token."""
    config = target.config
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_width
    return int(config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--backend", choices=("auto", "native", "pytorch"), default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    probe = max(matrix_rate(512, *shape, rounds=10) for shape in ((576, 3072), (1536, 576), (2048, 2048)))
    print(f"probe: {probe:.0f} GFLOP/s in bfloat16")
    results = []
    for dtype in args.dtype:
        target = load_target(args.model, dtype=dtype, backend=args.backend)
        for num_tokens, chunk in CASES:
            each = read_prompt(target, num_tokens, chunk, rounds=args.rounds)
            each["gflops"] = 2e-6 * num_layer_weights(target) * num_tokens / each["ms"]
            results.append({"precision": dtype, "path": target.spec.path, **each})
            print(
                f"{dtype} ({target.spec.path}): {num_tokens} tokens in chunks of {chunk}: {each['ms']:.0f} ms, "
                f"fastest {each['fastest_ms']:.0f} ms, {each['gflops']:.0f} GFLOP/s"
            )
    if args.out:
        run = describe_run("benchmarks.prefill", sys.argv[1:] if argv is None else argv)
        write_json(args.out, {"run": run, "probe_gflops": probe, "results": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
