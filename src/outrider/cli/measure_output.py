"""What ``outrider measure`` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from outrider.cli import render
from outrider.errors import DataError

if TYPE_CHECKING:
    from outrider.measure.record import MeasureResult
    from outrider.measure.report import GroupRow, Summary
    from outrider.measure.stats import Interval

__all__ = ["gate", "json_values", "print_tables", "write_outputs"]

_MOST_LINES = 8


def print_tables(result: MeasureResult, *, by: Sequence[str] = ()) -> None:
    """Warnings, all arms, the groups, what was skipped, and what to do.

    Raises:
        ConfigError: no row has a field of ``by``.
    """
    from outrider.measure.report import summarise

    console, summary = render.stdout(), summarise(result, by=by)
    _print_lines(console, [f"note: {warning}" for warning in summary.warnings])
    _print_arms(console, summary)
    _print_positions(console, summary)
    for field in summary.fields:
        _print_groups(console, summary, field)
    _print_skipped(console, result)
    console.print(Text(summary.recommendation.text), style="bold")


def _print_arms(console: Console, summary: Summary) -> None:
    columns = ["arm", "requests", "tok/pass", "95 %", "length", "accepted", "drafting", "speed-up", "95 %"]
    columns += ["break-even", "ceiling", "verdict"]
    rows = [
        [
            row.arm.title if row.field == "all" else f"{row.arm.title} ({row.value})",
            f"{row.num_requests}{' small' if row.is_small else ''}",
            render.number(row.rates.tokens_per_pass.value),
            _ends(row.rates.tokens_per_pass),
            render.number(row.rates.accepted_length.value),
            render.percent(row.rates.acceptance_rate.value),
            render.percent(row.rates.draft_rate.value),
            *_forecast_cells(row),
        ]
        for row in summary.overall()
    ]
    console.print(render.table(columns, rows))
    console.print()
    console.print("break-even is in tokens a pass; docs/glossary.md and docs/measure.md define the rest")
    most = max((row.more_to_halve or 0 for row in summary.overall()), default=0)
    if most:
        console.print(f"intervals are over requests; {most} requests more would halve them")
    console.print()


def _print_positions(console: Console, summary: Summary) -> None:
    """Both rates by position, for the best arm of each drafter."""
    found = [row for row in summary.best_of_each_drafter() if row.rates.conditional]
    depth = max((len(row.rates.conditional) for row in found), default=0)
    rows = [
        [row.arm.title, name, *(render.percent(rate.value) for rate in rates), *[""] * (depth - len(rates))]
        for row in found
        for name, rates in (("of all steps", row.rates.unconditional), ("of those reached", row.rates.conditional))
    ]
    if rows:
        console.print(render.table(["arm", "kept", *map(str, range(1, depth + 1))], rows, left=2))
        console.print()


def _forecast_cells(row: GroupRow) -> list[str]:
    found = row.forecast
    if found is None:
        return ["n/a", "", "n/a", "n/a", "no verdict"]
    return [
        render.number(found.speedup.value, unit="x"),
        _ends(found.speedup),
        render.number(found.pass_cost),
        render.number(found.ceiling, unit="x"),
        str(found.judgement),
    ]


def _ends(interval: Interval) -> str:
    return "" if interval.low is None or interval.high is None else f"{interval.low:.2f}-{interval.high:.2f}"


def _print_groups(console: Console, summary: Summary, field: str) -> None:
    """The best arm of each drafter on each group of a field."""
    arms = [row.arm for row in summary.best_of_each_drafter()]
    rows = [
        [
            row.value,
            row.arm.title,
            f"{row.num_requests}{' small' if row.is_small else ''}",
            render.number(row.rates.tokens_per_pass.value),
            _ends(row.rates.tokens_per_pass),
            *_group_cells(row),
        ]
        for row in summary.of(field)
        if row.arm in arms
    ]
    columns = [field, "arm", "requests", "tok/pass", "95 %", "speed-up", "95 %", "verdict", ""]
    console.print(render.table(columns, rows, left=2))
    console.print()


def _group_cells(row: GroupRow) -> list[str]:
    found, more = row.forecast, row.more_to_decide
    if found is None:
        return ["n/a", "", "no verdict", ""]
    hint = f"{more} requests more to decide" if more else ""
    return [render.number(found.speedup.value, unit="x"), _ends(found.speedup), str(found.judgement), hint]


def _print_skipped(console: Console, result: MeasureResult) -> None:
    for reason, lines in result.skipped_by_reason().items():
        shown = ", ".join(map(str, lines[:_MOST_LINES]))
        more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
        console.print(Text(f"skipped {len(lines)} of {result.num_rows}: {reason} (line {shown}{more})"))


def json_values(result: MeasureResult, *, by: Sequence[str] = ()) -> dict[str, Any]:
    """The whole result with its summary, as ``result.json`` holds them.

    Raises:
        ConfigError: no row has a field of ``by``.
    """
    from outrider.measure.report import result_json, summarise

    return result_json(result, summarise(result, by=by))


def write_outputs(result: MeasureResult, directory: Path, *, by: Sequence[str] = ()) -> list[Path]:
    """Write ``result.json``, ``results.csv``, ``report.html`` and a profile for each drafter.

    Returns:
        the files, in that order.

    Raises:
        ConfigError: no row has a field of ``by``.
        DataError: the folder cannot be written to.
    """
    from outrider.measure.page import write_page
    from outrider.measure.profile import FILE_NAME, profiles_of, write_profile
    from outrider.measure.report import summarise, write_csv, write_result

    summary = summarise(result, by=by)
    paths = [directory / name for name in ("result.json", "results.csv", "report.html")]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_result(result, summary, paths[0])
        write_csv(summary, paths[1])
        note = write_page(result, summary, paths[2])
        for name, profile in profiles_of(result, summary).items():
            paths.append(directory / "profiles" / name / FILE_NAME)
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            write_profile(profile, paths[-1])
    except OSError as error:
        raise DataError(f"{error.filename or directory} cannot be written: {error.strerror}") from None
    if note:
        render.stderr().print(Text(f"the report has no plots: {note}"))
    return paths


def gate(result: MeasureResult, baseline: Path | None, fail_under: float | None) -> int:
    """Compare with an earlier result (without one: with a number of tokens a pass) and print what came out.

    Returns:
        exit status: 0 if nothing is below the bound, else 1. Misuse raises, which becomes 2.
    """
    from outrider.measure.gate import check_gate, check_level

    console = render.stdout()
    if baseline is None:
        assert fail_under is not None, "nothing to compare with"
        level = check_level(result, fail_under)
        _print_lines(console, [level.text])
        return level.exit_code
    found = check_gate(result, baseline, fail_under)
    _print_lines(console, [f"differs from the baseline: {line}" for line in found.differences])
    _print_lines(console, [change.text for change in found.changes])
    return found.exit_code


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(Text(line))
