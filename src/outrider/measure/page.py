"""The report as one HTML file: no script, no network, readable on a telephone, in light and dark, and on paper.

The page states the verdict first, then what it rests on. Its security policy forbids every request and script, so words
from the traffic cannot do harm even if one escaped its escaping.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from outrider import __version__
from outrider.errors import MissingExtra
from outrider.files import replace_file
from outrider.measure.charts import Figure, figures
from outrider.measure.page_parts import (
    arms_table,
    group_tables,
    judgement_class,
    number,
    position_table,
    sample,
    settings_table,
    skipped_table,
    text,
)
from outrider.measure.profile import last_parts
from outrider.measure.record import MeasureResult
from outrider.measure.report import GroupRow, Summary
from outrider.measure.stats import Interval

__all__ = ["page_html", "write_page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_page(result: MeasureResult, summary: Summary, path: Path) -> str:
    """Write the report.

    Returns:
        why the plots are not in it; empty if they are.
    """
    note = ""
    drawn: tuple[Figure, ...] = ()
    try:
        drawn = figures(summary)
    except MissingExtra as error:
        note = str(error)
    html = page_html(result, summary, drawn, note)
    replace_file(path, lambda partial: partial.write_text(html, encoding="utf-8", errors="backslashreplace"))
    return note


def page_html(result: MeasureResult, summary: Summary, drawn: tuple[Figure, ...], note: str = "") -> str:
    """The page.

    Args:
        result, summary: what was measured, and what it comes to.
        drawn: plots to show; note: why there are none.
    """
    style = resources.files("outrider.measure").joinpath("page.css").read_text(encoding="utf-8")
    body = "\n".join(part for part in _body(result, summary, drawn, note) if part)
    title = f"Does speculation pay? {_target(result)}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _target(result: MeasureResult) -> str:
    return str(result.settings.get("target", ""))


def _body(result: MeasureResult, summary: Summary, drawn: tuple[Figure, ...], note: str) -> Iterator[str]:
    yield _header(result)
    yield _verdict(summary)
    yield _facts(result, summary)
    yield _warnings(summary)
    yield _arms(summary)
    yield _plots(drawn, note)
    yield _groups(summary)
    yield _samples(result)
    yield _provenance(result, summary)
    yield (
        f"<footer>Written by Outrider {text(__version__)}. Counts are summed over requests and divided last; intervals hold "
        "95 % of the rates that resampled traffic gives.</footer>"
    )


def _header(result: MeasureResult) -> str:
    names = ("traffic", "target", "precision", "device", "path")
    known = [f"{name} {last_parts(given)}" for name in names if isinstance(given := result.settings.get(name), str)]
    measured = len({record.line for record in result.records})
    parts = [*known, f"{measured} of {result.num_rows} lines measured"]
    return f"<header><h1>Does speculation pay on this traffic?</h1><p>{text(' · '.join(parts))}</p></header>"


def _verdict(summary: Summary) -> str:
    found = summary.recommendation
    lines = [f"<p><strong>{text(found.text)}</strong></p>"]
    if found.arm is not None:
        other = found.other_half_chooses
        same = "would choose the same" if other == found.arm else f"would choose {other.name if other else 'nothing'}"
        lines.append(
            f'<p class="small">Chosen on {found.num_lines_chosen} requests, judged on {found.num_lines_judged} others, '
            f"so that luck in the choice is not counted as gain. The other half {text(same)}.</p>"
        )
    return f'<section class="card verdict {judgement_class(found.judgement)}">{"".join(lines)}</section>'


def _facts(result: MeasureResult, summary: Summary) -> str:
    best = max(summary.best_of_each_drafter(), key=_merit, default=None)
    if best is None:
        return ""
    facts = [("tokens a pass, best arm", number(best.rates.tokens_per_pass.value), best.arm.title)]
    if best.forecast is not None:
        found = best.forecast
        facts.append(("forecast speed-up", number(found.speedup.value, unit="x"), _ends(found.speedup)))
        facts.append(("tokens a pass to break even", number(found.pass_cost), f"ceiling {found.ceiling:.2f}x"))
    more = best.more_to_halve
    halve = "too few for an interval" if more is None else f"{more} more would halve the interval"
    facts.append(("requests", str(best.num_requests), halve))
    facts.append(("lines skipped", str(len({row.line for row in result.skipped})), f"of {result.num_rows}"))
    cells = (
        f'<div class="card"><dt>{text(name)}</dt><dd>{text(value)}<small>{text(small)}</small></dd></div>'
        for name, value, small in facts
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _merit(row: GroupRow) -> float:
    found = row.rates.tokens_per_pass if row.forecast is None else row.forecast.speedup
    return found.value or 0.0


def _ends(interval: Interval) -> str:
    return "no interval" if interval.low is None else f"95 %: {interval.low:.2f} to {interval.high:.2f}"


def _warnings(summary: Summary) -> str:
    if not summary.warnings:
        return ""
    items = "".join(f"<li>{text(warning)}</li>" for warning in summary.warnings)
    return f'<section class="card warnings"><h3>Before you trust these numbers</h3><ul>{items}</ul></section>'


def _arms(summary: Summary) -> str:
    return (
        '<h2>All arms</h2><p class="note">Small figures are 95 % intervals over requests. The best arm of each drafter is '
        "shaded. An arm pays if the whole interval of its speed-up lies above 1, and does not pay if it lies below; "
        "the ceiling is the speed-up if every draft token were kept. Drafting is the share of passes that carry drafts.</p>"
        + arms_table(summary)
        + position_table(summary)
    )


def _plots(drawn: tuple[Figure, ...], note: str) -> str:
    if note:
        return f'<h2>Plots</h2><p class="note">{text(note)}. Every number of theirs stands in the tables.</p>'
    if not drawn:
        return ""
    figures_html = "".join(
        f'<figure class="card"><h3>{text(each.title)}</h3><div class="plot" role="img" aria-label="{text(each.title)}; '
        f'the numbers stand in the tables">{each.svg}</div><figcaption>{text(each.caption)}</figcaption></figure>'
        for each in drawn
    )
    return f'<h2>Plots</h2><div class="plots">{figures_html}</div>'


def _groups(summary: Summary) -> str:
    tables = "".join(group_tables(summary))
    if not tables and not summary.unsplit:
        return ""
    unsplit = "; ".join(f"{name} ({why})" for name, why in summary.unsplit.items())
    note = f" Not split by {unsplit}: too many values for groups." if unsplit else ""
    return (
        '<h2>By groups of requests</h2><p class="note">The best arm of each drafter. Of many groups one in twenty lies '
        f"outside its interval by chance alone.{text(note)}</p>{tables}"
    )


def _samples(result: MeasureResult) -> str:
    shown = [each for each in result.samples if each.pieces]
    if not shown:
        return "" if not result.samples else "<h2>Samples</h2><p>Texts were left out, as asked.</p>"
    legend = (
        '<ul class="legend"><li><span class="k">kept draft tokens</span></li><li><del class="r">refused draft tokens</del>'
        '</li><li><b class="c">what the target said instead</b></li><li>the target\'s own tokens</li></ul>'
    )
    return f'<h2>Samples</h2>{legend}<div class="plots">{"".join(map(sample, shown))}</div>'


def _provenance(result: MeasureResult, summary: Summary) -> str:
    skipped = (
        f"<h2>Lines that were not measured</h2>{skipped_table(result)}"
        if result.skipped
        else "<h2>Lines that were not measured</h2><p>None: every line was measured.</p>"
    )
    return f"{skipped}<h2>Settings and provenance</h2>{settings_table(result)}"
