"""The one place where the server meets the engine: what a request becomes there, and what the engine shows of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.result import StreamEvent
from outrider.engine.speculation import SpeculationParams
from outrider.errors import SamplingError
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.params import SamplingParams

__all__ = ["Bridge", "Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt for the engine.

    Attributes:
        id: unique in the engine.
        prompt: token ids.
        scope: whose request it is; only requests of one scope share cached prefixes and remembered texts.
        speculation: how it may be drafted for; ``None`` leaves it to the engine.
        structured_outputs: fields of :class:`outrider.sampling.constraint.StructuredOutputs`.
        constrained_by: the request's field that they come from.
        prediction: a text that the output may largely repeat.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    scope: str
    speculation: SpeculationParams | None = None
    structured_outputs: Mapping[str, Any] | None = None
    constrained_by: str = "structured_outputs"
    prediction: str | None = None

    def with_prompt(self, id: str, prompt: Sequence[int]) -> Job:
        """The same wishes for another prompt."""
        return replace(self, id=id, prompt=prompt)


class Bridge:
    """An engine. All methods but the properties belong to the thread that steps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def has_work(self) -> bool:
        """True while a step has something to do."""
        return self.engine.has_work

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            OutriderError: it is not possible, or there is no room; nothing was queued.
        """
        try:
            params = job.params
            if job.structured_outputs is not None:
                params = replace(params, structured_outputs=StructuredOutputs.from_dict(job.structured_outputs))
            self.engine.submit(
                list(job.prompt),
                params,
                id=job.id,
                scope=job.scope,
                speculation=job.speculation,
                prediction=job.prediction,
            )
        except SamplingError as error:
            raise _in_the_clients_words(error, job.constrained_by) from None

    def cancel(self, id: str) -> None:
        """End a job; its choices finish with what they have."""
        self.engine.cancel(id)

    def step(self) -> list[StreamEvent]:
        """One step of everything that runs."""
        return self.engine.step()

    def load(self) -> dict[str, Any]:
        """The engine's own figures: sequences, tokens, memory of the cache."""
        return self.engine.stats().to_json()

    def planner(self) -> dict[str, Any]:
        """What the planner decided lately and what it knows of costs and of acceptance."""
        return self.engine.planner.snapshot()


_FIELD = re.compile(r"structured_outputs(\.(json|json_object|grammar)\b)?")
_LINE = re.compile(r" \d+ \| ")
_PLACE = re.compile(r"at \d+\(\d+\): ")


def _in_the_clients_words(error: SamplingError, field: str) -> SamplingError:
    """The error with the field that the client sent, where the constraint was made from another one."""
    if field == "structured_outputs":
        return error
    # Behind its reason llguidance shows the grammar, which the client did not write.
    told = _LINE.split(_PLACE.sub("", str(error)), maxsplit=1)[0]
    return SamplingError(_FIELD.sub(field, told))
