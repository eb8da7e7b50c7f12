"""What a measurement found: one record for each request and arm, and everything that is needed to judge and repeat it.

An *arm* is one way to speculate: a drafter, a shape of its drafts, a temperature. ``measure`` fills these records, by
decoding (*live*) or by scoring texts that the target has already said (*replay*); reports read nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from outrider.errors import DataError
from outrider.metrics import Rates, SpeculationStats

__all__ = [
    "FORMAT",
    "Arm",
    "Counts",
    "MeasureResult",
    "PassCosts",
    "Piece",
    "PieceKind",
    "RequestRecord",
    "Sample",
    "SkippedRow",
    "Source",
    "short_names",
]

FORMAT = "outrider measure 1"
"""Written into every stored result; a reader refuses others by name."""

PieceKind = Literal["kept", "target", "refused"]
"""Draft tokens that were kept; tokens that the target chose itself; draft tokens that were refused (not output)."""
Source = Literal["replay", "live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to speculate.

    Attributes:
        drafter: as given to ``--draft``.
        shape: ``chain 4``, or ``tree depth=5 width=4 num_nodes=16``; what the drafter was allowed to propose in a step.
        num_draft_tokens: most depth of a proposal (of a chain: most tokens).
        temperature: of the requests that set none of their own.
        verification: ``greedy``, ``seeded`` (draw-and-compare with keyed noise), ``compare`` or ``rejection``.
        label: the drafter as tables and plots show it (:func:`short_names`); empty: as it was given.
    """

    drafter: str
    shape: str
    num_draft_tokens: int
    temperature: float = 0.0
    verification: str = "greedy"
    label: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """Unique within a result."""
        return f"{self.drafter}, {self.shape}"

    @property
    def title(self) -> str:
        """The same for people: short, and a tree's shape only where the drafter's own options do not tell it."""
        label = self.label or self.drafter
        return label if self.is_tree and "num_nodes=" in label else f"{label}, {self.shape}"

    @property
    def is_tree(self) -> bool:
        """True if the drafter has a tree shape of its own, so that its lengths are not compared with chains'."""
        return self.shape.startswith("tree")


