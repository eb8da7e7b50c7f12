"""A small world whose law is known, a drafter that draws from another law, and engines around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outrider.audit.guesses import Output
from outrider.audit.sources import EngineSource
from outrider.drafters.lm import LMDrafter
from outrider.engine.config import EngineConfig
from outrider.models.table import TableModel
from outrider.sampling.params import SamplingParams

WORLD = 24
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24)
PROMPTS = {"a": [1, 2, 3], "b": [7, 7], "c": [9, 4, 9, 4]}


def world(*, eos: tuple[int, ...] = (0,), seed: int = 0) -> TableModel:
    """A second-order table over 24 tokens."""
    logits = torch.randn(WORLD, WORLD, WORLD, generator=torch.Generator().manual_seed(seed)) * 1.5
    return TableModel(logits, eos_token_ids=eos)


def other_world(share: float = 0.5) -> TableModel:
    """A law that is partly the world's: its drafts are kept about half of the time."""
    return TableModel(world()._logits * share + world(seed=9)._logits * (1 - share))


def drawing_drafter() -> LMDrafter:
    """Drafts drawn from the other law, to be verified by rejection."""
    return LMDrafter(other_world(), name="other")


def engine_source(
    drafter: Any = None, *, params: SamplingParams = PARAMS, k: int = 3, seed: int = 0, target: Any = None
) -> EngineSource:
    return EngineSource(
        target or world(),
        drafter=drafter,
        # A given budget: half of what is free now is not the same for two engines while others work.
        config=EngineConfig(num_draft_tokens=k, schedule="fixed", num_cached_prefixes=0, cache_memory_gb=1.0),
        params=params,
        noise=np.random.default_rng([seed, 77]),
    )


def outputs_of(source: EngineSource, copies: int = 4) -> list[Output]:
    return source.answer([prompt for prompt in PROMPTS.items() for _ in range(copies)])
