"""What the doctor says: findings with evidence, ranked, and where the loss lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from outrider.metrics import SpeculationStats

__all__ = ["PLACES", "DoctorReport", "Finding", "Gain", "Place", "Status", "compare", "rank"]

Status = Literal["proved", "refused", "seen", "noted", "clear", "not checked"]
"""``proved``: the mended variant was measured on the same requests, and is better beyond noise. ``refused``: the drafter does
not load. ``seen``: a difference that explains a loss which is there. ``noted``: a difference, but no loss to explain.
"""

Place = Literal["head", "wiring", "traffic", "cost"]
PLACES: dict[Place, str] = {
    "head": "the head itself",
    "wiring": "how it is wired",
    "traffic": "the traffic",
    "cost": "what drafting costs",
}

_ORDER: dict[Status, int] = {"refused": 0, "proved": 0, "seen": 1, "noted": 2, "clear": 3, "not checked": 4}
_RESAMPLES = 2000
_TAIL = 0.5
"""Per cent cut off at each end of the bootstrap: a 99 % interval, since a dozen variants are tried."""
_LEAST_GAIN = 0.03
"""Tokens a pass that a variant must gain at least, at the lower end of its interval."""
_LEAST_REQUESTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Tokens a pass before and after a change, pooled over the same requests, with the interval of the difference."""

    before: float
    after: float
    low: float
    high: float
    num_requests: int

    @property
    def is_proved(self) -> bool:
        """True if the change helps beyond noise; one or two requests prove nothing."""
        return self.num_requests >= _LEAST_REQUESTS and self.low > _LEAST_GAIN

    def to_text(self) -> str:
        """One clause."""
        return (
            f"{self.before:.2f} -> {self.after:.2f} tokens a pass on the same {self.num_requests} requests "
            f"({self.after - self.before:+.2f}, 99 % interval {self.low:+.2f} to {self.high:+.2f})"
        )


def compare(before: Sequence[SpeculationStats], after: Sequence[SpeculationStats]) -> Gain:
    """Paired over requests: the difference of pooled tokens a pass, bootstrapped over requests (fixed noise)."""
    assert len(before) == len(after) > 0
    counts = np.array([[b.committed, b.passes, a.committed, a.passes] for b, a in zip(before, after, strict=True)])
    drawn = np.random.default_rng(0).integers(len(counts), size=(_RESAMPLES, len(counts)))
    sums = np.maximum(counts[drawn].sum(axis=1), 1)
    differences = sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1]
    low, high = np.percentile(differences, [_TAIL, 100 - _TAIL])
    total = np.maximum(counts.sum(axis=0), 1)
    return Gain(
        before=float(total[0] / total[1]),
        after=float(total[2] / total[3]),
        low=float(low),
        high=float(high),
        num_requests=len(counts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of low acceptance, or of no speed-up, that was looked for.

    Attributes:
        cause: short name, for programs. title: what is wrong, or was looked at, in one line.
        evidence: what was found. remedy: what to do; empty when there is nothing.
        weight: orders findings of one status where no gain was measured.
    """

    cause: str
    place: Place
    status: Status
    title: str
    evidence: str
    remedy: str = ""
    gain: Gain | None = None
    weight: int = 0

    @property
    def is_found(self) -> bool:
        """True if it is something to act on."""
        return self.status in ("proved", "refused", "seen")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: value for name, value in asdict(self).items() if name != "weight"}


def rank(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What was proved first, the largest gain in front; then what was seen, by weight.

    A drafter that does not load stands behind the proved reason why, before one that nobody could prove.
    """

    def key(finding: Finding) -> tuple[float, ...]:
        gain = finding.gain.low if finding.gain is not None and finding.status == "proved" else 0.0
        return (_ORDER[finding.status], finding.status == "refused", -gain, -finding.weight)

    return tuple(sorted(findings, key=key))


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All findings, ranked, and the verdict.

    Attributes:
        subject: the drafter. target, precision: what it drafts for.
        verdict: one sentence: is there a loss, and where it lies.
        acceptance: what was measured: as served, with everything proved mended, and what the card says.
        speed: pass and draft times with the tokens a pass that break even; empty when the speed was left out.
    """

    subject: str
    target: str
    verdict: str
    findings: tuple[Finding, ...]
    precision: str = ""
    num_requests: int = 0
    acceptance: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)

    @property
    def found(self) -> tuple[Finding, ...]:
        """What to act on."""
        return tuple(finding for finding in self.findings if finding.is_found)

    @property
    def is_healthy(self) -> bool:
        """True if there is nothing to act on."""
        return not self.found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        own = {f: getattr(self, f) for f in ("subject", "target", "precision", "num_requests", "verdict")}
        return {
            "is_healthy": self.is_healthy,
            **own,
            "acceptance": self.acceptance,
            "speed": self.speed,
            "findings": [finding.to_json() for finding in self.findings],
        }
