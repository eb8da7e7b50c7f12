"""From turns to a table: speeds with spread, speed-ups over each arm's own plain arm, agreement with the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.peers.catalogue import REFERENCE, Arm
from benchmarks.peers.workfile import WorkFile
from benchmarks.report import wide_console
from benchmarks.stats import PairedRatio, pooled_ratio, spread

__all__ = ["Row", "Turn", "best_against_ours", "common_prefix", "print_table", "probes_of", "rows_of", "turns_of"]

COLUMNS = (
    "arm",
    "tokens/s",
    "quartiles",
    "with prompt",
    "first token",
    "x own plain",
    "tokens/pass",
    "agrees",
    "turns",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one arm did with one item.

    Attributes:
        key: round and item. outputs: ids of each prompt.
        decoded: tokens after the first of each prompt; decode_s: seconds after the first token (one prompt), or of the
            whole (several, where reading and decoding overlap).
        passes: decode passes of the target for one prompt, ``None`` where the peer does not tell.
    """

    key: tuple[int, str]
    outputs: tuple[tuple[int, ...], ...]
    decoded: int
    first_s: float | None
    decode_s: float
    wall_s: float
    passes: int | None

    @property
    def num_tokens(self) -> int:
        """All new tokens."""
        return sum(map(len, self.outputs))

    @staticmethod
    def of(key: tuple[int, str], reply: Mapping[str, Any]) -> Turn:
        """Read a driver's answer."""
        answers = reply["answers"]
        outputs = tuple(tuple(answer["tokens"]) for answer in answers)
        is_single = len(outputs) == 1
        first_s = answers[0].get("first_s") if is_single else None
        tokens = sum(map(len, outputs))
        return Turn(
            key=key,
            outputs=outputs,
            decoded=tokens - len(outputs) if is_single else tokens,
            first_s=first_s,
            decode_s=reply["wall_s"] - (first_s or 0.0),
            wall_s=reply["wall_s"],
            passes=reply.get("passes"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm's line.

    Attributes:
        unavailable: why there are no numbers, or why they end early.
        tokens_per_s: decoded tokens over decode seconds, both summed; lower and upper quartile over items.
        request_tokens_per_s: all new tokens over whole requests, prompt included.
        speed_up: over the plain arm of the same peer and weights: seconds for the same number of tokens, summed.
        agreement: share of the reference's tokens before the first difference, summed; identical: outputs without one.
    """

    arm: str
    plain: str
    turns: int = 0
    unavailable: str = ""
    tokens_per_s: float | None = None
    lower_quartile: float | None = None
    upper_quartile: float | None = None
    request_tokens_per_s: float | None = None
    first_token_ms: float | None = None
    speed_up: PairedRatio | None = None
    tokens_per_pass: float | None = None
    agreement: float | None = None
    identical: str = ""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Rounded values; what was not measured is null."""
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {**rounded, "speed_up": None if self.speed_up is None else self.speed_up.to_json()}


def turns_of(work: WorkFile, arm: str) -> dict[tuple[int, str], Turn]:
    """The turns of one arm by round and item; one that gave no second token tells nothing about decoding."""
    found = {
        (round_, item): Turn.of((round_, item), reply)
        for (round_, item, name), reply in work.turns.items()
        if name == arm
    }
    return {key: turn for key, turn in found.items() if turn.decoded > 0}


def rows_of(arms: Sequence[Arm], work: WorkFile) -> list[Row]:
    """One row an arm, in order, those without numbers included."""
    reference = turns_of(work, REFERENCE)
    return [_row(arm, work, reference) for arm in arms]


def _row(arm: Arm, work: WorkFile, reference: Mapping[tuple[int, str], Turn]) -> Row:
    turns = turns_of(work, arm.name)
    record = work.arms.get(arm.name, {})
    reason = work.stopped.get(arm.name) or record.get("unavailable") or ""
    if not turns:
        return Row(arm=arm.name, plain=arm.plain, unavailable=reason or "not measured yet")
    rates = spread([turn.decoded / turn.decode_s for turn in turns.values()])
    first = [turn.first_s * 1e3 for turn in turns.values() if turn.first_s is not None]
    plain = turns if arm.is_plain else turns_of(work, arm.plain)
    agreement, identical = agreement_of(turns, reference)
    return Row(
        arm=arm.name,
        plain=arm.plain,
        turns=len(turns),
        unavailable=reason,
        tokens_per_s=_sum(turns, "decoded") / _sum(turns, "decode_s"),
        lower_quartile=rates.lower_quartile,
        upper_quartile=rates.upper_quartile,
        request_tokens_per_s=_sum(turns, "num_tokens") / _sum(turns, "wall_s"),
        first_token_ms=spread(first).median if first else None,
        speed_up=None if arm.is_plain else speed_up(turns, plain),
        tokens_per_pass=_tokens_per_pass(turns),
        agreement=agreement,
        identical=identical,
        note=record.get("note", ""),
    )


def _sum(turns: Mapping[tuple[int, str], Turn], name: str) -> float:
    return float(sum(getattr(turn, name) for turn in turns.values()))


def _tokens_per_pass(turns: Mapping[tuple[int, str], Turn]) -> float | None:
    """Committed over passes of single prompts; prompts that share passes have no such number of their own."""
    told = [turn for turn in turns.values() if turn.passes and len(turn.outputs) == 1]
    return sum(turn.decoded for turn in told) / sum(turn.passes or 0 for turn in told) if told else None


def speed_up(
    turns: Mapping[tuple[int, str], Turn], base: Mapping[tuple[int, str], Turn], *, whole: bool = False
) -> PairedRatio | None:
    """How many times faster than ``base``, over what both measured: seconds for as many tokens as ``base`` made.

    Args:
        turns, base: of two arms.
        whole: count the prompt's time too.
    """
    both = [key for key in turns if key in base]
    if not both:
        return None

    def seconds(turn: Turn, tokens: int) -> float:
        """Seconds of ``turn``, stretched to that many decoded tokens."""
        reading = turn.wall_s - turn.decode_s if whole else 0.0
        return reading + turn.decode_s / turn.decoded * tokens

    theirs = [seconds(base[key], base[key].decoded) for key in both]
    return pooled_ratio(theirs, [seconds(turns[key], base[key].decoded) for key in both])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two outputs share from the start."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def agreement_of(
    turns: Mapping[tuple[int, str], Turn], reference: Mapping[tuple[int, str], Turn]
) -> tuple[float | None, str]:
    """Share of the reference's tokens before the first difference, and how many outputs have none."""
    pairs = [
        (ours, theirs)
        for key, turn in turns.items()
        if key in reference
        for theirs, ours in zip(turn.outputs, reference[key].outputs, strict=True)
    ]
    if not pairs:
        return None, ""
    shared = sum(common_prefix(ours, theirs) for ours, theirs in pairs)
    same = sum(ours == theirs for ours, theirs in pairs)
    return shared / sum(len(ours) for ours, _ in pairs), f"{same} of {len(pairs)}"


def best_against_ours(arms: Sequence[Arm], work: WorkFile) -> list[dict[str, Any]]:
    """Each arm of Outrider against the fastest peer: picked on every second item, compared on the others."""
    items = list(dict.fromkeys(item for _, item, _ in work.turns))
    picking = set(items[::2])
    peers = {arm.name: turns_of(work, arm.name) for arm in arms if arm.peer != "outrider"}
    rates = {
        name: sum(turn.decoded for turn in chosen) / sum(turn.decode_s for turn in chosen)
        for name, turns in peers.items()
        if (chosen := [turn for (_, item), turn in turns.items() if item in picking])
    }
    if not rates:
        return []
    best = max(rates, key=lambda name: rates[name])
    rest = {key: turn for key, turn in peers[best].items() if key[1] not in picking}
    found = []
    for arm in arms:
        ratio = speed_up(turns_of(work, arm.name), rest) if arm.peer == "outrider" else None
        if ratio is not None:
            found.append({"arm": arm.name, "against": best, "ratio": ratio.to_json()})
    return found


def probes_of(work: WorkFile) -> dict[str, Any]:
    """What the machine could do while the arms took turns: reading memory, multiplying matrices."""
    names = ("read_gb_per_s", "bf16_tflop_per_s")
    return {name: spread([line["reply"][name] for line in work.probes]).to_json() for name in names if work.probes}


def print_table(rows: Sequence[Row], *, title: str) -> None:
    """The table; an arm without numbers says why."""
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    wide_console().print(table)


def cells(row: Row) -> list[str]:
    """One line of the table, as text."""
    if not row.turns:
        return [row.arm, f"not available: {row.unavailable}", *[""] * (len(COLUMNS) - 2)]
    ratio = row.speed_up
    return [
        row.arm,
        _number(row.tokens_per_s),
        f"{_number(row.lower_quartile)} to {_number(row.upper_quartile)}",
        _number(row.request_tokens_per_s),
        "" if row.first_token_ms is None else f"{_number(row.first_token_ms)} ms",
        "" if ratio is None else f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})",
        _number(row.tokens_per_pass),
        "" if row.agreement is None else f"{row.agreement:.0%} ({row.identical})",
        f"{row.turns}" + (f", then stopped: {row.unavailable}" if row.unavailable else ""),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
