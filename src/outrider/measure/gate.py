"""Is acceptance still what it was? A result compared with an earlier one, for continuous integration and drift watch.

For each arm that both results hold, the ratio new / old of tokens a pass is formed on the requests that both hold, with
the interval that resampling these requests gives; where the two have no request in common (other traffic), each is
resampled on its own. The gate fails where the ratio itself lies below the bound: a drop may not hide behind few requests.
The interval says whether it is more than noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, DataError
from outrider.measure.profile import FILE_NAME, SpeculationProfile, read_profile
from outrider.measure.record import Arm, MeasureResult, RequestRecord
from outrider.measure.report import read_result
from outrider.measure.stats import FloatArray, Interval, Pool, interval_of, is_judged, pool_arms

__all__ = ["ArmChange", "Gate", "Level", "check_gate", "check_level", "compare_results"]

_UNCOMPARED = ("threads", "created", "date", "seconds", "command", "output", "baseline", "fail_under")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmChange:
    """One arm now and before.

    Attributes:
        arm: the arm.
        metric: ``tokens a pass``, or ``accepted length`` against a profile, which knows nothing else.
        before, now: its value in both.
        ratio: now / before.
        num_requests: requests that were compared; is_paired: both results hold the very same ones.
        is_below: the ratio lies below the bound.
    """

    arm: Arm
    metric: str
    before: float
    now: float
    ratio: Interval
    num_requests: int
    is_paired: bool
    is_below: bool

    @property
    def text(self) -> str:
        """One line for people."""
        ends = "" if self.ratio.low is None else f" (95 %: {self.ratio.low:.3f} to {self.ratio.high:.3f})"
        how = "the same requests" if self.is_paired else "other requests than before"
        return (
            f"{'BELOW' if self.is_below else 'ok'}: {self.arm.name}: {self.metric} {self.before:.3f} before, "
            f"{self.now:.3f} now, ratio {self.ratio.value or 0.0:.3f}{ends}, {self.num_requests} requests ({how})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The comparison.

    Attributes:
        changes: one for each arm that both results hold.
        differences: settings and fingerprints that are not the same, as sentences.
        fail_under: the bound, ``None`` if the comparison is only shown.
    """

    changes: tuple[ArmChange, ...]
    differences: tuple[str, ...] = ()
    fail_under: float | None = None

    @property
    def exit_code(self) -> int:
        """0 if no arm is below the bound, else 1."""
        return int(any(change.is_below for change in self.changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The best arm's tokens a pass beside a number that it must reach."""

    arm: Arm | None
    tokens_per_pass: Interval
    fail_under: float

    @property
    def exit_code(self) -> int:
        """0 if the best arm reaches the number, else 1."""
        return int((self.tokens_per_pass.value or 0.0) < self.fail_under)

    @property
    def text(self) -> str:
        """One line for people."""
        name = "no arm that may be judged" if self.arm is None else self.arm.name
        verdict = "BELOW" if self.exit_code else "ok"
        value = self.tokens_per_pass.value or 0.0
        return f"{verdict}: best arm {name}: {value:.3f} tokens a pass, at least {self.fail_under:g} wanted"


def check_level(result: MeasureResult, fail_under: float) -> Level:
    """The arm with the most tokens a pass must reach ``fail_under``."""
    found = {
        arm: pool.interval(_tokens_per_pass(pool))
        for arm, pool in pool_arms(record for record in result.records if is_judged(record)).items()
        if pool.counts.passes
    }
    best = max(found, key=lambda arm: found[arm].value or 0.0, default=None)
    value = Interval() if best is None else found[best]
    return Level(arm=best, tokens_per_pass=value, fail_under=fail_under)


def check_gate(result: MeasureResult, baseline: Path, fail_under: float | None) -> Gate:
    """Compare a result with a stored one, or with a ``speculation_profile.json``.

    Args:
        result: the new one.
        baseline: result file, folder with one, or profile.
        fail_under: smallest ratio new / old that is still fine; ``None`` never fails.

    Raises:
        ConfigError: an impossible bound.
        DataError: the baseline cannot be read, or has nothing in common with the result.
    """
    if fail_under is not None and not 0 < fail_under <= 10:
        raise ConfigError(f"--fail-under {fail_under:g} is not possible; allowed: above 0, as 0.95")
    path = baseline / "result.json" if baseline.is_dir() else baseline
    if path.name.endswith(FILE_NAME):
        return _against_profile(result, read_profile(path), fail_under)
    return compare_results(result, read_result(path), fail_under)


def compare_results(new: MeasureResult, old: MeasureResult, fail_under: float | None = None) -> Gate:
    """Compare two results arm by arm.

    Raises:
        DataError: they have no arm in common that was measured in both.
    """
    arms = [arm for arm in new.arms if arm in old.arms]
    found = [_change(arm, _of(new, arm), _of(old, arm), fail_under) for arm in arms]
    changes = tuple(change for change in found if change is not None)
    if not changes:
        raise DataError(
            f"nothing to compare: the baseline holds {_names(old.arms)}, this measurement {_names(new.arms)}; "
            "measure with the same drafters and lengths"
        )
    return Gate(changes=changes, differences=tuple(_differences(old, new)), fail_under=fail_under)


def _names(arms: Sequence[Arm]) -> str:
    return "; ".join(arm.name for arm in arms) or "nothing"


def _of(result: MeasureResult, arm: Arm) -> list[RequestRecord]:
    return [record for record in result.records if record.arm == arm and is_judged(record)]


def _change(
    arm: Arm, new: Sequence[RequestRecord], old: Sequence[RequestRecord], fail_under: float | None
) -> ArmChange | None:
    """Both results on their common requests; on all of each if there are none."""
    common = {_key(record) for record in new} & {_key(record) for record in old}
    if common:
        new = [record for record in new if _key(record) in common]
        old = [record for record in old if _key(record) in common]
    if not new or not old:
        return None
    if common:
        now, before = _paired(new, old)
    else:
        now, before = pool_arms(new)[arm], pool_arms(old, seed=1)[arm]
    if not now.counts.tokens_per_pass or not before.counts.tokens_per_pass:
        return None
    ratio = interval_of(_tokens_per_pass(now) / _tokens_per_pass(before), min(now.num_lines, before.num_lines))
    return ArmChange(
        arm=arm,
        metric="tokens a pass",
        before=before.counts.tokens_per_pass,
        now=now.counts.tokens_per_pass,
        ratio=ratio,
        num_requests=now.num_requests,
        is_paired=bool(common),
        is_below=_is_below(ratio, fail_under),
    )


def _key(record: RequestRecord) -> tuple[str, int, int]:
    """The same request in both: same name, same place in the file, same length."""
    return record.id, record.line, record.num_prompt_tokens


def _paired(new: Sequence[RequestRecord], old: Sequence[RequestRecord]) -> tuple[Pool, Pool]:
    """Both pools from the same resamplings: as two arms of one group."""
    was = Arm(drafter="\0before", shape="", num_draft_tokens=0)
    pools = pool_arms([*new, *(replace(record, arm=was) for record in old)])
    return pools[new[0].arm], pools[was]


def _tokens_per_pass(pool: Pool) -> FloatArray:
    return pool.columns["committed"] / pool.columns["passes"]


def _is_below(ratio: Interval, fail_under: float | None) -> bool:
    return fail_under is not None and ratio.value is not None and ratio.value < fail_under


def _against_profile(result: MeasureResult, profile: SpeculationProfile, fail_under: float | None) -> Gate:
    """A profile knows accepted lengths only, by number of draft tokens."""
    lengths = {**profile.accept_length_by_k}
    if profile.mean_accept_length is not None:
        lengths.setdefault(profile.num_speculative_tokens, profile.mean_accept_length)
    changes = []
    for arm, pool in pool_arms(record for record in result.records if is_judged(record)).items():
        before, now = lengths.get(arm.num_draft_tokens), pool.counts.accepted_length
        if before is None or now is None or not _is_of(arm, profile):
            continue
        steps = pool.columns["steps"]
        ratio = pool.interval((1 + pool.columns["accepted"] / steps.clip(min=1e-9)) / before)
        changes.append(
            ArmChange(
                arm=arm,
                metric="accepted length",
                before=before,
                now=now,
                ratio=ratio,
                num_requests=pool.num_requests,
                is_paired=False,
                is_below=_is_below(ratio, fail_under),
            )
        )
    if not changes:
        raise DataError(
            f"nothing to compare: the profile holds lengths for {sorted(lengths)} draft tokens of "
            f"{profile.draft_checkpoint.get('name') or 'an unnamed drafter'}; this measurement {_names(result.arms)}"
        )
    return Gate(changes=tuple(changes), fail_under=fail_under)


def _is_of(arm: Arm, profile: SpeculationProfile) -> bool:
    """True if the arm may be the drafter that the profile describes: one that ends in the same name."""
    name = str(profile.draft_checkpoint.get("name") or "")
    shape = profile.draft_checkpoint.get("shape")
    is_alike = shape is None or str(shape).startswith("tree") == arm.is_tree
    return is_alike and (not name or arm.drafter.replace("\\", "/").endswith(name))


def _differences(old: MeasureResult, new: MeasureResult) -> Iterator[str]:
    """Settings that differ, fingerprints first."""
    before, now = dict(_flat(old.settings)), dict(_flat(new.settings))
    names = sorted({*before, *now}, key=lambda name: ("fingerprint" not in name, name))
    for name in names:
        if name.rpartition(".")[2] not in _UNCOMPARED and before.get(name) != now.get(name):
            yield f"{name} was {before.get(name)!r}, is now {now.get(name)!r}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
