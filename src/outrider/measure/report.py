"""What a measurement comes to: every arm, whole and split by each field of the rows, as data, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, DataError, nearest
from outrider.files import replace_file, write_json
from outrider.measure.forecast import Forecast, Recommendation, forecast, recommend
from outrider.measure.record import Arm, Counts, MeasureResult, PassCosts, RequestRecord
from outrider.measure.stats import (
    Interval,
    Pool,
    RateIntervals,
    is_judged,
    pool_arms,
    rate_intervals,
    requests_to_decide,
    requests_to_halve,
    why_not_judged,
)

__all__ = [
    "ALL",
    "MOST_VALUES",
    "NOT_JUDGED",
    "GroupRow",
    "Summary",
    "csv_text",
    "read_result",
    "result_json",
    "summarise",
    "summary_json",
    "write_csv",
    "write_result",
]

ALL = "all"
"""Field name of the rows that pool every request that verdicts may rest on."""
NOT_JUDGED = "not judged"
"""Field name of the rows for requests that are shown, but decide nothing."""
FEW_VALUES = 5
"""Up to so many, a field splits the records even if most of its groups hold one request; else it is an id by another name."""
MOST_VALUES = 20
"""Fields with more values than this are no groups, but names, unless they are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One arm on one group of requests.

    Attributes:
        arm: what was tried.
        field, value: the group: :data:`ALL`, a field of the rows and its value, or :data:`NOT_JUDGED` and the reason.
        num_requests, num_lines: its size; is_small: too small to rest a decision on.
        counts, rates: what came out.
        forecast: speed-up and judgement; ``None`` for groups that decide nothing, and where times are missing.
    """

    arm: Arm
    field: str
    value: str
    num_requests: int
    num_lines: int
    is_small: bool
    counts: Counts
    rates: RateIntervals
    forecast: Forecast | None = None

    @property
    def more_to_halve(self) -> int | None:
        """Requests more that would halve the interval of tokens a pass."""
        return None if self.rates.tokens_per_pass.low is None else requests_to_halve(self.num_requests)

    @property
    def more_to_decide(self) -> int | None:
        """Requests more until the speed-up's interval leaves 1, if the rate stays where it is."""
        if self.forecast is None:
            return None
        return requests_to_decide(self.forecast.speedup, bound=1.0, num_requests=self.num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All groups of a measurement and what to do about it.

    Attributes:
        rows: one for each arm and group.
        recommendation: which arm to run, if any.
        fields: fields that the rows are split by.
        unsplit: fields that are not, and why.
        warnings: what a reader should know first.
    """

    rows: tuple[GroupRow, ...]
    recommendation: Recommendation
    fields: tuple[str, ...] = ()
    unsplit: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def overall(self) -> tuple[GroupRow, ...]:
        """Every arm on all requests that may be judged by; if there are none, on the others."""
        return self.of(ALL) or self.of(NOT_JUDGED)

    def of(self, field: str) -> tuple[GroupRow, ...]:
        """Rows of one field."""
        return tuple(row for row in self.rows if row.field == field)

    def best_of_each_drafter(self) -> tuple[GroupRow, ...]:
        """The best arm of each drafter and temperature: by forecast, without one by tokens a pass."""
        best: dict[tuple[str, float], GroupRow] = {}
        for row in self.overall():
            key = (row.arm.drafter, row.arm.temperature)
            if key not in best or _merit(row) > _merit(best[key]):
                best[key] = row
        return tuple(best.values())


def _merit(row: GroupRow) -> float:
    found = row.rates.tokens_per_pass if row.forecast is None else row.forecast.speedup
    return found.value or 0.0


def summarise(result: MeasureResult, *, by: Sequence[str] = ()) -> Summary:
    """Pool, split, forecast and recommend.

    Args:
        result: what was measured.
        by: fields to split by; without any, every field with at least two and at most :data:`MOST_VALUES` values.

    Raises:
        ConfigError: no row has such a field.
    """
    records, doubles = _one_of_each(result.records)
    judged = [record for record in records if is_judged(record)]
    fields, unsplit = _asked(by, records) if by else _fields(judged)
    rows: list[GroupRow] = []
    for field, value, group in _groups(records, judged, fields):
        rows += _rows(field, value, group, None if field == NOT_JUDGED else result.costs)
    place = {arm: index for index, arm in enumerate(result.arms)}
    order = {key: index for index, key in enumerate(dict.fromkeys((row.field, row.value) for row in rows))}
    return Summary(
        rows=tuple(sorted(rows, key=lambda row: (order[row.field, row.value], place[row.arm]))),
        recommendation=recommend(judged, result.costs),
        fields=tuple(fields),
        unsplit=unsplit,
        warnings=(*result.warnings, *_warnings(records, doubles)),
    )


def _one_of_each(records: Sequence[RequestRecord]) -> tuple[list[RequestRecord], int]:
    """One record for each request and arm; of a replay and a live run of the same, the live one."""
    chosen: dict[tuple[str, int, Arm], RequestRecord] = {}
    for record in records:
        key = (record.id, record.line, record.arm)
        if key not in chosen or record.source == "live":
            chosen[key] = record
    return list(chosen.values()), len(records) - len(chosen)


def _warnings(records: Sequence[RequestRecord], doubles: int) -> Iterator[str]:
    requests = {(record.line, record.id): why_not_judged(record) for record in records}
    for reason, number in Counter(filter(None, requests.values())).items():
        yield f"{number} of {len(requests)} requests are {reason}: they are shown, but no verdict rests on them"
    if doubles:
        yield f"{doubles} records were both replayed and decoded; the decoded ones are counted"


def _asked(by: Sequence[str], records: Sequence[RequestRecord]) -> tuple[list[str], dict[str, str]]:
    known = list(dict.fromkeys(name for record in records for name in record.labels))
    for name in by:
        if name not in known:
            hint = nearest(name, known) or f"; allowed: {', '.join(known) or 'none'}"
            raise ConfigError(f"--by {name!r} is not possible: no row has such a field{hint}")
    return list(dict.fromkeys(by)), {}


def _fields(records: Sequence[RequestRecord]) -> tuple[list[str], dict[str, str]]:
    """Fields that split the records, and why others do not."""
    values: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.labels.items():
            values.setdefault(name, set()).add(value)
    values.pop("traffic", None)
    num_requests = len({record.id for record in records})
    unsplit = {
        name: f"{len(found)} values"
        for name, found in values.items()
        if len(found) > MOST_VALUES or (len(found) > FEW_VALUES and 2 * len(found) > num_requests)
    }
    lacking = {name for name in values if any(name not in record.labels for record in records)}
    return [
        name for name, found in values.items() if len(found) + (name in lacking) > 1 and name not in unsplit
    ], unsplit


def _groups(
    records: Sequence[RequestRecord], judged: Sequence[RequestRecord], fields: Sequence[str]
) -> Iterator[tuple[str, str, list[RequestRecord]]]:
    if judged:
        yield ALL, "", list(judged)
    yield from ((NOT_JUDGED, reason, each) for reason, each in _split(records, why_not_judged) if reason)
    for field in fields:
        yield from ((field, value, each) for value, each in _split(judged, partial(_label, field)))


def _label(field: str, record: RequestRecord) -> str:
    return record.labels.get(field, "(none)")


def _split(
    records: Iterable[RequestRecord], key: Callable[[RequestRecord], str]
) -> list[tuple[str, list[RequestRecord]]]:
    groups: dict[str, list[RequestRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return sorted(groups.items(), key=lambda item: _natural(item[0]))


def _natural(text: str) -> tuple[tuple[int, float, str], ...]:
    """Order in which 2 comes before 10."""
    parts = re.findall(r"\d+|\D+", text)
    return tuple((0, float(part), "") if part.isdecimal() else (1, 0.0, part) for part in parts)


def _rows(field: str, value: str, records: Sequence[RequestRecord], costs: PassCosts | None) -> Iterator[GroupRow]:
    for arm, pool in pool_arms(records).items():
        yield _row(arm, field, value, pool, costs)


def _row(arm: Arm, field: str, value: str, pool: Pool, costs: PassCosts | None) -> GroupRow:
    return GroupRow(
        arm=arm,
        field=field,
        value=value,
        num_requests=pool.num_requests,
        num_lines=pool.num_lines,
        is_small=pool.is_small,
        counts=pool.counts,
        rates=rate_intervals(pool),
        forecast=forecast(pool, arm, costs),
    )


# --- JSON


def summary_json(summary: Summary) -> dict[str, Any]:
    """The summary as JSON values."""
    return {
        "recommendation": _recommendation_json(summary.recommendation),
        "fields": list(summary.fields),
        "unsplit": dict(summary.unsplit),
        "warnings": list(summary.warnings),
        "groups": [_row_json(row) for row in summary.rows],
    }


def _recommendation_json(found: Recommendation) -> dict[str, Any]:
    values = asdict(found)
    for name in ("arm", "other_half_chooses"):
        arm: Arm | None = getattr(found, name)
        values[name] = None if arm is None else arm.name
    return values


def _row_json(row: GroupRow) -> dict[str, Any]:
    counts = {name: getattr(row.counts, name) for name in Counts.__dataclass_fields__}
    return {
        "arm": row.arm.name,
        "temperature": row.arm.temperature,
        "field": row.field,
        "value": row.value,
        "num_requests": row.num_requests,
        "num_lines": row.num_lines,
        "is_small": row.is_small,
        "counts": counts | {name: list(counts[name]) for name in ("reached", "kept")},
        "rates": asdict(row.rates),
        "requests_more_to_halve": row.more_to_halve,
        "requests_more_to_decide": row.more_to_decide,
        "forecast": None if row.forecast is None else asdict(row.forecast),
    }


def result_json(result: MeasureResult, summary: Summary) -> dict[str, Any]:
    """The whole result with its summary as JSON values."""
    return {**result.to_json(), "summary": summary_json(summary)}


def write_result(result: MeasureResult, summary: Summary, path: Path) -> None:
    """Write :func:`result_json`; :func:`read_result` reads it."""
    write_json(path, result_json(result, summary))


def read_result(path: Path) -> MeasureResult:
    """A stored result.

    Raises:
        DataError: it cannot be read, or is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"result file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"result file {path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"result file {path} holds no object; give the result.json of an earlier measurement")
    return MeasureResult.from_json(values)


# --- CSV

_RATES = ("tokens_per_pass", "accepted_length", "acceptance_rate", "draft_rate")
_COUNTS = ("passes", "steps", "committed", "drafted", "accepted")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(summary: Summary) -> str:
    """One row for each arm and group; rates with both ends of their intervals, empty where there is none."""
    rows = [_csv_row(row) for row in summary.rows]
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def write_csv(summary: Summary, path: Path) -> None:
    """Write :func:`csv_text` to a file."""
    replace_file(path, lambda partial: partial.write_text(csv_text(summary), encoding="utf-8", newline=""))


def _csv_row(row: GroupRow) -> dict[str, Any]:
    arm, found = row.arm, row.forecast
    values: dict[str, Any] = {
        "drafter": _cell(arm.drafter),
        "shape": arm.shape,
        "num_draft_tokens": arm.num_draft_tokens,
        "temperature": arm.temperature,
        "verification": arm.verification,
        "field": _cell(row.field),
        "value": _cell(row.value),
        "requests": row.num_requests,
        "is_small": row.is_small,
    }
    values |= {name: getattr(row.counts, name) for name in _COUNTS}
    for name in _RATES:
        values |= _ends(name, getattr(row.rates, name))
    values |= {name: _joined(getattr(row.rates, name)) for name in ("unconditional", "conditional")}
    values |= _ends("speedup", Interval() if found is None else found.speedup)
    values["break_even_tokens_per_pass"] = None if found is None else found.pass_cost
    values["break_even_accepted_length"] = None if found is None else found.break_even_length
    values["ceiling"] = None if found is None else found.ceiling
    values["judgement"] = "" if found is None else str(found.judgement)
    return values


def _ends(name: str, interval: Interval) -> dict[str, float | None]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _joined(intervals: Sequence[Interval]) -> str:
    return " ".join("n/a" if each.value is None else f"{each.value:.4f}" for each in intervals)


def _cell(text: str) -> str:
    """Words of the traffic, so spelled that a spreadsheet takes them for words and never for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
