"""``outrider generate``: decode prompts, and show where the tokens came from."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.cli import constraints, options, render
from outrider.cli.inputs import BrokenLine, Format, Inputs, Row, read_inputs
from outrider.cli.output import ResultFile
from outrider.cli.session import Session, open_session, prompt_of, row_params
from outrider.errors import ConfigError, OutriderError
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.result import GenerationResult

__all__ = ["generate"]

Prompt = Annotated[
    str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads standard input.", show_default=False)
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="A text file (one prompt), or JSON Lines (.jsonl): messages, prompt or ShareGPT conversations a line.",
        rich_help_panel=options.OUTPUT,
    ),
]
FileFormat = Annotated[
    str,
    typer.Option("--format", help="text, jsonl, or auto: by the file's name.", rich_help_panel=options.OUTPUT),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Append results as JSON Lines; run again to go on after an interruption.",
        rich_help_panel=options.OUTPUT,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Wrap a prompt as a user's message, or hand the model the bare text.",
        show_default="chat",
        rich_help_panel=options.OUTPUT,
    ),
]
ShowDrafts = Annotated[
    bool,
    typer.Option(
        "--show-drafts",
        help="Colour the text: kept draft tokens green, refused ones red and struck through.",
        rich_help_panel=options.OUTPUT,
    ),
]


def generate(
    context: typer.Context,
    prompt: Prompt = None,
    file: File = None,
    file_format: FileFormat = "auto",
    output: Output = None,
    json_lines: options.Json = False,
    show_drafts: ShowDrafts = False,
    verbose: options.Verbose = False,
    config: options.Config = None,
    chat: Chat = None,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    revision: options.Revision = None,
    offline: options.Offline = None,
    tool_rendering: options.ToolRendering = None,
    draft: options.Draft = None,
    num_draft_tokens: options.NumDraftTokens = None,
    schedule: options.Schedule = None,
    verification: options.Verification = None,
    batch_size: options.BatchSize = None,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    n: options.NumChoices = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = None,
    min_tokens: options.MinTokens = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    bad_words: options.BadWords = None,
    logprobs: options.Logprobs = None,
    logprobs_mode: options.LogprobsMode = None,
    json_schema: constraints.JsonSchema = None,
    json_object: constraints.JsonObject = None,
    regex: constraints.Regex = None,
    choice: constraints.Choice = None,
    grammar: constraints.Grammar = None,
    no_whitespace: constraints.NoWhitespace = None,
    prediction: constraints.Prediction = None,
) -> None:
    """Decode a prompt, or a file of prompts.

    Examples:

    - `outrider generate "Name three rivers."`
    - `cat notes.txt | outrider generate - -t 400 --draft ngram`
    - `outrider generate "Write a haiku." --temperature 0.8 --seed 7 --show-drafts`
    - `outrider generate -f chats.jsonl -o answers.jsonl` (run it again to go on after an interruption)
    - `outrider generate "Hello" --json --logprobs 3 | jq .speculation`
    - `outrider generate "Is water wet?" --choice yes --choice no`

    With `--draft none` it decodes plainly; the text is the same. See `outrider audit identity` for the proof.
    """
    settings = options.resolve_settings(options.flags_of(context), config)
    view = _View(json_lines=json_lines, show_drafts=show_drafts, output=output)
    inputs = read_inputs(prompt, file, file_format=_format(file_format), chat=settings.chat)
    if not inputs.rows:
        _finish(inputs, list(inputs.broken))
    session = open_session(settings)
    if verbose:
        render.print_settings(session.describe(), render.stderr())
    if inputs.is_file or output is not None:
        _finish(inputs, [*inputs.broken, *_answer_all(session, inputs, view)])
    else:
        _answer_one(session, inputs.rows[0], view, says_speed=verbose or sys.stderr.isatty())


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """How results are shown."""

    json_lines: bool
    show_drafts: bool
    output: Path | None

    def __post_init__(self) -> None:
        if self.show_drafts and (self.json_lines or self.output is not None):
            raise ConfigError("--show-drafts colours text; leave out --json and --output")


def _format(given: str) -> Format:
    if given not in ("auto", "text", "jsonl"):
        raise ConfigError(f"--format {given!r} is unknown; allowed: auto, text, jsonl")
    return given  # type: ignore[return-value]


def _answer_one(session: Session, row: Row, view: _View, *, says_speed: bool) -> None:
    """Stream one prompt's text, or print its choices when they are done."""
    prompt, params = prompt_of(row, session.target.tokenizer), row_params(row, session.settings.sampling)
    begun = time.perf_counter()
    if view.show_drafts and params.n == 1:
        results = _stream_painted(session, prompt, params)
    elif view.json_lines or params.n > 1:
        results = session.engine.generate([prompt], params, ids=[row.id], predictions=[session.settings.prediction])
        _print_results(results, view, with_headers=True)
    else:
        results = _stream_text(session, prompt, params)
    if says_speed:
        render.stderr().print(render.summary(results, time.perf_counter() - begun), style="dim")


def _stream_text(session: Session, prompt: object, params: SamplingParams) -> list[GenerationResult]:
    results = []
    for event in session.engine.stream(prompt, params, prediction=session.settings.prediction):  # type: ignore[arg-type]
        _write(event.text)
        if event.result is not None:
            results.append(event.result)
    _write("\n")
    return results


