"""Plots of a measurement as SVG, drawn once when the report is written.

Vega-Lite specifications are compiled by vl-convert, which is only imported here (extra ``report``). Colours stand in the
SVG as those of a light page; the page's style sheet exchanges them by attribute for a dark one, so one drawing serves
both. Every series has a colour and a shape of its own, since colours alone do not reach everybody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import MissingExtra
from outrider.measure.forecast import depth_of
from outrider.measure.record import Arm, short_names
from outrider.measure.report import GroupRow, Summary
from outrider.measure.stats import Interval

__all__ = ["INK", "MUTED", "PALETTE", "RULE", "Figure", "figures", "series_names"]

PALETTE = ("#0b62a8", "#b84a00", "#00704f", "#84358f", "#7a5c00", "#a3123f", "#006b7d", "#4a5565")
"""Colours of series on a light page, each at least 4.5 to 1 against it."""
INK, MUTED, RULE, LOSS = "#1d2431", "#5b6473", "#d9dde4", "#fbeae4"
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left", "triangle-right")

_WIDTH, _HEIGHT = 390, 215
_MOST_GROUPS, _MOST_BARS, _MOST_FIELDS = 14, 3, 6
_DODGE = 0.07  # of one draft token, between series at the same place


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One plot: what it shows, how to read it, and the drawing."""

    title: str
    caption: str
    svg: str


def series_names(arms: Sequence[Arm]) -> dict[Arm, str]:
    """What to call an arm's series: its drafter without options that nothing else needs, with the temperature where there
    are several."""
    names = short_names(dict.fromkeys(arm.drafter for arm in arms))
    bare = {drafter: re.sub(r":[a-z_]+=.*", "", name) for drafter, name in names.items()}
    shared = {name for name in bare.values() if list(bare.values()).count(name) > 1}
    names = {drafter: names[drafter] if name in shared else name for drafter, name in bare.items()}
    several = len({arm.temperature for arm in arms}) > 1
    return {arm: f"{names[arm.drafter]}, T {arm.temperature:g}" if several else names[arm.drafter] for arm in arms}


def figures(summary: Summary) -> tuple[Figure, ...]:
    """All plots that the measurement has data for.

    Raises:
        MissingExtra: vl-convert is not installed.
    """
    _converter()
    rows = summary.overall()
    names = series_names([row.arm for row in rows])
    series = tuple(dict.fromkeys(names[row.arm] for row in rows))
    found = [
        _against_k(rows, names, series),
        _speedup_against_k(rows, names, series),
        *_by_position(summary.best_of_each_drafter(), names, series),
        *_by_groups(summary, names, series),
    ]
    return tuple(figure for figure in found if figure is not None)


def _converter() -> Any:
    try:
        import vl_convert
    except ImportError:
        raise MissingExtra(
            "plots need vl-convert-python, which is not installed; install the extra: pip install 'outrider[report]'"
        ) from None
    return vl_convert


# --- the plots


def _against_k(rows: Sequence[GroupRow], names: dict[Arm, str], series: Sequence[str]) -> Figure | None:
    data = _points([(row, row.rates.tokens_per_pass) for row in rows if row.counts.steps], names, series)
    if not data:
        return None
    return Figure(
        title="Tokens a pass by draft tokens",
        caption="Tokens that a pass of the target commits on average; plain decoding is exactly 1. Bars are 95 % intervals "
        "over requests; single marks are trees, at their depth.",
        svg=_draw(_lines(data, series, "tokens a pass", "plain decoding"), series),
    )


def _speedup_against_k(rows: Sequence[GroupRow], names: dict[Arm, str], series: Sequence[str]) -> Figure | None:
    pairs = [(row, row.forecast.speedup) for row in rows if row.forecast is not None and row.counts.steps]
    data = _points(pairs, names, series)
    if not data:
        return None
    return Figure(
        title="Forecast speed-up by draft tokens",
        caption="Expected speed over plain decoding, from the pass and draft times of this machine, one request at a "
        "time. In the shaded region below 1 drafting makes decoding slower.",
        svg=_draw(_lines(data, series, "speed-up", "break-even"), series),
    )


def _points(
    rows: Sequence[tuple[GroupRow, Interval]], names: dict[Arm, str], series: Sequence[str]
) -> list[dict[str, Any]]:
    """One mark an arm; series stand beside each other, so that their bars do not hide one another."""
    middle = (len(series) - 1) / 2
    data = []
    for row, interval in rows:
        if interval.value is not None:
            k = depth_of(row.arm)
            beside = k + _DODGE * (series.index(names[row.arm]) - middle)
            data.append({"x": beside, "k": k, **_ends(interval), "series": names[row.arm], "tree": row.arm.is_tree})
    return data


def _ends(interval: Interval) -> dict[str, float]:
    """Height and ends of a mark; one without an interval has a bar of no length."""
    value = interval.value or 0.0
    low, high = interval.low, interval.high
    return {"y": value, "low": value if low is None else low, "high": value if high is None else high}


