"""``outrider measure``: will speculation pay on this traffic, with which drafter, and how many draft tokens?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.cli import options, render
from outrider.cli.session import load_model
from outrider.errors import ConfigError, DataError

if TYPE_CHECKING:
    from outrider.cli.options import Settings
    from outrider.measure.record import MeasureResult
    from outrider.measure.run import Progress as Advance
    from outrider.measure.settings import MeasureSettings

__all__ = ["measure"]

DEFAULT_DRAFTERS = ("ngram", "suffix")
DEFAULT_LENGTHS = ("1-8",)
DEFAULT_BATCH = 32
WHAT, SHOWN = "What is measured", "Output"

Traffic = Annotated[
    Path,
    typer.Argument(
        metavar="TRAFFIC.jsonl",
        help="Chats, prompts, ShareGPT conversations or logged requests with responses, one a line; - is standard input.",
        show_default=False,
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--draft",
        "-d",
        help="Drafter to try, as for outrider generate; repeatable.",
        show_default=", ".join(DEFAULT_DRAFTERS),
        rich_help_panel=WHAT,
    ),
]
Lengths = Annotated[
    list[str] | None,
    typer.Option(
        "--num-draft-tokens",
        "-k",
        metavar="K",
        help="Draft tokens a step to try: 4, or 1-8, or 2,4,8; repeatable. Drafters with a tree shape of their own are "
        "tried once, with the largest.",
        show_default="1-8",
        rich_help_panel=WHAT,
    ),
]
IsReplay = Annotated[
    bool,
    typer.Option(
        "--replay/--live",
        help="Score texts that the target has said, every drafter and length at once; or decode with each of them.",
        rich_help_panel=WHAT,
    ),
]
Answers = Annotated[
    str,
    typer.Option(
        help="Whose answers are replayed: recorded (the file's), generate (the target writes its own, once), or auto: a "
        "log's responses, and the target's own for all else.",
        rich_help_panel=WHAT,
    ),
]
Limit = Annotated[int, typer.Option(help="Most requests; 0 takes all.", rich_help_panel=WHAT)]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        help="Requests that run side by side; what drafters remember of earlier answers depends on it.",
        rich_help_panel=WHAT,
    ),
]
By = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD",
        help="Split results by a field of the rows, or by turn, context or kind; repeatable.",
        show_default="every field with few values",
        rich_help_panel=SHOWN,
    ),
]
NoText = Annotated[
    bool,
    typer.Option("--no-text", help="Keep what was said out of every output.", rich_help_panel=SHOWN),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Folder for the result (JSON), tables (CSV), the report (HTML) and the target's answers; run again to go on.",
        rich_help_panel=SHOWN,
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option(help="Result of an earlier run to compare with (its JSON, or its folder).", rich_help_panel=SHOWN),
]
FailUnder = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Exit with 1 where an arm's tokens a pass fall under this share of the baseline's, as 0.95; without a "
        "baseline, where the best arm commits fewer tokens a pass than this.",
        rich_help_panel=SHOWN,
    ),
]


def measure(
    context: typer.Context,
    traffic: Traffic,
    drafters: Drafters = None,
    lengths: Lengths = None,
    is_replay: IsReplay = True,
    answers: Answers = "auto",
    limit: Limit = 1000,
    side_by_side: BatchSize = DEFAULT_BATCH,
    by: By = None,
    no_text: NoText = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=SHOWN)
    ] = False,
    out: Out = None,
    baseline: Baseline = None,
    fail_under: FailUnder = None,
    config: options.Config = None,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    revision: options.Revision = None,
    offline: options.Offline = None,
    tool_rendering: options.ToolRendering = None,
    verification: options.Verification = None,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = None,
    min_tokens: options.MinTokens = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
) -> None:
    """Measure what drafters would gain on your own traffic, without deploying anything.

    The target reads each answer once; drafters are then scored on it for many draft lengths at the same time. Answers that
    are not recorded are written by the target first. Gains and losses are named alike.

    Examples:

    - `outrider measure chats.jsonl`
    - `outrider measure log.jsonl --draft suffix --draft heads/mine --draft merged:heads/mine -k 1-8 --out report`
    - `outrider measure chats.jsonl --temperature 0.7 --by category --by turn`
    - `outrider measure chats.jsonl --live --draft suffix -k 4 --limit 50`
    - `outrider measure chats.jsonl --baseline report --fail-under 0.95` (for CI: exit status 1 if it got worse)
    """
    settings = options.resolve_settings(options.flags_of(context), config)
    wanted = _wanted(
        settings,
        drafters=tuple(drafters or DEFAULT_DRAFTERS),
        lengths=_lengths(lengths or DEFAULT_LENGTHS),
        is_replay=is_replay,
        answers=answers,
        limit=limit,
        batch_size=side_by_side,
        keeps_text=not no_text,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    result = _measure(settings, wanted, traffic, out)
    _show(result, out, by=tuple(by or ()), json_lines=json_lines)
    _judge(result, baseline, fail_under)


def _wanted(
    settings: Settings,
    *,
    drafters: tuple[str, ...],
    lengths: tuple[int, ...],
    is_replay: bool,
    answers: str,
    limit: int,
    batch_size: int,
    keeps_text: bool,
) -> MeasureSettings:
    from outrider.measure.settings import MeasureSettings

    if answers not in ("auto", "recorded", "generate"):
        raise ConfigError(f"--answers {answers!r} is unknown; allowed: auto, recorded, generate")
    source: Literal["replay", "live"] = "replay" if is_replay else "live"
    return MeasureSettings(
        drafters=drafters,
        num_draft_tokens=lengths,
        sampling=settings.sampling,
        source=source,
        answers=answers,  # type: ignore[arg-type]
        limit=limit,
        batch_size=batch_size,
        verification=settings.engine.verification,
        keeps_text=keeps_text,
        chat=settings.chat,
        offline=settings.offline,
    )


def _lengths(given: Sequence[str]) -> tuple[int, ...]:
    """``1-8``, ``2,4,8``, ``4``, and several of them."""
    found: set[int] = set()
    for part in (part.strip() for text in given for part in text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--num-draft-tokens {part!r} is not possible; allowed: 4, or 1-8, or 2,4,8")
        found.update(range(int(first), int(last or first) + 1))
    if not found:
        raise ConfigError(f"--num-draft-tokens {', '.join(given)} holds no length; the larger number comes last: 1-8")
    return tuple(sorted(found))


def _measure(settings: Settings, wanted: MeasureSettings, traffic: Path, out: Path | None) -> MeasureResult:
    from outrider.measure.run import measure as run

    with _opened(traffic) as file:
        target = load_model(settings)
        total = wanted.limit or None
        with _progress() as progress:
            bar = progress.add_task("", total=total, stage="reading", tokens=0)

            def tell(advance: Advance) -> None:
                progress.update(bar, completed=advance.num_done, stage=advance.stage, tokens=advance.num_tokens)

            path = None if out is None or not wanted.keeps_text else out / "answers.jsonl"
            return run(target, file, wanted, traffic_name=str(traffic), answers_path=path, on_progress=tell)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"file {path} cannot be read: {error.strerror}") from None


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.fields[stage]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests · {task.fields[tokens]} tokens ·"),
        TimeElapsedColumn(),
        console=render.stderr(),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _show(result: MeasureResult, out: Path | None, *, by: Sequence[str], json_lines: bool) -> None:
    from outrider.cli.measure_output import json_values, print_tables, write_outputs

    if json_lines:
        typer.echo(json.dumps(json_values(result, by=by)))
    else:
        print_tables(result, by=by)
    if out is not None:
        written = write_outputs(result, out, by=by)
        render.stderr().print(f"written: {', '.join(str(path) for path in written)}", style="dim")


def _judge(result: MeasureResult, baseline: Path | None, fail_under: float | None) -> None:
    from outrider.cli.measure_output import gate

    if baseline is None and fail_under is None:
        return
    status = gate(result, baseline, fail_under)
    if status:
        raise typer.Exit(status)
