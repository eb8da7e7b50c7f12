"""Does the audit see what it is for? Every fault is planted in turn in the running engine, and must raise the alarm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.audit.calibration import CalibrationSettings, audit_calibration
from outrider.audit.calibration_report import CalibrationReport, SelfTestReport, SelfTestRow
from outrider.audit.control import FLOAT32_CAP
from outrider.audit.faults import FAULTS, Fault, planted
from outrider.audit.guesses import Output
from outrider.audit.sources import EngineSource
from outrider.drafters.base import Drafter
from outrider.engine.config import EngineConfig
from outrider.errors import ConfigError
from outrider.metrics import SpeculationStats
from outrider.models.base import Target
from outrider.sampling.params import SamplingParams

__all__ = ["FaultyEngine", "Plan", "audit_plan", "plans_of", "self_test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One audit of the self-test.

    Attributes:
        fault: planted; ``None`` for the sound engine.
        fields: sampling fields besides the user's.
        stream: which noise, so that no two audits share any.
    """

    fault: Fault | None
    fields: dict[str, float]
    stream: int

    @property
    def title(self) -> str:
        """The fault's name, or ``none``."""
        return self.fault.name if self.fault else "none"


@dataclass(slots=True)
class FaultyEngine:
    """An engine that decodes with a fault in place; whatever reads its answers again is sound."""

    source: EngineSource
    fault: Fault | None

    @property
    def origin(self) -> dict[str, object]:
        return {**self.source.origin, "planted fault": self.fault.name if self.fault else "none"}

    @property
    def speculation(self) -> SpeculationStats:
        return self.source.speculation

    def answer(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> list[Output]:
        with planted(self.fault):
            return self.source.answer(prompts)


def self_test(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    *,
    make_drafter: Callable[[], Drafter],
    params: SamplingParams,
    config: EngineConfig,
    settings: CalibrationSettings | None = None,
    faults: Sequence[Fault] = FAULTS,
    on_progress: Callable[[str], None] | None = None,
) -> SelfTestReport:
    """Audit the sound engine, then the engine with each fault.

    Args:
        target, prompts: what decodes what.
        make_drafter: a maker of a drafter that draws from a law of its own: verification by rejection is what most faults
            break.
        params: sampling fields; a fault that needs another field gets it, and so does the sound run beside it.
        config: of the engine.
        settings: ``num_tokens`` is the most that a fault may take.
        faults: which.
        on_progress: told what is going on.

    Raises:
        ConfigError: a drafter that never drafts, or a target whose law is not known exactly.
    """
    settings = settings or CalibrationSettings()
    say = on_progress or (lambda line: None)
    rows = [
        audit_plan(
            target,
            prompts,
            plan=plan,
            make_drafter=make_drafter,
            params=params,
            config=config,
            settings=settings,
            on_progress=lambda line, title=plan.title: say(f"{title}: {line}"),  # type: ignore[misc]
        )
        for plan in plans_of(faults)
    ]
    return SelfTestReport(
        target=target.spec.name,
        fingerprint=target.spec.fingerprint,
        precision=target.spec.precision,
        path=target.spec.path,
        drafter=make_drafter().name,
        num_draft_tokens=config.num_draft_tokens,
        rows=tuple(rows),
    )


def audit_plan(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    *,
    plan: Plan,
    make_drafter: Callable[[], Drafter],
    params: SamplingParams,
    config: EngineConfig,
    settings: CalibrationSettings,
    on_progress: Callable[[str], None] | None = None,
) -> SelfTestRow:
    """Audit the engine with one fault planted, or as it is; arguments as of :func:`self_test`.

    Raises:
        ConfigError: a drafter that never drafts, or a target whose law is not known exactly.
    """
    asked = replace(params, **plan.fields)  # type: ignore[arg-type]
    drafter = make_drafter()
    noise = np.random.default_rng([settings.seed, plan.stream])
    source = EngineSource(target, drafter=drafter, config=config, params=asked, noise=noise)
    report = audit_calibration(
        target,
        prompts,
        source=FaultyEngine(source, plan.fault),
        params=asked,
        make_drafter=make_drafter,
        settings=replace(settings, null="one-sample"),
        on_progress=on_progress,
    )
    _refuse_what_proves_nothing(report, source, drafter.name)
    return _row_of(plan, report, asked)


def _refuse_what_proves_nothing(report: CalibrationReport, source: EngineSource, drafter: str) -> None:
    if report.control.deviation > FLOAT32_CAP:
        raise ConfigError(
            f"rounding moves this target's logits by {report.control.deviation:.1e} between batch shapes, and the self-test "
            "needs the exact law; give --dtype float32, or --backend native on a CPU"
        )
    if source.speculation.drafted == 0:
        raise ConfigError(f"drafter {drafter} drafted nothing; give one that draws from a law of its own: slice:8")


def _row_of(plan: Plan, report: CalibrationReport, asked: SamplingParams) -> SelfTestRow:
    return SelfTestRow(
        fault=plan.title,
        what=plan.fault.what if plan.fault else "the engine as it is",
        is_caught=report.verdict in ("biased", "deviates"),
        tokens=report.tokens_to_alarm or report.tokens,
        cause=report.cause,
        sampling=_describe(asked),
        evidence=report.evidence,
    )


def plans_of(faults: Sequence[Fault] = FAULTS) -> list[Plan]:
    """The sound engine under every set of fields that a fault asks for, then the faults."""
    sets: list[dict[str, float]] = [{}]
    sets += [fault.fields for fault in faults if fault.fields and fault.fields not in sets]
    found: list[tuple[Fault | None, dict[str, float]]] = [(None, fields) for fields in sets]
    found += [(fault, fault.fields) for fault in faults]
    return [Plan(fault=fault, fields=fields, stream=index) for index, (fault, fields) in enumerate(found)]


def _describe(params: SamplingParams) -> str:
    neutral = SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    shown = [f"{name} {getattr(params, name):g}" for name in names if getattr(params, name) != getattr(neutral, name)]
    return ", ".join(shown)
