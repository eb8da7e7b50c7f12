"""The curves of a run, as one HTML file that needs nothing else, and as PNG where matplotlib is installed."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.train.files import replace_file

__all__ = ["write_curves"]

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 240, 52, 34, 12
_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
:root {{ color-scheme: light dark; --ink: #1f2937; --paper: #fff; --line: #d1d5db }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e5e7eb; --paper: #111827; --line: #374151 }} }}
body {{ font: 15px system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 44rem; margin: 2rem auto }}
svg {{ width: 100%; height: auto }} text {{ fill: var(--ink); font-size: 12px }} .grid {{ stroke: var(--line) }}
</style><h1>{title}</h1>{figures}</html>
"""


def write_curves(folder: Path, title: str, log: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write ``curves.html`` (and ``curves.png``) from the lines of a run's log; returns the names written."""
    figures = _figures(log)
    text = "".join(f"<h2>{html.escape(name)}</h2>{_svg(lines)}" for name, lines in figures.items())
    page = _PAGE.format(title=html.escape(title), figures=text)
    replace_file(folder / "curves.html", lambda path: path.write_text(page, encoding="utf-8"))
    if importlib.util.find_spec("matplotlib") is None:
        return ["curves.html"]
    _write_png(folder / "curves.png", title, figures)
    return ["curves.html", "curves.png"]


def _figures(log: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Points]]:
    updates = [line for line in log if line["kind"] == "update"]
    tests = [line for line in log if line["kind"] == "evaluation"]
    depths = max((len(line["kept_at_depth"]) for line in tests), default=0)
    steps = max((len(line["step_losses"]) for line in updates), default=0)
    return {
        "Tokens a pass on held-out prompts, by trained positions": {
            "tokens a pass": [(line["positions"], line["tokens_per_pass"]) for line in tests]
        },
        "Share of drafts kept, by depth": {
            f"depth {depth + 1}": [
                (line["positions"], line["kept_at_depth"][depth])
                for line in tests
                if depth < len(line["kept_at_depth"])
            ]
            for depth in range(depths)
        },
        "Loss of each unroll step": {
            f"step {step}": [(line["positions"], line["step_losses"][step]) for line in updates]
            for step in range(steps)
        },
    }


def _svg(lines: Mapping[str, Points]) -> str:
    everything = [point for points in lines.values() for point in points]
    if not everything:
        return "<p>Nothing measured yet.</p>"
    right = max(x for x, _ in everything) or 1.0
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    span = (high - low) or 1.0
    inner_width, inner_height = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - _TOP

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + inner_width * x / right, _TOP + inner_height * (1 - (y - low) / span)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 16}" role="img">']
    for tick in range(5):
        y = low + span * tick / 4
        top = place(0, y)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{top:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{y:.3g}</text>')
        x = right * tick / 4
        parts.append(f'<text x="{place(x, low)[0]:.1f}" y="{_HEIGHT - 16}" text-anchor="middle">{x:,.0f}</text>')
    for index, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        left = _LEFT + index * 90
        parts.append(f'<text x="{left}" y="{_HEIGHT + 8}" style="fill:{colour}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _write_png(path: Path, title: str, figures: Mapping[str, Mapping[str, Points]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3 * len(figures)), layout="constrained")
    figure.suptitle(title)
    for axes, (name, lines) in zip(figure.subplots(len(figures)), figures.items(), strict=True):
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("loss-masked positions", fontsize=8)
        for label, points in lines.items():
            axes.plot([x for x, _ in points], [y for _, y in points], label=label)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(fontsize=8)
    replace_file(path, lambda partial: figure.savefig(partial, format="png", dpi=120))
