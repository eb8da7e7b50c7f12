"""The examination of a trained head: what its folder says, what the engine makes of it, and what other wirings would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.audit.doctor import card as cards
from outrider.audit.doctor.anatomy import Parts, read_parts, recorded_taps
from outrider.audit.doctor.bench import Bench, Mended, Pair, mend
from outrider.audit.doctor.case import Case, cost, renderings, temperature
from outrider.audit.doctor.live import LiveRun, Speed
from outrider.audit.doctor.replay import read_texts
from outrider.audit.doctor.report import PLACES, DoctorReport, Finding, compare, rank
from outrider.audit.doctor.wiring import Wiring, target_ids
from outrider.device import Precision
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.eagle_config import default_taps
from outrider.drafters.head_record import tap_statistics
from outrider.errors import DataError, ModelError, VocabularyMismatch
from outrider.metrics import SpeculationStats

__all__ = ["examine_head"]

_QUANTISED = ("int8", "int4", "int4-g128")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """What the engine made of the head: as served, and at temperature 0 (without drafts, if the head does not load)."""

    drafter: Drafter | None
    refusal: ModelError | None
    served: LiveRun
    greedy: LiveRun


def examine_head(case: Case, folder: Path, window: int | None) -> DoctorReport:
    """Examine the head in this folder.

    Args:
        case: target, requests, settings. window: the drafter's option, if it was given.

    Raises:
        ModelNotFound, WeightsError: no head lies there, or its files cannot be read at all.
        ConfigError: an option of the drafter that is not possible.
        DataError: no answer has two tokens, so there is nothing to draft for.
    """
    parts = read_parts(folder, case.target.spec)
    runs = _run(case)
    if parts.config is None or parts.config.target_hidden_size != case.target.spec.hidden_size:
        return _hopeless(case, parts, runs)
    pairs = _pairs(case, runs.greedy)
    wiring = Wiring(config=parts.config, window=window or parts.config.max_positions)
    live = _layer_statistics(case, pairs)
    bench = _bench(case, parts, wiring, pairs)
    mended = mend(bench, wiring, cards.resembling_layers(parts.info, live), case.say)
    card = cards.Card.of(parts.info, case.num_draft_tokens)
    best = mended.stats or bench.plain()
    is_low = card.is_missed(best)
    speed = case.speed(runs.served)
    findings = [
        *_against_record(parts, mended.findings),
        *_loading(parts, runs, mended),
        cards.tensors(parts, is_low=is_low),
        cards.checkpoint(parts.info, case.target, live, is_low=is_low),
        *cards.template(parts.info, case.target, runs.greedy.texts, is_low=is_low),
        _context(case, parts, pairs, is_low=is_low),
        _answers(parts, mended, runs.greedy, is_low=is_low),
        temperature(case, runs.served, runs.greedy, explains=not is_low and card.is_missed(runs.served.stats)),
        _precision(runs, mended, wiring, bench, best),
        _quantised(case, parts, mended, best),
        *renderings(case, runs.greedy),
        cost(case, speed, runs.served),
    ]
    if not is_low and not any(finding.is_found and finding.cause != "cost" for finding in findings):
        tokens = runs.served.pooled.tokens_per_pass or 1.0
        findings.append(card.weakness(tokens, None if speed is None else speed.speed_up))
    return _report(case, runs, card, best, rank(findings), speed)


def _against_record(parts: Parts, measured: Sequence[Finding]) -> list[Finding]:
    """What was measured of other wirings; layers that are not those of the training's own record need no loss to be wrong."""
    assert parts.config is not None
    recorded, given = recorded_taps(parts.info), parts.config.tap_layers
    is_settled = parts.guessed or not recorded or recorded == given
    if is_settled or any(finding.cause == "tap_layers" and finding.is_found for finding in measured):
        return list(measured)
    gains = "; ".join(finding.evidence for finding in measured if finding.cause == "tap_layers")
    contradiction = Finding(
        cause="tap_layers",
        place="wiring",
        status="seen",
        title="The head reads other layers than its record of the training names",
        evidence=f"it reads the hidden states before layers {list(given)}, the record has {list(recorded)}; {gains}",
        remedy=f"set head.tap_layers to {list(recorded)} (index i is the state before layer i)",
        weight=88,
    )
    return [contradiction, *(finding for finding in measured if finding.cause != "tap_layers")]


