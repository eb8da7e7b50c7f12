"""Milliseconds of an EAGLE-3 head's passes: the root's, and each level of a tree, with random weights of a target's shape.

python -m benchmarks.head_pass                      # the default target, 8192 draft tokens, 256 entries
python -m benchmarks.head_pass --width 4 --depth 4
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from outrider.device import Placement, resolve_placement
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.eagle_pass import EaglePass
from outrider.drafters.eagle_reader import EagleReader
from outrider.models.load import load_checkpoint


def median(values: list[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]


def milliseconds(begun: float) -> float:
    """Since then."""
    return (time.perf_counter() - begun) * 1e3


@torch.inference_mode()
def measure(
    head: EagleHead, placement: Placement, *, entries: int, width: int, depth: int, repeats: int
) -> dict[str, float]:
    """Median milliseconds of catching up with two kept tokens, of one level, of its ranking, and of a whole tree."""
    packed = EaglePass(head, placement)
    reader = EagleReader(packed, window=4096)
    tap_width = head.config.num_taps * head.config.target_hidden_size
    tokens = list(range(5, 5 + entries + 1))
    reader.open(0)
    reader.absorb(0, 0, torch.randn(entries, tap_width).to(placement.activation_dtype))
    reader.catch_up([(0, tokens)], levels=depth, width=width)
    found: dict[str, list[float]] = {"catch_up": [], "level": [], "logits_and_top": [], "tree": []}
    for _ in range(repeats):
        reader.absorb(0, len(tokens) - 1, torch.randn(2, tap_width).to(placement.activation_dtype))
        tokens += [7, 8]
        tree_begun = begun = time.perf_counter()
        walk = reader.catch_up([(0, tokens)], levels=depth - 1, width=width)
        found["catch_up"].append(milliseconds(begun))
        for level in range(depth):
            if level > 0:
                begun = time.perf_counter()
                parents = torch.zeros(1, width, dtype=torch.int64)
                walk.step(torch.full((1, width), 9), parents)
                found["level"].append(milliseconds(begun))
            begun = time.perf_counter()
            walk.logits().log_softmax(-1).topk(width)
            found["logits_and_top"].append(milliseconds(begun))
        found["tree"].append(milliseconds(tree_begun))
    streamed = packed.num_weight_bytes() / 1e6
    return {"megabytes": streamed, **{name: median(times) for name, times in found.items()}}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--entries", type=int, default=256)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=100)
    given = parser.parse_args()
    checkpoint = load_checkpoint(given.target)
    head = EagleHead(EagleConfig.for_target(checkpoint.config, draft_vocab_size=given.draft_vocab))
    head.initialise(list(range(given.draft_vocab)), seed=0)
    head.attach_embedding(checkpoint.tensor("model.embed_tokens.weight"))
    placement = resolve_placement()
    found = measure(head, placement, entries=given.entries, width=given.width, depth=given.depth, repeats=given.repeats)
    print(json.dumps({"precision": placement.precision, "threads": torch.get_num_threads(), **vars(given), **found}))


if __name__ == "__main__":
    main()
