"""What an audit of calibration found, as plain values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.audit.control import Control
from outrider.audit.scoring import Outside
from outrider.audit.statistics import Summary
from outrider.audit.versions import describe_versions
from outrider.sampling.params import SamplingParams

__all__ = ["CalibrationReport", "Repeat", "SelfTestReport", "SelfTestRow", "Speculation", "plain_object"]

VERDICTS = {
    "calibrated": "every token looks like a draw from the target's own processed law",
    "biased": "NOT the target's law: see what raised the alarm",
    "deviates": "the recomputed law is not the engine's: a fault, or other arithmetic; a plain arm would tell",
    "no sign": "no sign of a fault; without a plain arm no more can be said",
    "void": "nothing was proved: noise was used twice, or nothing was drafted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Two equal answers that chance does not explain; ``chance`` 0: the engine was given one seed twice."""

    prompt_id: str
    tokens: int
    chance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What the engine drafted meanwhile."""

    passes: int
    drafted: int
    accepted: int
    tokens_per_pass: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """Result of :func:`outrider.audit.calibration.audit_calibration`.

    Attributes:
        source, plain: who answered, and who was the null.
        null: ``one-sample`` or ``two-sample``. alpha: family-wise false alarm. order: of processing.
        prompts, outputs, tokens: how much was looked at (of the speculative arm).
        verdict: a key of ``VERDICTS``.
        evidence: one sample: log10 of the capital of all bets; the alarm is at ``-log10(alpha)``.
        alarm_at: tokens it took to raise it.
        p_value, critical: two samples: of the largest difference, and the largest z that chance explains.
        channels: what was tested, and how large a deviation it could see.
        violations: tokens outside the recomputed support by more than ``tolerance``; num_outside: all that are outside.
        histogram: of the probability integral transform, equal bins from 0 to 1.
        repeats: noise used twice. unchecked: what this audit cannot say.
    """

    target: str
    fingerprint: str
    precision: str
    path: str
    device: str
    source: dict[str, Any]
    sampling: SamplingParams
    order: str
    null: str
    alpha: float
    seed: int
    prompts: int
    outputs: int
    tokens: int
    guesses: tuple[str, ...]
    control: Control
    tolerance: float
    histogram: tuple[int, ...]
    repeats: tuple[Repeat, ...]
    unchecked: tuple[str, ...]
    speculation: Speculation | None
    verdict: str = "void"
    plain: dict[str, Any] | None = None
    evidence: float | None = None
    alarm_at: int | None = None
    p_value: float | None = None
    critical: float | None = None
    channels: tuple[Summary, ...] = ()
    violations: tuple[Outside, ...] = ()
    num_outside: int = 0
    versions: dict[str, str] = field(default_factory=describe_versions)

    @property
    def is_sound(self) -> bool:
        """True if nothing speaks against the engine and something was proved."""
        return self.verdict in ("calibrated", "no sign")

    @property
    def tokens_to_alarm(self) -> int | None:
        """Tokens after which the audit was sure; ``None`` if it never was."""
        if self.alarm_at is not None:
            return self.alarm_at
        return self.tokens if self.verdict == "biased" else None

    @property
    def cause(self) -> str:
        """What raised the alarm, in a few words; empty without one."""
        if self.verdict not in ("biased", "deviates"):
            return ""
        if self.violations and self.alarm_at is None and self.p_value is None:
            return f"{len(self.violations)} tokens outside the support"
        known = [each for each in self.channels if each.z is not None]
        if not known:
            return ""
        worst = max(known, key=lambda each: each.evidence if each.evidence is not None else abs(each.z or 0.0))
        return f"{worst.kind}, {worst.stratum} (z {worst.z:+.1f})"

    def to_json(self) -> dict[str, Any]:
        """Plain values, verdict first."""
        head = {"verdict": self.verdict, "is_sound": self.is_sound, "cause": self.cause}
        return plain_object({**head, **asdict(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestRow:
    """One planted fault (or none), and whether the audit noticed.

    Attributes:
        fault: its name, ``none`` for the sound engine. is_caught: the alarm was raised.
        tokens: after which; of the sound engine: looked at in all. cause: what raised it.
        evidence: log10 of the capital of all bets against the engine; the alarm is at 3.
    """

    fault: str
    what: str
    is_caught: bool
    tokens: int
    cause: str
    sampling: str
    evidence: float | None = None

    @property
    def is_right(self) -> bool:
        """A fault was caught, or the sound engine was not."""
        return self.is_caught == (self.fault != "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestReport:
    """Result of :func:`outrider.audit.selftest.self_test`."""

    target: str
    fingerprint: str
    precision: str
    path: str
    drafter: str
    num_draft_tokens: int
    rows: tuple[SelfTestRow, ...]
    versions: dict[str, str] = field(default_factory=describe_versions)

    @property
    def is_right(self) -> bool:
        """Every fault was caught, and the sound engine was not."""
        return all(row.is_right for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values, verdict first."""
        return plain_object({"is_right": self.is_right, **asdict(self)})


def plain_object(values: dict[Any, Any]) -> dict[str, Any]:
    """JSON knows no infinity: it becomes a text, and tuples become lists."""
    return {str(key): _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return plain_object(value)
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
