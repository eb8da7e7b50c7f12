"""Measured acceptance as ``speculation_profile.json``, the exchange file that NVIDIA ModelOpt proposes (schema 1.0).

It travels beside a draft checkpoint, so that simulators and engines need not guess how good the drafter is. Differences
to our own numbers: its conditional rates are quotients of neighbouring marginal rates, so that their products are the
marginal rates again; ours divide by the steps that really had a draft token at that depth. The two are equal for drafters
that always propose all their tokens. Only names and the last two parts of a path are written, never a whole path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from outrider.errors import DataError
from outrider.files import write_json
from outrider.measure.record import Arm, Counts, MeasureResult
from outrider.measure.report import ALL, GroupRow, Summary

__all__ = ["FILE_NAME", "SpeculationProfile", "last_parts", "profiles_of", "read_profile", "write_profile"]

FILE_NAME = "speculation_profile.json"
SCHEMA_VERSION = "1.0"

_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationProfile:
    """One drafter's measured acceptance at one number of draft tokens.

    Attributes:
        method: kind of drafter; draft_checkpoint, target_model: what was measured.
        num_speculative_tokens: most draft tokens of a step, the length of both lists.
        marginal_accept_rates: chance that the first i draft tokens are all kept, over all steps.
        mean_accept_length: bonus token included.
        accept_length_by_k: the same at every number of draft tokens that was measured.
        acceptance_length_histogram: steps by tokens that they committed, bonus token included.
        per_category: the same of single categories.
        measurement_conditions: temperature, traffic, hardware, versions.
        measured: False for a placeholder without numbers.
    """

    method: str
    num_speculative_tokens: int
    marginal_accept_rates: tuple[float, ...]
    mean_accept_length: float | None
    draft_checkpoint: Mapping[str, Any] = field(default_factory=dict)
    target_model: Mapping[str, Any] = field(default_factory=dict)
    accept_length_by_k: Mapping[int, float] = field(default_factory=dict)
    acceptance_length_histogram: Mapping[int, float] = field(default_factory=dict)
    per_category: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    measurement_conditions: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True

    @property
    def conditional_accept_rates(self) -> tuple[float, ...]:
        """Chance that draft token i is kept once all before it were: quotients of the marginal rates."""
        before = (1.0, *self.marginal_accept_rates)
        return tuple(m / b if b else 0.0 for m, b in zip(self.marginal_accept_rates, before, strict=False))

    def to_json(self) -> dict[str, Any]:
        """The file's values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "measured": self.measured,
            "method": self.method,
            "draft_checkpoint": dict(self.draft_checkpoint),
            "target_model": dict(self.target_model),
            "num_speculative_tokens": self.num_speculative_tokens,
            "conditional_accept_rates": _rounded(self.conditional_accept_rates),
            "marginal_accept_rates": _rounded(self.marginal_accept_rates),
            "mean_accept_length": None if self.mean_accept_length is None else round(self.mean_accept_length, 6),
            "accept_length_by_k": {str(k): round(length, 6) for k, length in self.accept_length_by_k.items()},
            "acceptance_length_histogram": {str(k): _whole(n) for k, n in self.acceptance_length_histogram.items()},
            "per_category": {name: dict(values) for name, values in self.per_category.items()},
            "measurement_conditions": dict(self.measurement_conditions),
        }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]


def _whole(number: float) -> float | int:
    """Steps that were counted stay whole numbers; expectations of a replay are fractions."""
    return round(number) if math.isclose(number, round(number), abs_tol=1e-9) else round(number, 6)


def profiles_of(result: MeasureResult, summary: Summary) -> dict[str, SpeculationProfile]:
    """A profile for each drafter that drafted anything, by a name that may be a folder's.

    Of a drafter's arms the longest chain is described (without chains the deepest tree), at the lowest temperature.
    """
    found: dict[str, SpeculationProfile] = {}
    for drafter in dict.fromkeys(arm.drafter for arm in result.arms):
        rows = [row for row in summary.of(ALL) if row.arm.drafter == drafter and row.counts.steps]
        if rows:
            found[_folder(drafter, found)] = _profile(rows, result, summary)
    return found


def _folder(drafter: str, taken: Mapping[str, Any]) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", last_parts(drafter)).strip("-.") or "drafter"
    return name if name not in taken else f"{name}-{len(taken) + 1}"


def _profile(rows: Sequence[GroupRow], result: MeasureResult, summary: Summary) -> SpeculationProfile:
    best = max(rows, key=lambda row: (-row.arm.temperature, not row.arm.is_tree, row.arm.num_draft_tokens))
    arm, counts = best.arm, best.counts
    alike = [row for row in rows if (row.arm.temperature, row.arm.is_tree) == (arm.temperature, arm.is_tree)]
    name = arm.drafter
    return SpeculationProfile(
        method=last_parts(name.partition(":")[0]),
        num_speculative_tokens=arm.num_draft_tokens,
        marginal_accept_rates=_marginal(counts, arm),
        mean_accept_length=counts.accepted_length,
        draft_checkpoint={"name": last_parts(name), "shape": arm.shape},
        target_model=_target(result.settings),
        accept_length_by_k={row.arm.num_draft_tokens: row.counts.accepted_length or 1.0 for row in alike},
        acceptance_length_histogram=_histogram(counts, arm),
        per_category=_per_category(arm, summary),
        measurement_conditions=_conditions(best, result),
    )