def _run(case: Case) -> _Runs:
    refusal: ModelError | None = None
    drafter: Drafter | None = None
    try:
        drafter = case.drafter()
    except ModelError as error:
        refusal = error
    case.say("decoding the requests")
    greedy = case.run(drafter, case.greedy)
    if not case.params.temperature or refusal is not None:
        return _Runs(drafter=drafter, refusal=refusal, served=greedy, greedy=greedy)
    case.say(f"decoding the requests at temperature {case.params.temperature:g}")
    return _Runs(drafter=drafter, refusal=None, served=case.run(case.drafter(), case.params), greedy=greedy)


def _pairs(case: Case, greedy: LiveRun) -> list[Pair]:
    both = zip(case.prompts, greedy.answers, strict=True)
    pairs: list[Pair] = [(prompt, answer) for prompt, answer in both if len(answer) > 1]
    if not pairs:
        raise DataError("every answer has one token, so nothing is ever drafted; give other requests, or more tokens")
    return pairs


def _layer_statistics(case: Case, pairs: Sequence[Pair]) -> dict[int, dict[str, Any]]:
    """Of every layer, over a few texts."""
    import torch

    layers = range(case.target.spec.num_layers + 1)
    texts = read_texts(case.target, pairs[:4], layers)
    return {layer: tap_statistics(torch.cat([text.taps[layer] for text in texts])) for layer in layers}


def _bench(case: Case, parts: Parts, wiring: Wiring, pairs: Sequence[Pair]) -> Bench:
    near = {*wiring.config.tap_layers, *default_taps(case.target.spec.num_layers)}
    return Bench(
        parts,
        case.target,
        case.target.checkpoint.tensor("model.embed_tokens.weight"),
        pairs,
        num_draft_tokens=case.num_draft_tokens,
        layers=[layer + shift for layer in near for shift in (-1, 0, 1)],
    )


def _hopeless(case: Case, parts: Parts, runs: _Runs) -> DoctorReport:
    """A head whose shape is no head, or fits no wiring of this target."""
    findings = [_refused(parts, runs, "shape")]
    if parts.config is not None:
        findings.append(cards.tensors(parts, is_low=True))
        findings.append(cards.checkpoint(parts.info, case.target, {}, is_low=True))
    card = cards.Card.of(parts.info, case.num_draft_tokens)
    return _report(case, runs, card, list(runs.served.stats), rank(findings), None)


def _refused(parts: Parts, runs: _Runs, cause: str) -> Finding:
    said = str(runs.refusal) if runs.refusal is not None else f"{parts.folder}: the head does not fit this target"
    return Finding(
        cause=cause,
        place="wiring",
        status="refused",
        title="The head does not load",
        evidence=said,
        remedy="mend what the evidence names, or convert or train the head again",
        weight=80,
    )


def _loading(parts: Parts, runs: _Runs, mended: Mended) -> list[Finding]:
    """Why the head does not load, unless the tensors say it; and what its two files disagree on."""
    findings = []
    if parts.guessed:
        fit = list(mended.wiring.config.tap_layers)
        findings.append(
            Finding(
                cause="tap_layers",
                place="wiring",
                status="refused",
                title="The head does not say which layers it reads",
                evidence=f"{runs.refusal}; guessed: {parts.guessed['tap_layers']}",
                remedy=f"set head.tap_layers to {fit}, which fitted best here",
                weight=88,
            )
        )
    elif runs.refusal is not None and not parts.missing and not parts.broken:
        cause = (
            "vocabulary"
            if isinstance(runs.refusal, VocabularyMismatch)
            else "d2t"
            if "d2t" in str(runs.refusal)
            else "files"
        )
        findings.append(_refused(parts, runs, cause))
    return findings


def _context(case: Case, parts: Parts, pairs: Sequence[Pair], *, is_low: bool) -> Finding:
    assert parts.config is not None
    trained = parts.config.max_positions
    starts = [start for prompt, answer in pairs for start in range(len(prompt) + 1, len(prompt) + len(answer))]
    share = sum(start > trained for start in starts) / max(len(starts), 1)
    return Finding(
        cause="context",
        place="traffic",
        status="clear" if share < 0.2 else "seen" if is_low else "noted",
        title="Texts are longer than those that the head was trained on",
        evidence=f"{100 * share:.0f} % of the drafts begin past {trained} tokens, the longest training text",
        remedy="train on texts of this length (--max-length)",
        weight=60,
    )


def _answers(parts: Parts, mended: Mended, greedy: LiveRun, *, is_low: bool) -> Finding:
    ids = target_ids(parts, mended.wiring.vocabulary)
    return cards.answers(parts.info, greedy.answers, greedy.texts, ids, is_low=is_low)


