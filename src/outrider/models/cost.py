"""What a pass costs by the number of its rows: the curve that decides whether speculation pays."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.device import synchronize
from outrider.models.base import PackedRows, Target

__all__ = ["time_passes"]


def time_passes(
    target: Target, num_rows: Sequence[int] = (1, 2, 4, 8, 16), *, num_cached: int = 256, repeats: int = 10
) -> list[tuple[int, float]]:
    """Time passes of one sequence, interleaved so that drifts of the machine hit every row count alike.

    Args:
        target: what to time.
        num_rows: rows of a pass, each measured.
        num_cached: tokens cached before each pass.
        repeats: rounds; the fastest of each row count is reported, as others may use the machine meanwhile.

    Returns:
        (rows, milliseconds) in the order given.
    """
    cache = target.new_cache()
    slot = cache.allocate(num_cached + max(num_rows))
    tokens = [1 + index % (target.spec.vocab_size - 1) for index in range(num_cached + max(num_rows))]
    device = target.spec.device
    prompt = PackedRows.pack([tokens[:num_cached]], slots=[slot], starts=[0], device=device, logit_rows=(0,))
    target.forward(prompt, cache)
    best = {rows: float("inf") for rows in num_rows}
    for _ in range(repeats):
        for rows in num_rows:
            chain = tokens[num_cached : num_cached + rows]
            packed = PackedRows.pack([chain], slots=[slot], starts=[num_cached], device=device)
            synchronize(device)
            began = time.perf_counter()
            target.forward(packed, cache)
            synchronize(device)
            best[rows] = min(best[rows], (time.perf_counter() - began) * 1000)
            cache.keep(slot, base=num_cached, path=())
    return [(rows, best[rows]) for rows in num_rows]
