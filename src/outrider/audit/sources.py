"""Who answers: our own engine (a server is in :mod:`outrider.audit.endpoint`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from outrider.audit.guesses import Output
from outrider.drafters.base import Drafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.metrics import SpeculationStats
from outrider.models.base import Target
from outrider.sampling.params import SamplingParams

__all__ = ["EngineSource", "OutputSource"]


class OutputSource(Protocol):
    """Somebody who answers prompts."""

    @property
    def origin(self) -> dict[str, Any]:
        """Who answers and how, as plain values."""
        ...

    @property
    def speculation(self) -> SpeculationStats | None:
        """Counts so far; ``None`` if the source does not tell."""
        ...

    def answer(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> list[Output]:
        """One answer to each (name, token ids), drawn afresh, in the order of the prompts; a prompt may come again."""
        ...


class EngineSource:
    """Our own engine.

    Args:
        target, drafter: who decodes; ``None`` decodes plainly. config: how. params: of every request; no seed.
        noise: gives each request a seed of its own.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None,
        config: EngineConfig,
        params: SamplingParams,
        noise: np.random.Generator,
    ) -> None:
        self._noise = noise
        self._seeds: list[int] = []
        self._params = params
        self._engine = Engine(target, drafter=drafter, config=config, entropy=self._next_seed)
        self._stats = SpeculationStats()

    @property
    def origin(self) -> dict[str, Any]:
        return self._engine.settings(self._params)

    @property
    def speculation(self) -> SpeculationStats:
        return self._stats

    def answer(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> list[Output]:
        self._seeds.clear()
        results = self._engine.generate([list(prompt) for _, prompt in prompts], self._params)
        for result in results:
            self._stats.merge(result.stats)
        return [
            Output(prompt_id=name, prompt=tuple(prompt), tokens=result.token_ids, seed=seed)
            for (name, prompt), result, seed in zip(prompts, results, self._seeds, strict=True)
        ]

    def _next_seed(self) -> int:
        self._seeds.append(int(self._noise.integers(0, 2**63)))
        return self._seeds[-1]
