"""Pieces of the HTML report. Every word that comes from outside goes through :func:`text`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from outrider.measure.forecast import Judgement
from outrider.measure.record import MeasureResult, Sample
from outrider.measure.report import ALL, GroupRow, Summary
from outrider.measure.stats import Interval

__all__ = [
    "arms_table",
    "flat",
    "group_tables",
    "judgement_class",
    "number",
    "percent",
    "position_table",
    "sample",
    "settings_table",
    "skipped_table",
    "text",
    "with_ends",
]

_CLASSES = {Judgement.PAYS: "pays", Judgement.LOSES: "loses", Judgement.UNSURE: "unsure"}
_SIGNS = {Judgement.PAYS: "▲", Judgement.LOSES: "▼", Judgement.UNSURE: "?"}
_WORDS = ("arm", "rate")  # columns to the left; numbers stand to the right
_MOST_LINES = 12
_MOST_CHARACTERS = 6000


def text(value: object) -> str:
    """Words as HTML, whatever they hold."""
    return html.escape(str(value), quote=True)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number, or ``n/a``."""
    return "n/a" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    """A rate in percent, or ``n/a``."""
    return "n/a" if value is None else f"{100 * value:.0f} %"


def with_ends(interval: Interval, unit: str = "") -> str:
    """A rate with its interval in small print."""
    ends = "" if interval.low is None else f" <small>{interval.low:.2f}–{interval.high:.2f}</small>"
    return f"{number(interval.value, unit=unit)}{ends}"


def judgement_class(judgement: Judgement | None) -> str:
    """The style sheet's class of a judgement."""
    return "unsure" if judgement is None else _CLASSES[judgement]


def _tag(row: GroupRow) -> str:
    if row.forecast is None:
        return '<span class="tag unsure">no verdict</span>'
    judgement = row.forecast.judgement
    return f'<span class="tag {judgement_class(judgement)}">{_SIGNS[judgement]} {text(judgement)}</span>'


