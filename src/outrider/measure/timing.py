"""What passes and drafts take on this machine, one sequence at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

from outrider.drafters.base import Drafter
from outrider.measure.expected import FollowedText
from outrider.measure.record import PassCosts
from outrider.measure.replay import draft_mode, matching_path
from outrider.measure.target_pass import ReadText
from outrider.models.base import Target
from outrider.models.cost import time_passes

__all__ = ["draft_ms", "pass_costs"]

_TIMED_STEPS = 12
_NUM_CACHED = 256
_ROWS = (1, 2, 3, 5, 9, 17)


def pass_costs(target: Target, lengths: Sequence[int], by_arm: Mapping[str, float]) -> PassCosts:
    """Time passes of the target by their rows.

    Args:
        target: what to time. lengths: most draft tokens of a step; passes of the longest are timed, too.
        by_arm: milliseconds of drafting, for the result.
    """
    window = target.spec.max_positions
    cached = min(_NUM_CACHED, window // 2)
    rows = [count for count in sorted({*_ROWS, 1 + max(lengths)}) if cached + count <= window]
    timed = time_passes(target, rows, num_cached=cached, repeats=5)
    return PassCosts(
        rows=tuple(count for count, _ in timed),
        pass_ms=tuple(ms for _, ms in timed),
        draft_ms=dict(by_arm),
        num_cached=cached,
    )


def draft_ms(drafter: Drafter, read: ReadText, length: int, *, key: int, verification: str = "auto") -> float | None:
    """Milliseconds of drafting in a step of one sequence: the median over a few steps. ``None`` if there are none."""
    text = FollowedText(drafter, read, key)
    times: list[float] = []
    mode = draft_mode(read, verification)
    start, output = 1, read.text.output
    while start < len(output) and len(times) < _TIMED_STEPS:
        text.advance(start)
        begun = time.perf_counter()
        [proposal] = drafter.propose([text.request(length, mode)])
        times.append((time.perf_counter() - begun) * 1e3)
        start += min(len(matching_path(proposal, output, start)) + 1, len(output) - start)
    text.finish()
    # The first proposal of a text reads its prompt, which decoding does once.
    return median(times[1:]) if len(times) > 1 else None