def short_names(drafters: Iterable[str]) -> dict[str, str]:
    """Drafters with each path in them cut to its last part; as they were given where that would make two of them alike."""
    short = {drafter: re.sub(r"[^:,]*[/\\\\]+(?=[^:,/\\\\])", "", drafter) for drafter in drafters}
    names = list(short.values())
    return {drafter: name if names.count(name) == 1 else drafter for drafter, name in short.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts(Rates):
    """Counts of one request, or pooled; rates by :class:`outrider.metrics.Rates`.

    As in :class:`outrider.metrics.SpeculationStats`, but sampled chains that are replayed give expectations, so all are
    floats.

    Attributes:
        passes, steps, committed, drafted, accepted: see docs/glossary.md.
        reached, kept: by depth, from depth 1 on.
        draft_ms, verify_ms, other_ms: this request's share of its passes' time, where they were really run; else 0.
    """

    passes: float = 0.0
    steps: float = 0.0
    committed: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    reached: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0

    @staticmethod
    def from_stats(
        stats: SpeculationStats, *, draft_ms: float = 0.0, verify_ms: float = 0.0, other_ms: float = 0.0
    ) -> Counts:
        """Counts of a decoding."""
        return Counts(
            passes=stats.passes,
            steps=stats.steps,
            committed=stats.committed,
            drafted=stats.drafted,
            accepted=stats.accepted,
            reached=tuple(map(float, stats.reached)),
            kept=tuple(map(float, stats.kept)),
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            other_ms=other_ms,
        )

    @staticmethod
    def pooled(parts: Iterable[Counts]) -> Counts:
        """Sums over requests; rates of the pool are then one division."""
        each = list(parts)
        sums = {name: sum(getattr(part, name) for part in each) for name in _SUMMED}
        by_depth = {name: _sum_by_depth([getattr(part, name) for part in each]) for name in ("reached", "kept")}
        return Counts(**sums, **by_depth)  # type: ignore[arg-type]

    def times(self, weight: float) -> Counts:
        """The same passes so many times, or with this probability."""
        values: dict[str, Any] = {name: getattr(self, name) * weight for name in _SUMMED}
        for name in ("reached", "kept"):
            values[name] = tuple(count * weight for count in getattr(self, name))
        return Counts(**values)

    def conditional_rates(self) -> tuple[float | None, ...]:
        """kept / reached of each depth."""
        return tuple(k / r if r else None for k, r in zip(self._kept_everywhere(), self.reached, strict=True))

    def unconditional_rates(self) -> tuple[float | None, ...]:
        """kept / steps of each depth."""
        return tuple(k / self.steps if self.steps else None for k in self._kept_everywhere())

    def _kept_everywhere(self) -> tuple[float, ...]:
        return (*self.kept, *[0.0] * (len(self.reached) - len(self.kept)))


_SUMMED = ("passes", "steps", "committed", "drafted", "accepted", "draft_ms", "verify_ms", "other_ms")


def _sum_by_depth(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    depth = max(map(len, rows), default=0)
    return tuple(sum(row[level] for row in rows if level < len(row)) for level in range(depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What one arm did on one request.

    Attributes:
        id: of the request; line: of the traffic file, from 1.
        labels: fields of the row that results can be split by, and what is known of the request besides: ``turn``,
            ``context`` (a bucket of the prompt's length), ``kind`` (tool call or prose).
        arm, counts: what was tried, and what came out.
        source: ``replay`` or ``live``.
        is_on_policy: False for text that this target would not have said under these settings: shown, never judged by.
        num_prompt_tokens, num_output_tokens: size of the request.
    """

    id: str
    line: int
    labels: Mapping[str, str]
    arm: Arm
    counts: Counts
    source: Source
    is_on_policy: bool = True
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of neighbouring tokens of one kind, as text."""

    text: str
    kind: PieceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How one answer came about: ``kept`` and ``target`` pieces joined are its text. Empty with ``--no-text``."""

    id: str
    arm: Arm
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A line that was not measured, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Times measured on this machine, one sequence at a time.

    Attributes:
        rows, pass_ms: milliseconds of a target pass by its rows, ascending; the first is a plain pass (1 row).
        draft_ms: milliseconds of drafting in a step, by arm name.
        num_cached: tokens cached before each timed pass.
    """

    rows: tuple[int, ...] = ()
    pass_ms: tuple[float, ...] = ()
    draft_ms: Mapping[str, float] = field(default_factory=dict)
    num_cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureResult:
    """All of a measurement.

    Attributes:
        arms: in the order in which they were asked for.
        records: one for each request and arm. samples: a few answers of each drafter.
        skipped: lines that were not measured. num_rows: lines that were, plus those that were skipped.
        settings: everything resolved, with fingerprints and versions, as JSON values.
        costs: pass and draft times, where they were measured.
        warnings: what a reader should know before trusting the numbers.
    """

    arms: tuple[Arm, ...]
    records: tuple[RequestRecord, ...]
    samples: tuple[Sample, ...] = ()
    skipped: tuple[SkippedRow, ...] = ()
    num_rows: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    costs: PassCosts | None = None
    warnings: tuple[str, ...] = ()

    def skipped_by_reason(self) -> dict[str, tuple[int, ...]]:
        """Line numbers of each reason, in order of first appearance."""
        found: dict[str, list[int]] = {}
        for row in self.skipped:
            found.setdefault(row.reason, []).append(row.line)
        return {reason: tuple(lines) for reason, lines in found.items()}

    def to_json(self) -> dict[str, Any]:
        """JSON values; arms of records and samples are indexes into ``arms``."""
        index = {arm: place for place, arm in enumerate(self.arms)}
        return {
            "format": FORMAT,
            "arms": [asdict(arm) for arm in self.arms],
            "records": [{**_plain(record), "arm": index[record.arm]} for record in self.records],
            "samples": [{**_plain(sample), "arm": index[sample.arm]} for sample in self.samples],
            "skipped": [asdict(row) for row in self.skipped],
            "num_rows": self.num_rows,
            "settings": dict(self.settings),
            "costs": None if self.costs is None else _plain(self.costs),
            "warnings": list(self.warnings),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> MeasureResult:
        """What :meth:`to_json` made.

        Raises:
            DataError: something else.
        """
        if values.get("format") != FORMAT:
            raise DataError(
                f"this is not a result of outrider measure: format {values.get('format')!r}, not {FORMAT!r}"
            )
        try:
            return _read_result(values)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise DataError(f"this result of outrider measure is damaged: {type(error).__name__} {error}") from None


def _plain(value: RequestRecord | Sample | PassCosts) -> dict[str, Any]:
    """Fields as JSON values; mappings are copied by hand, since ``asdict`` cannot copy every kind."""
    if isinstance(value, RequestRecord):
        counts = {name: getattr(value.counts, name) for name in Counts.__dataclass_fields__}
        names = ("id", "line", "source", "is_on_policy", "num_prompt_tokens", "num_output_tokens")
        return {**{name: getattr(value, name) for name in names}, "labels": dict(value.labels), "counts": counts}
    if isinstance(value, Sample):
        return {"id": value.id, "pieces": [[piece.text, piece.kind] for piece in value.pieces]}
    costs = {"rows": list(value.rows), "pass_ms": list(value.pass_ms), "draft_ms": dict(value.draft_ms)}
    return {**costs, "num_cached": value.num_cached}


def _read_result(values: Mapping[str, Any]) -> MeasureResult:
    arms = tuple(Arm(**arm) for arm in values["arms"])
    costs = values["costs"]
    return MeasureResult(
        arms=arms,
        records=tuple(_read_record(record, arms) for record in values["records"]),
        samples=tuple(
            Sample(id=each["id"], arm=arms[each["arm"]], pieces=tuple(Piece(text=t, kind=k) for t, k in each["pieces"]))
            for each in values["samples"]
        ),
        skipped=tuple(SkippedRow(**row) for row in values["skipped"]),
        num_rows=values["num_rows"],
        settings=values["settings"],
        costs=None if costs is None else _read_costs(costs),
        warnings=tuple(values["warnings"]),
    )


def _read_record(values: Mapping[str, Any], arms: Sequence[Arm]) -> RequestRecord:
    counts = {**values["counts"]}
    counts |= {name: tuple(counts[name]) for name in ("reached", "kept")}
    return RequestRecord(**{**values, "arm": arms[values["arm"]], "counts": Counts(**counts)})


def _read_costs(values: Mapping[str, Any]) -> PassCosts:
    return PassCosts(**{**values, "rows": tuple(values["rows"]), "pass_ms": tuple(values["pass_ms"])})
