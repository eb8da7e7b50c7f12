"""Time of one target pass against its rows: where "free" ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch

from outrider.device import synchronize
from outrider.models.base import PackedRows, Target

__all__ = ["ROW_COUNTS", "time_passes"]

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)


@torch.inference_mode()
def time_passes(
    target: Target,
    row_counts: Sequence[int],
    *,
    cached: int,
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[int, list[float]]:
    """Milliseconds of passes of one sequence over ``cached`` tokens, the row counts shuffled anew in each round.

    Each pass is undone (``keep`` with an empty path), so that all stand on the same cache. The passes of two warm-up
    rounds are not counted.
    """
    vocab_size, device = target.spec.vocab_size, target.spec.device
    draw = random.Random(0)
    tokens = [draw.randrange(vocab_size) for _ in range(cached + max(row_counts))]
    cache = target.new_cache()
    slot = cache.allocate(cached + max(row_counts))
    prompt = PackedRows.pack([tokens[:cached]], slots=[slot], starts=[0], device=device, logit_rows=(cached - 1,))
    target.forward(prompt, cache)
    times: dict[int, list[float]] = {count: [] for count in row_counts}
    for turn in range(rounds + 2):
        for count in draw.sample(list(row_counts), len(row_counts)):
            rows = PackedRows.pack([tokens[cached : cached + count]], slots=[slot], starts=[cached], device=device)
            synchronize(device)
            begun = time.perf_counter()
            target.forward(rows, cache)
            synchronize(device)
            elapsed_ms = (time.perf_counter() - begun) * 1e3
            cache.keep(slot, base=cached, path=())
            if turn >= 2:
                times[count].append(elapsed_ms)
        progress()
    cache.free(slot)
    return times
