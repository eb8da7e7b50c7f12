"""The examination of drafters that are no heads: n-gram, suffix, draft models."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.audit.doctor.case import Case, cost, renderings, temperature
from outrider.audit.doctor.live import LiveRun, Speed
from outrider.audit.doctor.report import PLACES, DoctorReport, Finding, compare, rank
from outrider.drafters.build import make_drafter, parse_spec
from outrider.errors import VocabularyMismatch

__all__ = ["examine_other", "repeats"]

_LITTLE = 1.3
_COPIERS = ("ngram", "suffix")


def examine_other(case: Case) -> DoctorReport:
    """Examine a drafter that has no folder to read.

    Raises:
        ConfigError, ModelError: no such drafter or model; another tokenizer than the target's is a finding.
    """
    try:
        drafter = case.drafter()
    except VocabularyMismatch as error:
        return _report(case, None, (_other_tokens(error),), None)
    case.say("decoding the requests")
    greedy = case.run(drafter, case.greedy)
    served = greedy
    if case.params.temperature:
        case.say(f"decoding the requests at temperature {case.params.temperature:g}")
        served = case.run(case.drafter(), case.params)
    speed = case.speed(served)
    findings = [temperature(case, served, greedy), *renderings(case, greedy), cost(case, speed, served)]
    name, options = parse_spec(case.draft)
    if name in _COPIERS:
        findings.append(_repetition(case, greedy))
        if options:
            findings.append(_options(case, name, greedy))
    else:
        findings.append(_tokens_fit())
        findings.append(_unlike(greedy))
    return _report(case, served, rank(findings), speed)


def _other_tokens(error: VocabularyMismatch) -> Finding:
    return Finding(
        cause="vocabulary",
        place="wiring",
        status="refused",
        title="The draft model speaks other tokens than the target",
        evidence=str(error),
        remedy="take a draft model of the target's own family; the same text in other ids is never kept",
        weight=100,
    )


def _tokens_fit() -> Finding:
    return Finding(
        cause="vocabulary",
        place="wiring",
        status="clear",
        title="Tokens of draft model and target",
        evidence="every token of the target is the same token in the draft model; padded rows are never proposed",
    )


def repeats(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, context: int = 2) -> float:
    """Share of the answers' tokens that followed the same ``context`` tokens earlier in their own text."""
    found = total = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text, seen = [*prompt, *answer], set()
        for place in range(context, len(text)):
            gram = tuple(text[place - context : place + 1])
            if place >= len(prompt):
                found, total = found + (gram in seen), total + 1
            seen.add(gram)
    return found / max(total, 1)


def _repetition(case: Case, greedy: LiveRun) -> Finding:
    pooled = greedy.pooled
    tokens = pooled.tokens_per_pass or 1.0
    share = repeats(case.prompts, greedy.answers)
    drafts = 100 * (pooled.draft_rate or 0.0)
    kept = 100 * (pooled.acceptance_rate or 0.0)
    return Finding(
        cause="no_repetition",
        place="traffic",
        status="seen" if tokens < _LITTLE else "clear",
        title="The traffic does not repeat itself",
        evidence=f"{100 * share:.0f} % of the answers' tokens follow two tokens that they followed before; a match was found in "
        f"{drafts:.0f} % of the passes, {kept:.0f} % of its tokens were kept, {tokens:.2f} tokens a pass",
        remedy="train a head on this traffic (outrider train eagle3), preload past answers (suffix:preload=FILE), or leave "
        "speculation out for it",
        weight=50,
    )


def _options(case: Case, name: str, greedy: LiveRun) -> Finding:
    """The same drafter with its default options."""
    case.say(f"decoding the requests with {name}")
    gain = compare(greedy.stats, case.run(make_drafter(name, case.target), case.greedy).stats)
    return Finding(
        cause="options",
        place="wiring",
        status="proved" if gain.is_proved else "clear",
        title=f"The options of {case.draft} keep it from drafting",
        evidence=f"with the defaults ({name}): {gain.to_text()}",
        remedy=f"leave the options out: --draft {name}",
        gain=gain,
    )


def _unlike(greedy: LiveRun) -> Finding:
    pooled = greedy.pooled
    tokens = pooled.tokens_per_pass or 1.0
    return Finding(
        cause="unlike_model",
        place="head",
        status="seen" if tokens < _LITTLE else "clear",
        title="The draft model foresees little of what the target says",
        evidence=f"{100 * (pooled.acceptance_rate or 0.0):.0f} % of its draft tokens are kept, {tokens:.2f} tokens a pass",
        remedy="take a draft model of the target's family and tuning, more layers of a slice, or train a head",
        weight=40,
    )


def _report(case: Case, served: LiveRun | None, findings: tuple[Finding, ...], speed: Speed | None) -> DoctorReport:
    tokens = None if served is None else served.pooled.tokens_per_pass
    found = [finding for finding in findings if finding.is_found]
    now = "it was not run" if tokens is None else f"{tokens:.2f} tokens a pass"
    verdict = f"The loss is in {PLACES[found[0].place]}: {now}." if found else f"Healthy: {now}."
    return DoctorReport(
        subject=case.draft,
        target=case.target.spec.name,
        precision=case.target.placement.precision,
        num_requests=len(case.prompts),
        verdict=verdict,
        findings=findings,
        acceptance={} if served is None else {"served": tokens, "acceptance_rate": served.pooled.acceptance_rate},
        speed={} if speed is None else {name: getattr(speed, name) for name in speed.__slots__},
    )