def _precision(runs: _Runs, mended: Mended, wiring: Wiring, bench: Bench, best: Sequence[SpeculationStats]) -> Finding:
    """Does the head's own precision cost acceptance? Only where it is served in the wiring that was measured."""
    drafter = runs.drafter
    is_chain = isinstance(drafter, EagleDrafter) and drafter.tree is None and not drafter.min_prob
    path = drafter.path if isinstance(drafter, EagleDrafter) else "not a head alone"
    base = Finding(
        cause="head_precision",
        place="wiring",
        status="not checked",
        title=f"The head's precision ({path}) costs acceptance",
        evidence="the head is served in another wiring than was measured, or not as a chain",
        remedy="serve the head in a higher precision (HEAD:dtype=bfloat16, HEAD:dtype=float32)",
    )
    if not is_chain or mended.wiring != wiring:
        return base
    served = [stats for stats, answer in zip(runs.greedy.stats, runs.greedy.answers, strict=True) if len(answer) > 1]
    gain = compare(served, best)
    return replace(
        base, status="proved" if gain.is_proved else "clear", evidence=f"in float32: {gain.to_text()}", gain=gain
    )


def _quantised(case: Case, parts: Parts, mended: Mended, best: Sequence[SpeculationStats]) -> Finding:
    """Does the target's precision cost acceptance? Then the same head does better on the same target unquantised."""
    here = case.target.placement.precision
    trained = str(parts.info.acceptance.get("target_precision", "")).removeprefix("torch.")
    base = Finding(
        cause="quantised_target",
        place="wiring",
        status="clear",
        title=f"The target runs in {here}, the head was trained on hidden states of another precision",
        evidence=f"the target runs in {here}, at training in {trained or 'an unknown precision'}",
        remedy="train the head on the target in the precision that is served, or serve the target in that of the training",
    )
    if here not in _QUANTISED or here == trained:
        return base
    case.say("decoding the requests with the target unquantised")
    full: Precision = "float32" if trained == "float32" else "bfloat16"
    target = case.target.requantized(full)
    answers = case.run(None, case.greedy, target=target).answers
    pairs = [(prompt, answer) for prompt, answer in zip(case.prompts, answers, strict=True)]
    kept = [index for index, (_, answer) in enumerate(pairs) if len(answer) > 1]
    table_VD = case.target.checkpoint.tensor("model.embed_tokens.weight")
    other = Bench(parts, target, table_VD, [pairs[i] for i in kept], num_draft_tokens=case.num_draft_tokens)
    after = other.score(mended.wiring) if kept else None
    if after is None or len(after) != len(best):
        return replace(
            base, status="not checked", evidence=f"{base.evidence}; the answers in {full} cannot be compared"
        )
    gain = compare(best, after)
    said = f"{base.evidence}; in {full}: {gain.to_text()}"
    return replace(base, status="proved" if gain.is_proved else "clear", evidence=said, gain=gain)


def _report(
    case: Case,
    runs: _Runs,
    card: cards.Card,
    best: Sequence[SpeculationStats],
    findings: tuple[Finding, ...],
    speed: Speed | None,
) -> DoctorReport:
    served, mended = runs.served.pooled, SpeculationStats.pooled(best)
    steps = max(served.steps, 1)
    acceptance = {
        "served": served.tokens_per_pass or 1.0,
        "kept_at_depth": [round(kept / steps, 4) for kept in served.kept],
        "mended": mended.tokens_per_pass or 1.0,
        "card": card.tokens,
    }
    return DoctorReport(
        subject=case.draft,
        target=case.target.spec.name,
        precision=case.target.placement.precision,
        num_requests=len(case.prompts),
        verdict=_verdict(findings, acceptance, is_low=card.is_missed(best)),
        findings=findings,
        acceptance=acceptance,
        speed={} if speed is None else {name: getattr(speed, name) for name in speed.__slots__},
    )


def _verdict(findings: Sequence[Finding], acceptance: dict[str, Any], *, is_low: bool) -> str:
    card = "no card" if acceptance["card"] is None else f"card {acceptance['card']:.2f}"
    now = f"{acceptance['served']:.2f} tokens a pass, {card}"
    found = [finding for finding in findings if finding.is_found]
    if not found:
        return f"Less is kept than the card says, and no cause was found: {now}." if is_low else f"Healthy: {now}."
    first = found[0]
    proved = [finding for finding in found if finding.status == "proved" and finding.place == "wiring"]
    if proved and first.place == "wiring":
        return f"The loss is in {PLACES['wiring']}: {now}; mended {acceptance['mended']:.2f}."
    return f"The loss is in {PLACES[first.place]}: {now}."