def last_parts(path: str) -> str:
    """The last two parts of a path, or a name as it is: what may be published of it."""
    parts = PurePosixPath(path.replace("\\", "/")).parts
    return "/".join(part for part in parts[-2:] if part != "/")


def _marginal(counts: Counts, arm: Arm) -> tuple[float, ...]:
    rates = [rate or 0.0 for rate in counts.unconditional_rates()]
    return (*rates, *[0.0] * (arm.num_draft_tokens - len(rates)))


def _histogram(counts: Counts, arm: Arm) -> dict[int, float]:
    """Steps by the tokens that they committed: those that kept at least i less those that kept more."""
    kept = (counts.steps, *counts.kept, *[0.0] * (arm.num_draft_tokens + 1 - len(counts.kept)))
    return {length + 1: kept[length] - kept[length + 1] for length in range(arm.num_draft_tokens + 1)}


def _per_category(arm: Arm, summary: Summary) -> dict[str, dict[str, Any]]:
    """Of the field ``category`` if there is one."""
    found: dict[str, dict[str, Any]] = {}
    for row in summary.of("category"):
        if row.arm == arm and row.counts.steps:
            part = SpeculationProfile(
                method="",
                num_speculative_tokens=arm.num_draft_tokens,
                marginal_accept_rates=_marginal(row.counts, arm),
                mean_accept_length=row.counts.accepted_length,
            ).to_json()
            names = ("conditional_accept_rates", "marginal_accept_rates", "mean_accept_length")
            found[row.value] = {**{name: part[name] for name in names}, "num_requests": row.num_requests}
    return found


def _target(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {"name": last_parts(str(settings.get("target", "")))}
    names = ("fingerprint", "precision", "dtype")
    return found | {name: settings[name] for name in names if isinstance(settings.get(name), str)}


def _conditions(row: GroupRow, result: MeasureResult) -> dict[str, Any]:
    sources = sorted({record.source for record in result.records if record.arm == row.arm})
    values: dict[str, Any] = {
        "temperature": row.arm.temperature,
        "verification": row.arm.verification,
        "requests": row.num_requests,
        "steps": _whole(row.counts.steps),
        "source": "+".join(sources),
    }
    for name in ("traffic", "hardware", "machine", "versions"):
        if name in result.settings:
            given = result.settings[name]
            values[name] = last_parts(given) if isinstance(given, str) else given
    return values


def write_profile(profile: SpeculationProfile, path: Path) -> None:
    """Write the file."""
    write_json(path, profile.to_json())


def read_profile(path: Path) -> SpeculationProfile:
    """Read a profile of anybody's; keys that we do not know are left alone.

    Raises:
        DataError: it cannot be read, has another schema, or its numbers contradict each other.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"profile {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"profile {path} is not JSON: {error}") from None
    if not isinstance(values, dict) or "marginal_accept_rates" not in values:
        raise DataError(f"{path} is not a speculation profile: marginal_accept_rates is not there")
    version = str(values.get("schema_version", SCHEMA_VERSION))
    if version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise DataError(f"profile {path} has schema {version}; this version reads {SCHEMA_VERSION}")
    try:
        profile = _from_json(values)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise DataError(f"profile {path} is damaged: {error}") from None
    _check(profile, path)
    return profile


def _from_json(values: Mapping[str, Any]) -> SpeculationProfile:
    length = values.get("mean_accept_length")
    return SpeculationProfile(
        method=str(values.get("method") or ""),
        num_speculative_tokens=int(values["num_speculative_tokens"]),
        marginal_accept_rates=tuple(float(rate) for rate in values["marginal_accept_rates"]),
        mean_accept_length=None if length is None else float(length),
        draft_checkpoint=_named(values.get("draft_checkpoint")),
        target_model=_named(values.get("target_model")),
        accept_length_by_k={int(k): float(v) for k, v in (values.get("accept_length_by_k") or {}).items()},
        acceptance_length_histogram={
            int(k): float(v) for k, v in (values.get("acceptance_length_histogram") or {}).items()
        },
        per_category=dict(values.get("per_category") or {}),
        measurement_conditions=dict(values.get("measurement_conditions") or {}),
        measured=bool(values.get("measured", True)),
    )


def _named(given: Any) -> dict[str, Any]:
    """Some producers write a name, others an object."""
    return dict(given) if isinstance(given, Mapping) else {} if given is None else {"name": str(given)}


def _check(profile: SpeculationProfile, path: Path) -> None:
    rates = profile.marginal_accept_rates
    if any(not 0 <= rate <= 1 for rate in rates) or any(a < b - 1e-6 for a, b in pairwise(rates)):
        raise DataError(f"profile {path}: marginal_accept_rates {list(rates)} must fall, between 1 and 0")
    length = profile.mean_accept_length
    if profile.measured and length is not None and abs(1 + sum(rates) - length) > _TOLERANCE:
        raise DataError(
            f"profile {path} contradicts itself: 1 + the sum of marginal_accept_rates is {1 + sum(rates):.3f}, "
            f"mean_accept_length is {length:.3f}"
        )