def _table(columns: Sequence[str], rows: Iterable[str], label: str) -> str:
    """A table that scrolls sideways on narrow screens, by keyboard, too."""
    heads = "".join(
        f'<th scope="col"{" class=words" if column in _WORDS else ""}>{text(column)}</th>' for column in columns
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


_ARM_COLUMNS = (
    "arm",
    "verdict",
    "forecast speed-up",
    "tokens a pass",
    "to break even",
    "ceiling",
    "accepted length",
    "to break even",
    "acceptance",
    "drafting",
    "requests",
)


def arms_table(summary: Summary) -> str:
    """Every arm on all requests that may be judged by, the best of each drafter marked."""
    best = {row.arm for row in summary.best_of_each_drafter()}
    return _table(_ARM_COLUMNS, (_arm_row(row, row.arm in best) for row in summary.overall()), "all arms")


def _arm_row(row: GroupRow, is_best: bool) -> str:
    rates, found = row.rates, row.forecast
    cells = [
        _tag(row),
        "n/a" if found is None else with_ends(found.speedup, "x"),
        with_ends(rates.tokens_per_pass),
        number(None if found is None else found.pass_cost),
        number(None if found is None else found.ceiling, unit="x"),
        number(rates.accepted_length.value),
        number(None if found is None else found.break_even_length),
        percent(rates.acceptance_rate.value),
        percent(rates.draft_rate.value),
        _size(row),
    ]
    name = row.arm.title if row.field == ALL else f"{row.arm.title} ({row.value})"
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr{" class=best" if is_best else ""}><th scope="row">{text(name)}</th>{body}</tr>'


def _size(row: GroupRow) -> str:
    return f"{row.num_requests} <small>small</small>" if row.is_small else str(row.num_requests)


def position_table(summary: Summary) -> str:
    """Both rates at each position, for the best arm of each drafter."""
    rows = [row for row in summary.best_of_each_drafter() if row.rates.conditional]
    if not rows:
        return ""
    depth = max(len(row.rates.conditional) for row in rows)
    lines = [line for row in rows for line in _position_rows(row, depth)]
    table = _table(("arm", "rate", *map(str, range(1, depth + 1))), lines, "by position in the draft")
    return f"<details><summary>By position in the draft</summary>{table}</details>"


def _position_rows(row: GroupRow, depth: int) -> Iterator[str]:
    for name, rates in (("of all steps", row.rates.unconditional), ("of those reached", row.rates.conditional)):
        cells = [with_ends(rate) for rate in rates] + [""] * (depth - len(rates))
        body = "".join(f"<td>{cell}</td>" for cell in cells)
        yield f'<tr><th scope="row">{text(row.arm.title)}</th><td class="words">kept {name}</td>{body}</tr>'


def group_tables(summary: Summary) -> Iterator[str]:
    """One folded table a field, with the best arm of each drafter."""
    arms = [row.arm for row in summary.best_of_each_drafter()]
    for field in (*summary.fields, *(("not judged",) if summary.of("not judged") else ())):
        rows = [row for row in summary.of(field) if row.arm in arms]
        columns = (
            field,
            "arm",
            "verdict",
            "forecast speed-up",
            "tokens a pass",
            "accepted length",
            "requests",
            "to decide",
        )
        table = _table(columns, map(_group_row, rows), f"by {field}")
        yield f"<details><summary>By {text(field)} ({len({row.value for row in rows})} groups)</summary>{table}</details>"


def _group_row(row: GroupRow) -> str:
    more = row.more_to_decide
    cells = [
        f'<td class="words">{text(row.arm.title)}</td>',
        f"<td>{_tag(row)}</td>",
        f"<td>{'n/a' if row.forecast is None else with_ends(row.forecast.speedup, 'x')}</td>",
        f"<td>{with_ends(row.rates.tokens_per_pass)}</td>",
        f"<td>{number(row.rates.accepted_length.value)}</td>",
        f"<td>{_size(row)}</td>",
        f"<td>{f'<small>{more} more</small>' if more else ''}</td>",
    ]
    return f'<tr><th scope="row">{text(row.value)}</th>{"".join(cells)}</tr>'


def sample(given: Sample) -> str:
    """One answer with the fate of every draft token: kept, refused, and what the target said instead."""
    parts: list[str] = []
    before, left = "", _MOST_CHARACTERS
    for piece in given.pieces:
        shown = piece.text[:left]
        left -= len(shown)
        parts.append(_piece(shown, piece.kind, before))
        before = piece.kind
        if left <= 0:
            parts.append("<small> … the rest is left out</small>")
            break
    name = f"{text(given.id)} <small>{text(given.arm.title)}</small>"
    return f'<article class="card sample"><h3>{name}</h3><pre>{"".join(parts)}</pre></article>'


def _piece(words: str, kind: str, before: str) -> str:
    if kind == "refused":
        return f'<del class="r">{text(words.replace(chr(10), "↵"))}</del>'
    if kind == "kept":
        return f'<span class="k">{text(words)}</span>'
    return f'<b class="c">{text(words)}</b>' if before == "refused" else text(words)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, value)."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == {} else str(value)


def settings_table(result: MeasureResult) -> str:
    """Everything that the measurement was made with."""
    rows = [*flat(result.settings), *_times(result)]
    body = (f'<tr><th scope="row"><code>{text(name)}</code></th><td>{text(value)}</td></tr>' for name, value in rows)
    return f'<div class="plain">{_table(("setting", "value"), body, "settings")}</div>'


def _times(result: MeasureResult) -> Iterator[tuple[str, str]]:
    costs = result.costs
    if costs is None or not costs.rows:
        yield "pass times", "not measured"
        return
    passes = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in zip(costs.rows, costs.pass_ms, strict=True))
    yield f"milliseconds of a pass by rows, {costs.num_cached} tokens cached", passes
    for name, ms in costs.draft_ms.items():
        yield f"milliseconds of drafting a step: {name}", f"{ms:.2f}"


def skipped_table(result: MeasureResult) -> str:
    """Lines that were not measured, by reason, with their numbers."""
    rows = []
    for reason, lines in result.skipped_by_reason().items():
        shown = ", ".join(map(str, lines[:_MOST_LINES]))
        more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
        cells = f"<td>{len(lines)}</td><td>{shown}{more}</td>"
        rows.append(f'<tr><th scope="row">{text(reason)}</th>{cells}</tr>')
    return f'<div class="plain">{_table(("reason", "number", "lines of the file"), rows, "skipped lines")}</div>'
