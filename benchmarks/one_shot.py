"""One request in a fresh process: peak memory and the moment of the first token. ``engine_speed`` starts it."""

from __future__ import annotations

import argparse
import json
import sys
import time


def main() -> int:
    """Decode one prompt (token ids on stdin, JSON) and print what was measured as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_shot", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    prompt = json.load(sys.stdin)

    from benchmarks.provenance import peak_rss_bytes
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.models.load import load_target
    from outrider.sampling.params import SamplingParams

    imported_peak = peak_rss_bytes()
    target = load_target(args.model, dtype=args.dtype, device="cpu", backend=args.backend)
    loaded_at, loaded_peak = time.time(), peak_rss_bytes()
    engine = Engine(target, config=EngineConfig(num_cached_prefixes=0))
    first_token_at = 0.0
    for event in engine.stream(prompt, SamplingParams(max_tokens=args.tokens, ignore_eos=True)):
        first_token_at = first_token_at or (time.time() if event.token_ids else 0.0)

    spec = target.spec
    itemsize = 4 if spec.precision == "float32" else 2
    row_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_width * itemsize
    print(
        json.dumps(
            {
                "loaded_at": loaded_at,
                "first_token_at": first_token_at,
                "imported_peak_bytes": imported_peak,
                "loaded_peak_bytes": loaded_peak,
                "peak_rss_bytes": peak_rss_bytes(),
                "weight_bytes": target.num_weight_bytes(),
                "cache_bytes": row_bytes * (len(prompt) + args.tokens),
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
