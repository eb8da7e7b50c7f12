"""An audit's report as one HTML file: no script, nothing fetched, light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

__all__ = ["Block", "Facts", "Histogram", "Notes", "Rows", "render_page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --dim: #5c6470; --paper: #ffffff; --line: #d8dce2; --panel: #f4f5f7;
  --good: #11703c; --bad: #b3261e; --unsure: #8a5a00; --bar: #3f6fb5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3af; --paper: #14171c; --line: #333a44;
  --panel: #1d222a; --good: #5fc98d; --bad: #ff8a80; --unsure: #e3b341; --bar: #7aa7e8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46rem; } .dim { color: var(--dim); }
.verdict { border-left: .35rem solid; padding: .6rem .9rem; background: var(--panel); margin: 1rem 0; font-weight: 600; }
.good { border-color: var(--good); color: var(--good); } .bad { border-color: var(--bad); color: var(--bad); }
.unsure { border-color: var(--unsure); color: var(--unsure); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 500; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; font-size: .9rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
svg { width: 100%; max-width: 40rem; height: auto; } svg rect { fill: var(--bar); } svg line { stroke: var(--dim); }
svg text { fill: var(--dim); font-size: 11px; } ul { padding-left: 1.2rem; max-width: 46rem; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and values."""

    title: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A table; the first ``left`` columns hold words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of equal bins from 0 to 1, beside the height that they should have."""

    title: str
    counts: Sequence[int]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """A list of sentences."""

    title: str
    lines: Sequence[str]


Block = Facts | Rows | Histogram | Notes


def render_page(title: str, *, subtitle: str, verdict: str, mood: str, blocks: Sequence[Block]) -> str:
    """One page.

    Args:
        title, subtitle: heading.
        verdict: one sentence; mood: ``good``, ``bad`` or ``unsure``.
        blocks: what stands below, in order.
    """
    assert mood in ("good", "bad", "unsure")
    body = "\n".join(_block(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n<body>\n'
        f'<h1>{escape(title)}</h1>\n<p class="dim">{escape(subtitle)}</p>\n'
        f'<p class="verdict {mood}">{escape(verdict)}</p>\n{body}\n</body></html>\n'
    )


def _block(block: Block) -> str:
    head = f"<h2>{escape(block.title)}</h2>\n"
    if isinstance(block, Facts):
        pairs = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in block.values.items())
        return f"{head}<dl>{pairs}</dl>"
    if isinstance(block, Notes):
        return f"{head}<ul>{''.join(f'<li>{escape(line)}</li>' for line in block.lines)}</ul>"
    note = f'<p class="dim">{escape(block.note)}</p>\n' if block.note else ""
    return head + note + (_bars(block.counts) if isinstance(block, Histogram) else _table(block))


def _table(block: Rows) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in block.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in block.rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def _bars(counts: Sequence[int]) -> str:
    total, width, height = sum(counts), 600.0, 160.0
    if total == 0:
        return "<p>no tokens</p>"
    expected = total / len(counts)
    scale = height / (1.25 * max(*counts, expected))
    step = width / len(counts)
    bars = "".join(
        f'<rect x="{index * step + 1:.1f}" y="{height - count * scale:.1f}" width="{step - 2:.1f}" '
        f'height="{count * scale:.1f}"><title>{count} tokens</title></rect>'
        for index, count in enumerate(counts)
    )
    level = height - expected * scale
    return (
        f'<svg viewBox="0 0 {width:.0f} {height + 18:.0f}" role="img" aria-label="histogram">{bars}'
        f'<line x1="0" x2="{width:.0f}" y1="{level:.1f}" y2="{level:.1f}" stroke-dasharray="5 4"/>'
        f'<text x="0" y="{height + 14:.0f}">0: likeliest tokens</text>'
        f'<text x="{width:.0f}" y="{height + 14:.0f}" text-anchor="end">1: least likely tokens</text></svg>'
    )
