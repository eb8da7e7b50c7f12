"""What people see: numbers, tables, and text whose colours tell drafts from the target's own tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from outrider.audit.identity import Control, Difference
    from outrider.engine.result import GenerationResult, StreamEvent
    from outrider.models.tokenizer import Tokenizer

__all__ = [
    "DraftPainter",
    "describe_control",
    "describe_difference",
    "legend",
    "number",
    "percent",
    "print_settings",
    "stderr",
    "stdout",
    "summary",
    "table",
]

_PIPE_WIDTH = 160
KEPT, OWN, REFUSED = "green", "", "red strike"


def stdout() -> Console:
    """Console of results. A pipe has no width, so nothing is shortened to fit it."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, width=width)


def stderr() -> Console:
    """Console of everything that is not a result."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number, or ``n/a`` where there is none."""
    return "n/a" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    """A rate in percent, or ``n/a``."""
    return "n/a" if value is None else f"{100 * value:.0f} %"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", left: int = 1) -> Table:
    """A plain table: the first ``left`` columns to the left, numbers to the right. Names are wrapped where there is no room,
    numbers never cut."""
    out = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        is_name = index < left
        out.add_column(column, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in rows:
        out.add_row(*(Text(cell) for cell in row))
    return out


def summary(results: Sequence[GenerationResult], seconds: float) -> str:
    """One line: tokens, speed, tokens a pass, acceptance; pooled over the results."""
    from outrider.metrics import SpeculationStats

    stats = SpeculationStats.pooled(result.stats for result in results)
    tokens = sum(result.usage.completion_tokens for result in results)
    speed = number(tokens / seconds if seconds > 0 else None, 1)
    return (
        f"{tokens} tokens in {seconds:.1f} s ({speed} tokens/s, reading the prompt included), "
        f"{number(stats.tokens_per_pass)} tokens a pass, acceptance {percent(stats.acceptance_rate)} "
        f"({stats.accepted} of {stats.drafted} draft tokens)"
    )


def describe_difference(difference: Difference) -> str:
    """One line about the first place where two outputs differ."""
    d = difference
    arm = ", ".join(part for part in (d.arm, d.sampling) if part)
    if d.gap is None:
        gap = "one output ended there"
    else:
        cut = "" if d.cut_margin is None else f", cut {d.cut_margin:.2e} away"
        gap = f"score gap {d.gap:.2e}{cut}, top-2 gap {d.top2_gap:.2e}"
    where = f"{d.prompt}{f' ({arm})' if arm else ''}: first difference at output token {d.index}"
    ids = f"plain {d.plain_token}, speculative {d.speculative_token}"
    return f"{d.verdict}: {where}: {ids}; {gap}; tolerance {d.tolerance:.2e}"


def describe_control(control: Control) -> str:
    """One line about where the tolerance comes from."""
    c = control
    return (
        f"control: plain against plain, 1 against {c.batch_size} sequences a pass: the gap between the two likeliest "
        f"tokens moves by at most {c.deviation:.2e} over {c.num_positions} positions, {c.num_flips} argmax flips; "
        f"tie tolerance {c.tolerance:.2e}"
    )


def print_settings(settings: Mapping[str, Any], console: Console) -> None:
    """Effective settings, one a line; those of a group are indented."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            console.print(Text(f"{name}:"))
            for key, inner in value.items():
                console.print(Text(f"  {key} = {inner}"))
        else:
            console.print(Text(f"{name} = {value}"))


def legend(console: Console) -> Text:
    """What the colours (or, without colours, the marks) mean."""
    kept, refused = _mark(console, "kept draft tokens", KEPT), _mark(console, "refused draft tokens", REFUSED)
    return Text.assemble(kept, " · the target's own tokens · ", refused)


class DraftPainter:
    """Colours the tokens of one choice as its events arrive.

    Args:
        tokenizer: of the target.
        console: where the text goes; one without colours gets ``{kept}`` and ``~refused~`` instead.
    """

    def __init__(self, tokenizer: Tokenizer, console: Console) -> None:
        from outrider.models.tokenizer import Detokenizer

        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._console = console

    def paint(self, event: StreamEvent) -> Text:
        """Text of an event: its kept drafts, the refused ones, the target's own token (in the order of the decision)."""
        report, mark = event.report, self._mark
        accepted = 0 if report is None else report.accepted
        out = Text.assemble(mark(self._detokenizer.add(list(event.token_ids[:accepted])), KEPT))
        if report is not None and report.refused:
            refused = "|".join(self._tokenizer.token_text(token) for token in report.refused)
            out.append_text(mark(refused.replace("\n", "↵"), REFUSED))  # a refused line break must break no line
        out.append_text(mark(self._detokenizer.add(list(event.token_ids[accepted:])), OWN))
        if event.result is not None:
            out.append_text(mark(self._detokenizer.finish(), OWN))
        return out

    @property
    def _mark(self) -> Callable[[str, str], Text]:
        return lambda text, style: _mark(self._console, text, style)


def _mark(console: Console, text: str, style: str) -> Text:
    if not text or style == OWN:
        return Text(text)
    if console.color_system is not None and not console.no_color:
        return Text(text, style=style)
    left, right = ("{", "}") if style == KEPT else ("~", "~")
    return Text(f"{left}{text}{right}")
