"""What to measure, how, and everything that a result says of its own making."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.engine.config import MAX_DRAFT_TOKENS
from outrider.errors import ConfigError
from outrider.measure.contenders import Contender, described
from outrider.measure.reading import AnswerMode
from outrider.measure.record import Source
from outrider.models.base import LoadedTarget
from outrider.sampling.params import SamplingParams

__all__ = ["MeasureSettings", "answers_made_from", "provenance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """What to measure, and how.

    Attributes:
        drafters: as :func:`outrider.drafters.build.make_drafter` takes them; ``none`` is always the baseline and needs no arm.
        num_draft_tokens: lengths to try; drafters with a tree shape of their own are tried once, with the largest.
        sampling: fields of requests that set none of their own.
        source: ``replay`` or ``live``.
        answers: whose answers are replayed.
        limit: most requests that are measured; 0 measures all.
        batch_size: requests that run side by side.
        verification: as the engine's setting.
        keeps_text: whether the result may hold what was said.
        chat: wrap plain prompts as a user's message.
        offline: fetch nothing.
    """

    drafters: tuple[str, ...] = ("ngram", "suffix")
    num_draft_tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    source: Source = "replay"
    answers: AnswerMode = "auto"
    limit: int = 1000
    batch_size: int = 32
    verification: str = "auto"
    keeps_text: bool = True
    chat: bool = True
    offline: bool = False

    def __post_init__(self) -> None:
        if not self.drafters or not self.num_draft_tokens:
            raise ConfigError("nothing to measure: give at least one --draft and one --num-draft-tokens")
        for k in self.num_draft_tokens:
            if not 1 <= k <= MAX_DRAFT_TOKENS:
                raise ConfigError(f"num_draft_tokens {k} is not possible; allowed: 1 to {MAX_DRAFT_TOKENS}")
        for name, low in (("limit", 0), ("batch_size", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} {getattr(self, name)} is not possible; allowed: {low} or more")
        if len(set(self.drafters)) < len(self.drafters):
            raise ConfigError("a --draft is given twice; give each once")


def answers_made_from(target: LoadedTarget, sampling: SamplingParams) -> dict[str, Any]:
    """What the target's own answers depend on, besides the requests."""
    spec = target.spec
    return {"fingerprint": spec.fingerprint, "precision": spec.precision, "sampling": _jsonable(asdict(sampling))}


def provenance(
    target: LoadedTarget, settings: MeasureSettings, contenders: Sequence[Contender], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything resolved, as JSON values; ``found`` is what only the run knows."""
    from outrider import __version__

    spec = target.spec
    return {
        "target": spec.name,
        "fingerprint": spec.fingerprint,
        "precision": spec.precision,
        "device": str(spec.device),
        "path": spec.path,
        "threads": torch.get_num_threads(),
        "weights": target.checkpoint_note,
        "vocabulary": None if target.tokenizer is None else target.tokenizer.vocabulary_hash(),
        "source": settings.source,
        "answers": settings.answers,
        "sampling": _jsonable(asdict(settings.sampling)),
        "verification": settings.verification,
        "batch_size": settings.batch_size,
        "limit": settings.limit,
        "num_draft_tokens": list(settings.num_draft_tokens),
        "drafters": {each.spec: described(each.drafter) for each in contenders},
        **found,
        "machine": {"processor": processor_name(), "cores": os.cpu_count()},
        "versions": {"outrider": __version__, "torch": torch.__version__},
    }


def processor_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _jsonable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else _listed(value)
        for name, value in values.items()
    }


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple | list) else value
