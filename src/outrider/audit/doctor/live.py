"""What the engine really does with a drafter on some prompts: answers, counts a request, and times a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.drafters.base import Drafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.metrics import SpeculationStats
from outrider.models.base import Target
from outrider.models.cost import time_passes
from outrider.sampling.params import SamplingParams

__all__ = ["LiveRun", "Speed", "measure_speed", "run_live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """One run over all prompts.

    Attributes:
        answers: token ids. texts: the same as text (empty without a tokenizer).
        stats: counts of each request.
        draft_ms: drafting, a step with drafts.
    """

    answers: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    stats: tuple[SpeculationStats, ...]
    draft_ms: float

    @property
    def pooled(self) -> SpeculationStats:
        """All requests together."""
        return SpeculationStats.pooled(self.stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Milliseconds of a plain pass, of a pass that checks a draft, and of drafting; and what follows.

    Attributes:
        break_even: tokens a pass at which drafting costs what it saves. speed_up: expected, at the measured acceptance.
    """

    plain_ms: float
    verify_ms: float
    draft_ms: float
    break_even: float
    speed_up: float


def run_live(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    num_draft_tokens: int,
) -> LiveRun:
    """Decode the prompts one after another, so many draft tokens in every step. Sampled requests get seeds 0, 1, 2, ..."""
    config = EngineConfig(num_draft_tokens=num_draft_tokens, schedule="fixed", max_batch_size=1, num_cached_prefixes=0)
    engine = Engine(target, drafter=drafter, config=config, entropy=iter(range(1 << 30)).__next__)
    results = engine.generate([list(prompt) for prompt in prompts], params)
    drafting = [step.draft_ms for result in results for step in result.steps if step.drafter]
    return LiveRun(
        answers=tuple(result.token_ids for result in results),
        texts=tuple(result.text for result in results) if engine.tokenizer is not None else (),
        stats=tuple(result.stats for result in results),
        draft_ms=sorted(drafting)[len(drafting) // 2] if drafting else 0.0,
    )


def measure_speed(target: Target, run: LiveRun, *, num_draft_tokens: int) -> Speed | None:
    """What drafting costs against what it saves; ``None`` if nothing was drafted."""
    pooled = run.pooled
    if not pooled.steps or pooled.tokens_per_pass is None or pooled.draft_rate is None:
        return None
    num_rows = 1 + max(1, round(pooled.drafted / pooled.steps))
    num_cached = max(1, min(256, target.spec.max_positions - num_rows - 1))
    (_, plain_ms), (_, verify_ms) = time_passes(target, (1, num_rows), num_cached=num_cached, repeats=7)
    # Passes without a draft cost what plain ones do.
    cost_ms = plain_ms + pooled.draft_rate * (max(verify_ms - plain_ms, 0.0) + run.draft_ms)
    return Speed(
        plain_ms=round(plain_ms, 4),
        verify_ms=round(verify_ms, 4),
        draft_ms=round(run.draft_ms, 4),
        break_even=round(cost_ms / plain_ms, 3),
        speed_up=round(pooled.tokens_per_pass * plain_ms / cost_ms, 3),
    )
