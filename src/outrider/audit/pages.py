"""The pages of each audit: what was tested, how much, the verdict, and what could not be checked."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from outrider.audit.calibration_report import VERDICTS, CalibrationReport, SelfTestReport
from outrider.audit.identity import IdentityReport
from outrider.audit.law import TOLERANCE, LawReport
from outrider.audit.page import Block, Facts, Histogram, Notes, Rows, render_page
from outrider.audit.statistics import Summary
from outrider.audit.versions import describe_versions
from outrider.sampling.params import SamplingParams

__all__ = ["calibration_page", "channel_cells", "identity_page", "law_page", "selftest_page", "weight_of"]

SHOWN_OUTSIDE = 20


def calibration_page(report: CalibrationReport) -> str:
    """HTML of an audit of calibration."""
    mood = "good" if report.verdict == "calibrated" else "bad" if report.verdict == "biased" else "unsure"
    verdict = f"{report.verdict}: {VERDICTS[report.verdict]}"
    blocks: list[Block] = [
        Facts(title="What was tested", values=_tested(report)),
        Facts(title="Evidence", values=weight_of(report)),
        Histogram(
            title="Probability integral transform",
            counts=report.histogram,
            note="Tokens ordered by falling probability; draws from the law fill all bins alike (the dashed line).",
        ),
        Rows(
            title="Tests",
            columns=("number", "stratum", "tokens", "mean", "z", "detectable"),
            rows=[channel_cells(each) for each in report.channels],
            note="Mean: observed minus expected. Detectable: the mean that this many tokens show with 90 % power.",
        ),
    ]
    if report.violations:
        rows = [
            [each.prompt_id, str(each.position), str(each.token), f"{each.gap:.2e}"]
            for each in report.violations[:SHOWN_OUTSIDE]
        ]
        columns = ("prompt", "position", "token", "gap in logits")
        blocks.append(Rows(title="Tokens outside the recomputed support", columns=columns, rows=rows))
    if report.repeats:
        lines = [
            f"prompt {each.prompt_id}: {each.tokens} equal tokens, chance {each.chance:.1e}" for each in report.repeats
        ]
        blocks.append(Notes(title="Noise used twice", lines=lines))
    blocks += [Notes(title="What this does not say", lines=report.unchecked), _versions(report.versions)]
    subtitle = f"{report.target}: {report.tokens} tokens in {report.outputs} answers to {report.prompts} prompts"
    return render_page("Audit of calibration", subtitle=subtitle, verdict=verdict, mood=mood, blocks=blocks)


def selftest_page(report: SelfTestReport) -> str:
    """HTML of the planted faults."""
    verdict = "every planted fault was caught, and the sound engine was not accused"
    rows = [
        [row.fault, row.what, row.sampling, "caught" if row.is_caught else "not accused", str(row.tokens), row.cause]
        for row in report.rows
    ]
    facts = {
        "target": f"{report.target} ({report.precision}, {report.path})",
        "weights": report.fingerprint,
        "drafter": f"{report.drafter}, {report.num_draft_tokens} draft tokens",
    }
    return render_page(
        "Self-test of the audit of calibration",
        subtitle="Faults planted in the running engine",
        verdict=verdict if report.is_right else "NOT as it should be: see the table",
        mood="good" if report.is_right else "bad",
        blocks=[
            Facts(title="What was tested", values=facts),
            Rows(title="Faults", columns=("fault", "what", "sampling", "verdict", "tokens", "cause"), rows=rows),
            _versions(report.versions),
        ],
    )


def identity_page(report: IdentityReport) -> str:
    """HTML of an audit of identity."""
    arms = [
        [
            arm.drafter,
            str(arm.num_draft_tokens),
            arm.sampling,
            f"{arm.num_identical} of {arm.num_outputs}",
            str(arm.num_tokens),
            f"{arm.accepted} of {arm.drafted}",
            arm.verdict,
        ]
        for arm in report.arms
    ]
    differences = [
        [
            d.prompt,
            d.arm,
            d.sampling,
            str(d.index),
            str(d.plain_token),
            str(d.speculative_token),
            "n/a" if d.gap is None else f"{d.gap:.2e}",
            f"{d.tolerance:.2e}",
            d.verdict,
        ]
        for d in report.differences
    ]
    control = report.control
    facts = {
        "target": f"{report.target} ({report.precision} on {report.device})",
        "weights": report.fingerprint,
        "control": f"plain against plain, 1 against {control.batch_size} sequences a pass: logits move by at most "
        f"{control.deviation:.2e} over {control.num_positions} positions",
        "tolerance of a tie": f"{control.tolerance:.2e}",
    }
    blocks: list[Block] = [
        Facts(title="What was tested", values=facts),
        Rows(
            title="Arms",
            columns=("drafter", "k", "sampling", "identical", "tokens", "drafts kept", "verdict"),
            rows=arms,
        ),
    ]
    if differences:
        columns = ("prompt", "arm", "sampling", "index", "plain", "speculative", "gap", "tolerance", "verdict")
        blocks.append(Rows(title="First differences", columns=columns, rows=differences))
    blocks.append(_versions(describe_versions()))
    is_good = report.is_lossless
    return render_page(
        "Audit of identity",
        subtitle=f"{report.target}: greedy and seeded output with and without speculation",
        verdict="every output is the target's own" if is_good else "NOT lossless: see the bugs below",
        mood="good" if is_good else "bad",
        blocks=blocks,
    )


def law_page(report: LawReport) -> str:
    """HTML of an audit of the law."""
    rows = [
        [row.kind, str(row.cases), str(row.branches), f"{row.worst:.1e}", "exact" if row.is_lossless else "BIASED"]
        for row in report.rows
    ]
    return render_page(
        "Audit of the law",
        subtitle=f"{report.cases} small random worlds (seed {report.seed}), every outcome enumerated",
        verdict=f"{report.verdict}: worst total variation distance {report.worst:.1e}",
        mood="good" if report.is_lossless else "bad",
        blocks=[
            Rows(
                title="Verification",
                columns=("verification", "worlds", "branches", "worst distance", "verdict"),
                rows=rows,
                note=f"Rounding is below {TOLERANCE:.0e}.",
            ),
            _versions(describe_versions()),
        ],
    )


def channel_cells(summary: Summary) -> list[str]:
    """One row of the table of tests."""

    def shown(value: float | None, form: str) -> str:
        return "n/a" if value is None else format(value, form)

    return [
        summary.kind,
        summary.stratum,
        str(summary.tokens),
        shown(summary.mean, "+.4f"),
        shown(summary.z, "+.2f"),
        shown(summary.detectable, ".4f"),
    ]


def weight_of(report: CalibrationReport) -> dict[str, str]:
    """How strongly the numbers speak, in words."""
    found: dict[str, str] = {"false alarm of the whole audit": f"{report.alpha:g}"}
    if report.evidence is not None:
        found["evidence against the law"] = (
            f"10^{report.evidence:+.1f} (alarm at 10^{-math.log10(report.alpha):.0f}; below 10^0: none)"
        )
        found["alarm after"] = "no alarm" if report.alarm_at is None else f"{report.alarm_at} tokens"
    if report.p_value is not None:
        found["p value of the largest difference"] = f"{report.p_value:.5f}"
        found["largest z that chance explains"] = f"{report.critical:.2f}"
    found["tokens outside the recomputed support"] = (
        f"{report.num_outside}, {len(report.violations)} of them by more than {report.tolerance:.1e} logits"
    )
    if report.cause:
        found["what raised the alarm"] = report.cause
    return found


def _tested(report: CalibrationReport) -> dict[str, Any]:
    source = report.source
    who = source.get("endpoint") or f"this engine, drafter {source.get('drafter')}"
    engine = source.get("engine")
    found = {
        "target": f"{report.target} ({report.precision} on {report.device}, {report.path})",
        "weights": report.fingerprint,
        "answers from": who,
        "sampling": _fields(report.sampling),
        "processor order": report.order,
        "null": f"{report.null}"
        + (", the plain arm of the same engine" if report.plain else ", the law that teacher forcing recomputes"),
        "guesses followed": ", ".join(report.guesses),
        "control": f"logits move by at most {report.control.deviation:.1e} between batch shapes "
        f"({report.control.num_positions} positions)",
    }
    if isinstance(engine, dict):
        found["engine"] = ", ".join(f"{name} {value}" for name, value in engine.items())
    if report.speculation is not None:
        s = report.speculation
        rate = "n/a" if s.tokens_per_pass is None else f"{s.tokens_per_pass:.2f}"
        found["drafts kept"] = f"{s.accepted} of {s.drafted}; {rate} tokens a pass"
    return found


def _fields(params: SamplingParams) -> str:
    neutral = asdict(SamplingParams())
    return ", ".join(f"{name} {value}" for name, value in asdict(params).items() if value != neutral[name])


def _versions(versions: dict[str, str]) -> Facts:
    return Facts(title="Versions", values=versions)