def _stream_painted(session: Session, prompt: object, params: SamplingParams) -> list[GenerationResult]:
    console = render.stdout()
    if session.target.tokenizer is None:
        raise ConfigError("--show-drafts needs a target with a tokenizer")
    painter = render.DraftPainter(session.target.tokenizer, console)
    console.print(render.legend(console))
    results = []
    for event in session.engine.stream(prompt, params, prediction=session.settings.prediction):  # type: ignore[arg-type]
        console.print(painter.paint(event), end="")
        if event.result is not None:
            results.append(event.result)
    console.print()
    return results


def _write(text: str) -> None:
    # Half a surrogate pair can come out of a hostile vocabulary; it must not stop the output.
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def _print_results(results: Sequence[GenerationResult], view: _View, *, with_headers: bool) -> None:
    for result in results:
        if view.json_lines:
            _write(json.dumps(result.to_json(), ensure_ascii=False) + "\n")
            continue
        if with_headers:
            choice = f", choice {result.index}" if len(results) > 1 else ""
            _write(f"== {result.id}{choice} ({result.finish_reason.value})\n")
        _write(f"{result.text}\n")


@dataclass(slots=True, kw_only=True)
class _Ledger:
    """Requests of a file on their way: which were queued, what has come back."""

    num_choices: dict[str, int] = field(default_factory=dict)
    results: dict[str, list[GenerationResult]] = field(default_factory=dict)
    broken: list[BrokenLine] = field(default_factory=list)

    def take(self, result: GenerationResult) -> list[GenerationResult]:
        """Note a result; returns all choices of its request once they are there."""
        choices = self.results.setdefault(result.id, [])
        choices.append(result)
        if len(choices) < self.num_choices[result.id]:
            return []
        return sorted(choices, key=lambda choice: choice.index)


def _answer_all(session: Session, inputs: Inputs, view: _View) -> list[BrokenLine]:
    """Decode all rows together; print or store each request as it finishes. Returns the rows that were refused."""
    ledger = _Ledger()
    params = _params_of_rows(session, inputs.rows, ledger)
    rows = [row for row in inputs.rows if row.id in params]
    with _open_output(view.output, params) as store:
        if store is not None:
            rows = _rows_left(session, rows, params, store)
        for row in rows:
            _queue(session, row, params[row.id], ledger)
        begun = time.perf_counter()
        _drain(session, ledger, view, store)
    results = [result for choices in ledger.results.values() for result in choices]
    console = render.stderr()
    console.print(render.summary(results, time.perf_counter() - begun), style="dim")
    return ledger.broken


def _params_of_rows(session: Session, rows: Sequence[Row], ledger: _Ledger) -> dict[str, SamplingParams]:
    params: dict[str, SamplingParams] = {}
    for row in rows:
        try:
            params[row.id] = row_params(row, session.settings.sampling)
        except OutriderError as error:
            ledger.broken.append(BrokenLine(line=row.line, reason=str(error)))
    return params


@contextmanager
def _open_output(path: Path | None, params: dict[str, SamplingParams]) -> Iterator[ResultFile | None]:
    if path is None:
        yield None
        return
    with closing(ResultFile(path, num_choices={id: each.n for id, each in params.items()})) as store:
        if store.repaired:
            render.stderr().print(f"outrider: {path}: dropped {store.repaired} torn or incomplete lines")
        yield store


def _rows_left(
    session: Session, rows: Sequence[Row], params: dict[str, SamplingParams], store: ResultFile
) -> list[Row]:
    done = [row for row in rows if row.id in store.done]
    for row in done:
        store.check_settings(row.id, session.engine.settings(params[row.id]))
    if done:
        render.stderr().print(f"outrider: {len(done)} of {len(rows)} prompts are done already")
    return [row for row in rows if row.id not in store.done]


def _queue(session: Session, row: Row, params: SamplingParams, ledger: _Ledger) -> None:
    try:
        prompt = prompt_of(row, session.target.tokenizer)
        session.engine.submit(prompt, params, id=row.id, prediction=session.settings.prediction)
    except OutriderError as error:
        ledger.broken.append(BrokenLine(line=row.line, reason=str(error)))
        return
    ledger.num_choices[row.id] = params.n


def _drain(session: Session, ledger: _Ledger, view: _View, store: ResultFile | None) -> None:
    """Step until nothing is left. Finished requests leave at once, so an interruption costs only what is running."""
    with _progress() as progress:
        bar = progress.add_task("", total=len(ledger.num_choices), tokens=0)
        tokens = 0
        while session.engine.has_work:
            for event in session.engine.step():
                tokens += len(event.token_ids)
                progress.update(bar, tokens=tokens)
                choices = [] if event.result is None else ledger.take(event.result)
                if not choices:
                    continue
                if store is not None:
                    store.write(choices)
                if store is None or view.json_lines:
                    _print_results(choices, view, with_headers=True)
                progress.advance(bar)


def _progress() -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts · {task.fields[tokens]} tokens ·"),
        TimeRemainingColumn(),
        console=render.stderr(),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _finish(inputs: Inputs, broken: Sequence[BrokenLine]) -> None:
    """Name the broken lines; exit with 2 if there was one."""
    for line in sorted(broken, key=lambda line: line.line):
        where = f"{inputs.source}, line {line.line}: " if line.line else ""
        sys.stderr.write(f"outrider: {where}{line.reason}\n")
    if broken:
        raise typer.Exit(2)
