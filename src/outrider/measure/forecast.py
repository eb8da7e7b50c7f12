"""Does it pay? The speed-up that pass and draft times predict, what it takes to break even, and which arm to choose.

With c(r) the measured milliseconds of a target pass over r rows and d those of drafting a step, P decode passes of which
S carry drafts (D draft tokens in all) and commit N tokens take

    spent = (P - S) c(1) + S (c(1 + D / S) + d)

where plain decoding would take N c(1). So speed-up = N c(1) / spent, which is tokens a pass divided by what a pass costs
in plain passes; speculation breaks even where the two are equal. One sequence at a time is assumed: with others in the
batch, rows cost more. The intervals are those of the traffic; the pass times are taken as they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from outrider.measure.record import Arm, PassCosts, RequestRecord
from outrider.measure.stats import FloatArray, Interval, Pool, pool_arms

__all__ = [
    "FEWEST_TO_CHOOSE",
    "Forecast",
    "Judgement",
    "Recommendation",
    "depth_of",
    "forecast",
    "pass_ms",
    "recommend",
]

FEWEST_TO_CHOOSE = 20
"""Lines of traffic below which no arm is recommended: one half would choose from fewer than ten."""


class Judgement(StrEnum):
    """What the forecast says of an arm on some traffic."""

    PAYS = "pays"
    LOSES = "does not pay"
    UNSURE = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What an arm would gain or lose on a group of requests, on the machine that the passes were timed on.

    Attributes:
        speedup: expected speed over plain decoding's.
        pass_cost: mean cost of a pass with its drafting, in plain passes: the tokens a pass needed to break even.
        break_even_length: accepted length needed to break even with as many drafting passes; ``None`` without drafts.
        ceiling: speed-up if every pass drafted and every draft token were kept.
        judgement: whether the interval lies above 1, below 1, or around it.
    """

    speedup: Interval
    pass_cost: float
    break_even_length: float | None
    ceiling: float
    judgement: Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Which arm to run, chosen on one half of the traffic and judged on the other, so that luck is not rewarded.

    Attributes:
        arm: the arm with the best forecast on the first half; ``None`` if nothing could be chosen.
        judgement: of that arm on the second half; ``None`` if nothing could be chosen.
        speedup: of that arm on the second half.
        num_lines_chosen, num_lines_judged: lines of traffic in the two halves.
        other_half_chooses: the arm that the second half would have chosen.
        text: one sentence for people.
    """

    text: str
    arm: Arm | None = None
    judgement: Judgement | None = None
    speedup: Interval = field(default_factory=Interval)
    num_lines_chosen: int = 0
    num_lines_judged: int = 0
    other_half_chooses: Arm | None = None


def depth_of(arm: Arm) -> int:
    """Most draft tokens that a step of the arm can keep. A tree may be flatter than the number of draft tokens asked for."""
    found = re.search(r"\bdepth=(\d+)", arm.shape)
    return arm.num_draft_tokens if found is None else min(arm.num_draft_tokens, int(found[1]))


def pass_ms(costs: PassCosts, num_rows: FloatArray) -> FloatArray:
    """Milliseconds of a pass: linear between measured row counts and beyond the last; more rows are never cheaper."""
    rows = np.asarray(costs.rows, dtype=np.float64)
    ms = np.maximum.accumulate(np.asarray(costs.pass_ms, dtype=np.float64))
    found: FloatArray = np.interp(num_rows, rows, ms)
    if len(rows) > 1:
        slope = (ms[-1] - ms[-2]) / (rows[-1] - rows[-2])
        found += slope * np.maximum(0.0, num_rows - rows[-1])
    return found


def forecast(pool: Pool, arm: Arm, costs: PassCosts | None) -> Forecast | None:
    """The forecast of an arm on a pool; ``None`` without a pass, or without times of the target or of this drafter."""
    if costs is None or not costs.rows or arm.name not in costs.draft_ms or not pool.counts.passes:
        return None
    passes, steps = pool.columns["passes"], pool.columns["steps"]
    plain = float(pass_ms(costs, np.ones(1))[0])
    drafts_per_step = pool.columns["drafted"] / np.maximum(steps, 1e-9)
    step_ms = pass_ms(costs, 1 + drafts_per_step) + costs.draft_ms[arm.name]
    spent = (passes - steps) * plain + steps * step_ms
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = pool.columns["committed"] * plain / spent
    gains[~np.isfinite(gains)] = np.nan
    cost = float(spent[0] / (passes[0] * plain))
    speedup = pool.interval(gains)
    return Forecast(
        speedup=speedup,
        pass_cost=cost,
        break_even_length=float(1 + (cost - 1) * passes[0] / steps[0]) if steps[0] else None,
        ceiling=_ceiling(arm, float(drafts_per_step[0]), costs, plain),
        judgement=judge(speedup),
    )


def _ceiling(arm: Arm, drafts_per_step: float, costs: PassCosts, plain: float) -> float:
    """Speed-up with every draft kept. A tree's rows are those that it really drafted, a chain's its length."""
    depth = depth_of(arm)
    rows = 1 + max(float(depth), drafts_per_step if arm.is_tree else 0.0)
    full = float(pass_ms(costs, np.full(1, rows))[0]) + costs.draft_ms[arm.name]
    return (1 + depth) * plain / full


def judge(speedup: Interval) -> Judgement:
    """Pays if the whole interval lies above 1, does not pay if it lies below."""
    if speedup.low is not None and speedup.low > 1:
        return Judgement.PAYS
    if speedup.high is not None and speedup.high < 1:
        return Judgement.LOSES
    return Judgement.UNSURE


def recommend(records: Sequence[RequestRecord], costs: PassCosts | None) -> Recommendation:
    """Choose an arm on half of the lines and judge it on the other half.

    Args:
        records: only those that verdicts may rest on.
        costs: pass and draft times of this machine.
    """
    lines = sorted({record.line for record in records})
    if not lines:
        return Recommendation(text="No recommendation: no request here may be judged by.")
    if costs is None or not costs.rows:
        return Recommendation(text="No recommendation: pass times were not measured, so speed cannot be forecast.")
    if len(lines) < FEWEST_TO_CHOOSE:
        return Recommendation(
            text=f"No recommendation: {len(lines)} requests are too few to choose by one half and judge by the other; "
            f"give at least {FEWEST_TO_CHOOSE}."
        )
    order = np.random.default_rng(0).permutation(len(lines))
    first = {lines[index] for index in order[: len(lines) // 2]}
    chosen_by = _forecasts([record for record in records if record.line in first], costs)
    judged_by = _forecasts([record for record in records if record.line not in first], costs)
    both = chosen_by.keys() & judged_by.keys()
    if not both:
        return Recommendation(text="No recommendation: no drafter's time was measured on both halves of the traffic.")
    arm = _best(chosen_by, both)
    found = judged_by[arm]
    return Recommendation(
        text=_sentence(arm, found, len(lines) - len(first)),
        arm=arm,
        judgement=found.judgement,
        speedup=found.speedup,
        num_lines_chosen=len(first),
        num_lines_judged=len(lines) - len(first),
        other_half_chooses=_best(judged_by, both),
    )


def _forecasts(records: Sequence[RequestRecord], costs: PassCosts) -> dict[Arm, Forecast]:
    found = {arm: forecast(pool, arm, costs) for arm, pool in pool_arms(records).items()}
    return {arm: each for arm, each in found.items() if each is not None}


def _best(forecasts: Mapping[Arm, Forecast], among: set[Arm]) -> Arm:
    """The highest expected speed-up; of equals the one with fewer draft tokens."""
    return max(sorted(among, key=_order), key=lambda arm: forecasts[arm].speedup.value or 0.0)


def _order(arm: Arm) -> tuple[int, str]:
    return arm.num_draft_tokens, arm.name


def _sentence(arm: Arm, found: Forecast, num_lines: int) -> str:
    gain = found.speedup
    ends = "" if gain.low is None or gain.high is None else f" (95 %: {gain.low:.2f} to {gain.high:.2f})"
    value = f"{gain.value or 0.0:.2f}x plain decoding{ends} on {num_lines} requests that took no part in the choice"
    if found.judgement is Judgement.PAYS:
        return f"Use {arm.name}: {value}."
    if found.judgement is Judgement.LOSES:
        return f"Decode without drafts: even the best choice, {arm.name}, is forecast at {value}."
    return f"Cannot tell whether any drafter pays: the best choice, {arm.name}, is forecast at {value}."
