"""What a running server's counters say about its drafter: Prometheus text of vLLM, SGLang, llama.cpp or Outrider.

Names differ, definitions too; everything is brought to those of docs/glossary.md. Counters see no weights and no text, so
they tell how much is kept at which depth, and not why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.audit.doctor.report import DoctorReport, Finding, rank
from outrider.drafters.head_folder import HeadInfo
from outrider.errors import DataError

__all__ = ["ServedCounts", "examine_counts", "read_counts"]

_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\d+)?$")
_COUNTER = re.compile(r"^(?:(?P<engine>\w+?)[:_])?spec_decode_(?P<what>num_\w+?)(?:_total)?$")
_POSITION = re.compile(r'position="(\d+)"')
_FEW = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCounts:
    """Pooled counts of a server.

    Attributes:
        engine: whose names they were.
        steps: verify passes with drafts; ``None`` where the server keeps only averages.
        drafted, accepted: draft tokens. kept: kept at each depth.
        accepted_length: bonus included. acceptance_rate: of draft tokens; of a tree's nodes in SGLang.
    """

    engine: str
    accepted_length: float
    acceptance_rate: float | None = None
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    kept: tuple[int, ...] = ()

    @property
    def unconditional(self) -> list[float]:
        """For each depth, kept of all steps."""
        return [kept / self.steps for kept in self.kept] if self.steps else []

    @property
    def conditional(self) -> list[float]:
        """For each depth, kept of the steps that kept everything before."""
        reached = [self.steps or 0, *self.kept][: len(self.kept)]
        return [kept / before if before else 0.0 for kept, before in zip(self.kept, reached, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "engine": self.engine,
            "accepted_length": round(self.accepted_length, 4),
            "acceptance_rate": self.acceptance_rate,
            "steps": self.steps,
            "kept_at_depth": [round(rate, 4) for rate in self.unconditional],
            "kept_of_reached": [round(rate, 4) for rate in self.conditional],
        }


def read_counts(text: str, *, source: str) -> ServedCounts:
    """Read Prometheus text; counts of several models or engines are summed.

    Args:
        text: what the server's ``/metrics`` gives. source: what errors call it.

    Raises:
        DataError: no counters of speculation are in it.
    """
    counts: dict[str, float] = {}
    by_position: dict[int, float] = {}
    gauges: dict[str, float] = {}
    engine = ""
    for line in text.splitlines():
        found = _LINE.match(line.strip())
        if found is None:
            continue
        name, value = found["name"], _number(found["value"])
        counter = _COUNTER.match(name)
        if counter is None:
            gauges[name] = value
            continue
        engine = counter["engine"] or engine
        position = _POSITION.search(found["labels"] or "")
        if counter["what"] == "num_accepted_tokens_per_pos" and position is not None:
            by_position[int(position[1])] = by_position.get(int(position[1]), 0.0) + value
        else:
            counts[counter["what"]] = counts.get(counter["what"], 0.0) + value
    if "num_drafts" in counts:
        return _from_counters(counts, by_position, engine or "a server")
    if "sglang:spec_accept_length" in gauges:
        return _from_gauges(gauges)
    raise DataError(
        f"{source} holds no counters of speculation (spec_decode_num_drafts, sglang:spec_accept_length); is speculation on, "
        "and are statistics?"
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _from_counters(counts: Mapping[str, float], by_position: Mapping[int, float], engine: str) -> ServedCounts:
    steps = round(counts["num_drafts"])
    drafted, accepted = round(counts.get("num_draft_tokens", 0)), round(counts.get("num_accepted_tokens", 0))
    return ServedCounts(
        engine=engine,
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        kept=tuple(round(by_position[position]) for position in sorted(by_position)),
        accepted_length=1 + accepted / steps if steps else 1.0,
        acceptance_rate=accepted / drafted if drafted else None,
    )


def _from_gauges(gauges: Mapping[str, float]) -> ServedCounts:
    """SGLang averages over its last batches; its length includes the bonus token, as here."""
    calls = gauges.get("sglang:spec_verify_calls_total")
    return ServedCounts(
        engine="sglang",
        accepted_length=gauges["sglang:spec_accept_length"],
        acceptance_rate=gauges.get("sglang:spec_accept_rate"),
        steps=None if calls is None else round(calls),
    )


def examine_counts(counts: ServedCounts, info: HeadInfo | None, *, subject: str) -> DoctorReport:
    """What can be said from counters alone, and against a head's card if there is one.

    Args:
        counts: what the server counted. info: of the head that it runs, if that is known. subject: for the report.
    """
    findings = [_nothing_drafted(counts), _first_depth(counts), _later_depths(counts), _too_deep(counts)]
    findings.append(_against_card(counts, info))
    ranked = rank(findings)
    found = [finding for finding in ranked if finding.is_found]
    length = f"accepted length {counts.accepted_length:.2f} (bonus included)"
    verdict = f"{found[0].title}: {length}." if found else f"Nothing stands out: {length}."
    return DoctorReport(
        subject=subject,
        target=counts.engine,
        verdict=f"{verdict} Counters do not show why; examine the head with its target and some requests.",
        findings=ranked,
        acceptance=counts.to_json(),
    )


def _nothing_drafted(counts: ServedCounts) -> Finding:
    is_idle = counts.steps == 0 or counts.drafted == 0
    return Finding(
        cause="idle",
        place="wiring",
        status="seen" if is_idle else "clear",
        title="The server never drafted",
        evidence=f"{counts.steps} steps, {counts.drafted} draft tokens",
        remedy="switch speculation on, send traffic, and read the counters again",
        weight=100,
    )


def _first_depth(counts: ServedCounts) -> Finding:
    base = Finding(
        cause="first_token",
        place="wiring",
        status="not checked",
        title="Hardly any first draft token is kept",
        evidence="the server counts no depths, or fewer than a hundred steps",
        remedy="suspect wiring: layers read, d2t, another tokenizer or checkpoint; outrider doctor --draft HEAD --target MODEL "
        "measures each",
        weight=90,
    )
    if not counts.kept or (counts.steps or 0) < _FEW:
        return base
    first = counts.unconditional[0]
    said = f"{100 * first:.1f} % of the first draft tokens are kept, over {counts.steps} steps"
    return _set(base, is_found=first < 0.15, evidence=said)


def _later_depths(counts: ServedCounts) -> Finding:
    base = Finding(
        cause="later_tokens",
        place="wiring",
        status="not checked",
        title="The first draft token is good, those after it are not",
        evidence="the server counts no depths, or too few steps got there",
        remedy="suspect what the head is fed from its second step on: norm_output, positions, or training with one step only",
        weight=80,
    )
    if len(counts.kept) < 2 or counts.kept[0] < _FEW:
        return base
    first, second = counts.conditional[:2]
    said = f"of those reached, {100 * first:.0f} % are kept at depth 1 and {100 * second:.0f} % at depth 2"
    return _set(base, is_found=first >= 0.3 and second < 0.5 * first, evidence=said)


def _too_deep(counts: ServedCounts) -> Finding:
    base = Finding(
        cause="too_deep",
        place="cost",
        status="not checked",
        title="Drafts are longer than pays",
        evidence="the server counts no depths, or fewer than a hundred steps",
        weight=40,
    )
    if len(counts.kept) < 2 or (counts.steps or 0) < _FEW:
        return base
    rates = counts.unconditional
    useful = sum(rate >= 0.1 for rate in rates)
    said = f"kept at depth 1, 2, ...: {', '.join(f'{100 * rate:.0f} %' for rate in rates)} of all steps"
    advice = f"set the number of draft tokens to {max(useful, 1)} (num_speculative_tokens, -k)"
    return _set(replace(base, remedy=advice), is_found=useful < len(rates), evidence=said)


def _against_card(counts: ServedCounts, info: HeadInfo | None) -> Finding:
    base = Finding(
        cause="card",
        place="wiring",
        status="not checked",
        title="Less is kept than when the head was trained",
        evidence="no head was named, its card holds no depths, or too few steps were counted",
        remedy="outrider doctor --draft HEAD --target MODEL -f REQUESTS names the cause",
        weight=70,
    )
    card = [] if info is None else info.acceptance.get("kept_at_depth", [])
    if not card or not counts.kept or (counts.steps or 0) < _FEW:
        return base
    assert info is not None
    steps, card_steps = counts.steps or 1, max(int(info.acceptance.get("reached", [1])[0]), 1)
    first, trained = counts.unconditional[0], float(card[0])
    noise = (trained * (1 - trained) / card_steps + first * (1 - first) / steps) ** 0.5
    said = (
        f"depth 1: {100 * first:.1f} % here, {100 * trained:.1f} % by the card, {3 * 100 * noise:.1f} % is three sigma"
    )
    return _set(base, is_found=first < trained - 3 * noise - 0.02, evidence=said)


def _set(finding: Finding, *, is_found: bool, evidence: str) -> Finding:
    return replace(finding, status="seen" if is_found else "clear", evidence=evidence)
