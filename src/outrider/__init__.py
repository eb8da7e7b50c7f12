"""Outrider: lossless speculative decoding.

    from outrider import Engine, SamplingParams, load_target, make_drafter

    target = load_target("smollm2-135m-instruct")
    engine = Engine(target, drafter=make_drafter("suffix", target))
    [result] = engine.generate(["Once upon a time"], SamplingParams(max_tokens=64))
    print(result.text, result.stats.tokens_per_pass)

Importing this package does nothing: names are fetched from their modules when they are first used, so that a command
that only prints its help never waits for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from outrider.errors import (
    Cancelled,
    CapacityError,
    ConfigError,
    DataError,
    DrainingError,
    MissingExtra,
    ModelError,
    ModelNotFound,
    OutriderError,
    PromptError,
    QueueFullError,
    SamplingError,
    UnsupportedModel,
    VocabularyMismatch,
    WeightsError,
)

if TYPE_CHECKING:
    from outrider.drafters.build import make_drafter
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.result import GenerationResult
    from outrider.engine.speculation import SpeculationParams
    from outrider.models.load import load_target
    from outrider.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Cancelled",
    "CapacityError",
    "ConfigError",
    "DataError",
    "DrainingError",
    "Engine",
    "EngineConfig",
    "GenerationResult",
    "MissingExtra",
    "ModelError",
    "ModelNotFound",
    "OutriderError",
    "PromptError",
    "QueueFullError",
    "SamplingError",
    "SamplingParams",
    "SpeculationParams",
    "UnsupportedModel",
    "VocabularyMismatch",
    "WeightsError",
    "__version__",
    "load_target",
    "make_drafter",
]

_HOMES = {
    "Engine": "outrider.engine.engine",
    "EngineConfig": "outrider.engine.config",
    "GenerationResult": "outrider.engine.result",
    "SamplingParams": "outrider.sampling.params",
    "SpeculationParams": "outrider.engine.speculation",
    "load_target": "outrider.models.load",
    "make_drafter": "outrider.drafters.build",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
