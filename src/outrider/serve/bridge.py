"""The one place where the server meets the engine's optional abilities.

What an engine can do beyond submitting, stepping and cancelling is looked up once, here. A request that needs an ability
which the engine lacks is refused by the field's name; nothing else in ``serve`` knows which abilities there are.

=====================  ====================================================================================
ability                what it takes
=====================  ====================================================================================
``speculation``        ``Engine.submit(..., speculation=...)``: per request on or off, most draft tokens, drafter
``structured_outputs``  ``SamplingParams(structured_outputs=...)``: JSON schema, regex, choice, grammar
``prediction``         ``Engine.submit(..., prediction=...)``: text that is drafted
``scope``              ``Engine.submit(..., scope=...)``: who may share cached prefixes with whom
=====================  ====================================================================================
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.result import StreamEvent
from outrider.sampling.params import SamplingParams
from outrider.serve.errors import bad_request

__all__ = ["Bridge", "Job", "Speculation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a request asks of speculation; ``None`` leaves it to the server.

    Attributes:
        enabled: ``False`` decodes plainly.
        num_draft_tokens: most draft tokens a step.
        drafter: who proposes.
    """

    enabled: bool | None = None
    num_draft_tokens: int | None = None
    drafter: str | None = None

    @property
    def is_default(self) -> bool:
        """True if nothing is asked for."""
        return self.enabled is None and self.num_draft_tokens is None and self.drafter is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt for the engine.

    Attributes:
        id: unique in the engine.
        prompt: token ids.
        scope: whose request it is.
        speculation, structured_outputs, prediction: see the module.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    scope: str
    speculation: Speculation = field(default_factory=Speculation)
    structured_outputs: Mapping[str, Any] | None = None
    prediction: str | None = None

    def with_prompt(self, id: str, prompt: Sequence[int]) -> Job:
        """The same wishes for another prompt."""
        return replace(self, id=id, prompt=prompt)


class Bridge:
    """An engine, and what it can do. All methods but the properties belong to the thread that steps the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        submit = inspect.signature(engine.submit).parameters
        self._submit_names = frozenset(submit) & {"scope", "speculation", "prediction"}
        sampling = {f.name for f in fields(SamplingParams)}
        self.abilities = self._submit_names | ({"structured_outputs"} & sampling)

    @property
    def has_work(self) -> bool:
        """True while a step has something to do."""
        return self.engine.has_work

    def check(self, job: Job) -> None:
        """Refuse what this engine cannot do.

        Raises:
            ApiError: 400 that names the field.
        """
        wanted = {
            "speculation": not job.speculation.is_default,
            "structured_outputs": job.structured_outputs is not None,
            "prediction": job.prediction is not None,
        }
        for name, is_wanted in wanted.items():
            if is_wanted and name not in self.abilities:
                raise bad_request(f"{name} is not supported by this server; leave it out", param=name)

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            OutriderError: it is not possible, or there is no room; nothing was queued.
        """
        params = job.params
        if job.structured_outputs is not None:
            constraint: dict[str, Any] = {"structured_outputs": job.structured_outputs}
            params = replace(params, **constraint)
        wishes = None if job.speculation.is_default else _engine_speculation(job.speculation)
        optional = {"scope": job.scope, "speculation": wishes, "prediction": job.prediction}
        given = {name: optional[name] for name in self._submit_names}
        submit: Any = self.engine.submit
        submit(list(job.prompt), params, id=job.id, **given)

    def cancel(self, id: str) -> None:
        """End a job; its choices finish with what they have."""
        self.engine.cancel(id)

    def step(self) -> list[StreamEvent]:
        """One step of everything that runs."""
        return self.engine.step()

    def load(self) -> dict[str, Any]:
        """The engine's own figures (cache in use and the like), ``{}`` if it keeps none."""
        stats = getattr(self.engine, "stats", None)
        return _plain(stats()) if callable(stats) else {}

    def planner(self) -> dict[str, Any]:
        """What the planner decided lately and what it knows of costs."""
        planner = self.engine.planner
        snapshot = getattr(planner, "snapshot", None)
        if callable(snapshot):
            return _plain(snapshot())
        return {"pass_ms_by_rows": dict(zip(map(str, planner.costs.rows), planner.costs.ms, strict=True))}


def _engine_speculation(wishes: Speculation) -> Any:
    """The engine's own form of a request's wishes, where it has one."""
    given = {name: value for name, value in asdict(wishes).items() if value is not None}
    try:
        own: Any = importlib.import_module("outrider.engine.speculation").SpeculationParams
    except ModuleNotFoundError:
        return wishes
    return own(**given)


def _plain(value: Any) -> dict[str, Any]:
    """JSON values of a mapping or of a dataclass."""
    if isinstance(value, Mapping):
        return dict(value)
    to_json = getattr(value, "to_json", None)
    found = to_json() if callable(to_json) else {f.name: getattr(value, f.name) for f in fields(value)}
    return dict(found)
