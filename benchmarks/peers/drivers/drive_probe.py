"""What the machine can do at this moment: reading memory, and bfloat16 matrix products, with torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from wire import Handler, Reply, serve

READ_BYTES = 2**28
SIDE = 1024
REPEATS = 5


def load(start: dict[str, Any]) -> tuple[Handler, Reply]:
    """Buffers once; each request times both."""
    import torch

    torch.set_num_threads(start["threads"])
    memory = torch.ones(READ_BYTES // 4)
    left, right = torch.randn(SIDE, SIDE).bfloat16(), torch.randn(SIDE, SIDE).bfloat16()

    def median_s(call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)

    def answer(_: dict[str, Any]) -> Reply:
        return {
            "read_gb_per_s": READ_BYTES / median_s(memory.sum) / 1e9,
            "bf16_tflop_per_s": 2 * SIDE**3 / median_s(lambda: left @ right) / 1e12,
        }

    return answer, {"versions": {"torch": torch.__version__}}


if __name__ == "__main__":
    serve(load)