def _lines(data: list[dict[str, Any]], series: Sequence[str], title: str, bound: str) -> dict[str, Any]:
    """Lines over chains, marks for everything, bars for intervals, and a broken line at 1."""
    ks = sorted({row["k"] for row in data})
    x = {
        "field": "x",
        "type": "quantitative",
        "title": "draft tokens a step (k)",
        "scale": {"domain": [ks[0] - 0.4, ks[-1] + 0.4], "nice": False},
        "axis": {"values": ks, "format": "d", "grid": False, "labelOverlap": False},
    }
    scale = {"zero": False, "nice": False, "domain": _span(data)}
    y = {"field": "y", "type": "quantitative", "title": title, "scale": scale, "axis": {"grid": True}}
    color = _color(series)
    return {
        "data": {"values": data},
        "layer": [
            *_bound_at_1(bound, _span(data)),
            {
                "transform": [{"filter": "!datum.tree"}],
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": {"x": x, "y": y, "color": color},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": color, "shape": _shape(series)},
            },
        ],
    }


def _span(data: Sequence[dict[str, Any]]) -> list[float]:
    """Ends of an axis that shows all intervals and always 1."""
    low, high = min(1.0, *(row["low"] for row in data)), max(1.0, *(row["high"] for row in data))
    room = 0.07 * max(high - low, 0.2)
    return [low - room, high + room]


def _bound_at_1(label: str, span: Sequence[float]) -> list[dict[str, Any]]:
    """The line of plain decoding; what lies below it is shaded."""
    return [
        {
            "data": {"values": [{}]},
            "mark": {"type": "rect", "color": LOSS, "opacity": 1},
            "encoding": {"y": {"datum": span[0], "type": "quantitative"}, "y2": {"datum": 1.0}},
        },
        {
            "data": {"values": [{}]},
            "mark": {"type": "rule", "color": INK, "strokeDash": [5, 4]},
            "encoding": {"y": {"datum": 1.0, "type": "quantitative"}},
        },
        {
            "data": {"values": [{}]},
            "mark": {"type": "text", "text": label, "align": "right", "baseline": "bottom", "dy": -3, "color": INK},
            "encoding": {"y": {"datum": 1.0, "type": "quantitative"}, "x": {"value": {"expr": "width - 4"}}},
        },
    ]


def _by_position(rows: Sequence[GroupRow], names: dict[Arm, str], series: Sequence[str]) -> list[Figure | None]:
    """Both rates by depth, for the best arm of each drafter."""
    return [
        _positions(
            [(names[row.arm], row.rates.unconditional) for row in rows],
            series,
            "Kept at each position",
            "kept of all steps",
            "Share of steps that kept the draft token at this position and all before it (unconditional; what vLLM and "
            "llama.cpp print).",
        ),
        _positions(
            [(names[row.arm], row.rates.conditional) for row in rows],
            series,
            "Kept where reached",
            "kept of those reached",
            "Share of draft tokens kept at this position once all before it were (conditional). A curve that stays level "
            "would profit from longer drafts.",
        ),
    ]


def _positions(
    rows: Sequence[tuple[str, Sequence[Interval]]], series: Sequence[str], title: str, axis: str, caption: str
) -> Figure | None:
    middle = (len(series) - 1) / 2
    data: list[dict[str, Any]] = [
        {
            "x": depth + _DODGE * (series.index(name) - middle),
            "k": depth,
            **_ends(each),
            "series": name,
        }
        for name, intervals in rows
        for depth, each in enumerate(intervals, start=1)
        if each.value is not None
    ]
    if not data:
        return None
    ks = sorted({row["k"] for row in data})
    x = {
        "field": "x",
        "type": "quantitative",
        "title": "position in the draft",
        "scale": {"domain": [0.6, ks[-1] + 0.4], "nice": False},
        "axis": {"values": ks, "format": "d", "grid": False, "labelOverlap": False},
    }
    scale = {"domain": [0, 1]}
    y = {"field": "y", "type": "quantitative", "title": axis, "scale": scale, "axis": {"format": "%", "tickCount": 5}}
    color = _color(series)
    spec = {
        "data": {"values": data},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"x": x, "y": y, "color": color}},
            {
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": color, "shape": _shape(series)},
            },
        ],
    }
    return Figure(title=title, caption=caption, svg=_draw(spec, series))


def _by_groups(summary: Summary, names: dict[Arm, str], series: Sequence[str]) -> list[Figure | None]:
    """For each field the best arms side by side, as bars from 1: gains to the right, losses to the left."""
    ranked = sorted(summary.best_of_each_drafter(), key=_merit, reverse=True)
    arms = [row.arm for row in ranked[:_MOST_BARS]]
    return [
        _groups(field, [row for row in summary.of(field) if row.arm in arms], names, series)
        for field in summary.fields[:_MOST_FIELDS]
    ]


def _merit(row: GroupRow) -> float:
    return _gain(row)[0].value or 0.0


def _gain(row: GroupRow) -> tuple[Interval, str]:
    """What the bars show: the forecast, or tokens a pass where there is none."""
    return (row.rates.tokens_per_pass, "tokens a pass") if row.forecast is None else (row.forecast.speedup, "speed-up")


def _groups(field: str, rows: Sequence[GroupRow], names: dict[Arm, str], series: Sequence[str]) -> Figure | None:
    biggest = sorted({(row.value, -row.num_requests) for row in rows}, key=lambda pair: pair[1])
    shown = list(dict.fromkeys(value for value, _ in biggest))[:_MOST_GROUPS]
    kept = [row for row in rows if row.value in shown and _gain(row)[0].value is not None]
    if not kept:
        return None
    data = [_bar(row, names) for row in kept]
    used = [name for name in series if any(row["series"] == name for row in data)]
    more = len({row.value for row in rows}) - len(shown)
    beyond = f" The {more} smallest groups are left out." if more else ""
    return Figure(
        title=f"By {field}",
        caption=f"{_gain(kept[0])[1].capitalize()} of the best arm of each drafter, as bars from 1: to the left drafting "
        f"loses. n is the number of requests; groups below 30 are small, and their intervals wide.{beyond}",
        svg=_draw(_bars(data, field, _gain(kept[0])[1], used, series), used),
    )


def _bar(row: GroupRow, names: dict[Arm, str]) -> dict[str, Any]:
    return {"group": f"{_cut(row.value)} (n={row.num_requests})", **_ends(_gain(row)[0]), "series": names[row.arm]}


def _cut(text: str, most: int = 24) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _bars(
    data: list[dict[str, Any]], field: str, title: str, used: Sequence[str], series: Sequence[str]
) -> dict[str, Any]:
    groups = list(dict.fromkeys(row["group"] for row in data))
    y = {"field": "group", "type": "nominal", "title": None, "sort": groups, "axis": {"labelLimit": 190}}
    offset = {"yOffset": {"field": "series", "sort": list(used)}}
    span = _span(data)
    x = {"field": "y", "type": "quantitative", "title": title, "scale": {"domain": span, "zero": False}}
    color = {**_color(used), "scale": {"domain": list(used), "range": [_hue(series, name) for name in used]}}
    color["legend"] = {"labelLimit": 180}  # it begins behind the groups' names
    return {
        "height": {"step": 15 if len(used) > 1 else 20},
        "data": {"values": data},
        "layer": [
            {
                "mark": {"type": "bar", "opacity": 0.85},
                "encoding": {"y": y, "x": x, "x2": {"datum": 1.0}, "color": color, **offset},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.5, "color": INK},
                "encoding": {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}, **offset},
            },
            {
                "data": {"values": [{}]},
                "mark": {"type": "rule", "color": INK},
                "encoding": {"x": {"datum": 1.0, "type": "quantitative"}},
            },
        ],
    }


# --- how they look


def _hue(series: Sequence[str], name: str) -> str:
    return PALETTE[series.index(name) % len(PALETTE)]


def _color(series: Sequence[str]) -> dict[str, Any]:
    scale = {"domain": list(series), "range": [_hue(series, name) for name in series]}
    return {"field": "series", "type": "nominal", "title": None, "scale": scale}


def _shape(series: Sequence[str]) -> dict[str, Any]:
    shapes = [_SHAPES[index % len(_SHAPES)] for index in range(len(series))]
    return {"field": "series", "type": "nominal", "title": None, "scale": {"domain": list(series), "range": shapes}}


def _draw(spec: dict[str, Any], series: Sequence[str]) -> str:
    longest = max(len(name) for name in series)
    columns = max(1, min(len(series), 46 // (longest + 4)))
    full = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": None,
        "width": _WIDTH,
        "height": _HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {
            "left": 16,
            "top": 6,
            "right": 10,
            "bottom": 6,
        },  # readers' fonts may be wider than the one measured
        "config": {
            "font": "system-ui, sans-serif",
            "view": {"stroke": None},
            "axis": {
                "labelColor": INK,
                "titleColor": MUTED,
                "gridColor": RULE,
                "domainColor": MUTED,
                "tickColor": MUTED,
                "labelFontSize": 12,
                "titleFontSize": 12,
                "titleFontWeight": "normal",
                "tickCount": 5,
            },
            "legend": {
                "orient": "bottom",
                "columns": columns,
                "labelColor": INK,
                "labelFontSize": 12,
                "labelLimit": 270,
                "symbolSize": 70,
            },
            "text": {"fontSize": 12},
        },
        **spec,
    }
    return _for_page(_converter().vegalite_to_svg(full))


def _for_page(svg: str) -> str:
    """Only the drawing: it takes the width of its place, and has no names that another drawing could have, too."""
    svg = svg[svg.index("<svg") :]
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(?:width|height|class|version|xmlns:xlink)="[^"]*"', "", head)
    return f'{head} aria-hidden="true">{rest}'
