"""``outrider doctor``: why is acceptance low?"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options, render
from outrider.cli.inputs import Inputs, read_file, read_inputs
from outrider.cli.options import Settings
from outrider.cli.session import load_model, prompt_of
from outrider.errors import ConfigError, DataError, PromptError

if TYPE_CHECKING:
    from outrider.audit.doctor.case import Case
    from outrider.audit.doctor.report import DoctorReport, Finding
    from outrider.models.base import LoadedTarget

__all__ = ["doctor"]

EXAMINED, REPORT = "What is examined", "Report"

Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Drafter to examine: the folder of a head, or any other drafter of `outrider generate`.",
        show_default=False,
        rich_help_panel=EXAMINED,
    ),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="Requests: JSON Lines or a text. They should be those that acceptance is low on.",
        show_default="bundled prompts",
        rich_help_panel=EXAMINED,
    ),
]
Limit = Annotated[int, typer.Option(help="Use the first requests of the file.", rich_help_panel=EXAMINED)]
Tokens = Annotated[int, typer.Option("--max-tokens", "-t", help="Tokens of an answer.", rich_help_panel=EXAMINED)]
K = Annotated[int, typer.Option("--num-draft-tokens", "-k", help="Draft tokens a step.", rich_help_panel=EXAMINED)]
Raw = Annotated[
    bool, typer.Option("--raw", help="Hand plain prompts to the model as bare text.", rich_help_panel=EXAMINED)
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="URL|FILE",
        help="Read the counters of a running vLLM, SGLang, llama.cpp or Outrider server instead of decoding; --draft then "
        "names the head for its card.",
        show_default=False,
        rich_help_panel=EXAMINED,
    ),
]
NoSpeed = Annotated[
    bool,
    typer.Option("--no-speed", help="Leave the cost of drafting out (on a busy machine).", rich_help_panel=EXAMINED),
]


def doctor(
    context: typer.Context,
    draft: Draft = None,
    file: File = None,
    limit: Limit = 16,
    max_tokens: Tokens = 64,
    num_draft_tokens: K = 4,
    temperature: options.Temperature = None,
    raw: Raw = False,
    metrics: Metrics = None,
    no_speed: NoSpeed = False,
    json_lines: options.Json = False,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    revision: options.Revision = None,
    offline: options.Offline = None,
    tool_rendering: options.ToolRendering = None,
) -> None:
    """Name the causes of low acceptance, the likeliest first, with evidence and what to do.

    A head's folder is held against the target: tokens, template, layers, tensors, fingerprint. Then the requests are
    decoded, and the same head is measured on the same answers in other wirings (other layers, norm flags, meaning of d2t,
    window), at temperature 0 and with the target unquantised. A cause is **proved** if the mended variant keeps more beyond
    noise.

    Exit status: 0 healthy, 1 something was found, 2 a mistake in the command.

    Examples:

    - `outrider doctor --draft my-head --target my-model -f requests.jsonl`
    - `outrider doctor --draft my-head -f requests.jsonl --temperature 0.8 --json`
    - `outrider doctor --draft suffix -f requests.jsonl --limit 40`
    - `outrider doctor --metrics http://localhost:8000/metrics --draft my-head`
    """
    if metrics is not None:
        report = _examine_counts(metrics, draft)
    elif draft is None:
        raise ConfigError("--draft is missing; give the drafter to examine, or --metrics of a running server")
    else:
        settings = options.resolve_settings(options.flags_of(context), None)
        report = _examine(settings, file, limit, raw=raw, is_timed=not no_speed)
    if json_lines:
        typer.echo(json.dumps(report.to_json()))
    else:
        _print(report)
    if not report.is_healthy:
        raise typer.Exit(1)


def _examine_counts(source: str, draft: str | None) -> DoctorReport:
    from outrider.audit.doctor.metrics_text import examine_counts, read_counts
    from outrider.drafters.head_folder import read_head

    info = None if draft is None else read_head(draft).info
    return examine_counts(read_counts(_fetched(source), source=source), info, subject=draft or source)


def _fetched(source: str) -> str:
    """Prometheus text from a server or a file."""
    if not source.startswith(("http://", "https://")):
        return read_file(Path(source)).decode("utf-8", "replace")
    url = source if source.rstrip("/").count("/") > 2 else f"{source.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        raise DataError(f"{url} answered {error.code}; give the address of the server's metrics") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{url} does not answer: {error}; is the server running?") from None
    return body.decode("utf-8", "replace")


def _examine(settings: Settings, file: Path | None, limit: int, *, raw: bool, is_timed: bool) -> DoctorReport:
    from outrider.audit.doctor.examine import examine

    inputs = None if file is None else _read(file, limit, chat=not raw)
    with render.stderr().status("loading the model") as status:
        model = load_model(settings)
        case = _case(model, settings, inputs, raw=raw)
        return examine(replace(case, is_timed=is_timed, say=status.update))


def _read(file: Path, limit: int, *, chat: bool) -> Inputs:
    if limit < 1:
        raise ConfigError(f"--limit {limit} is not possible; allowed: 1 or more")
    inputs = read_inputs(None, file, chat=chat)
    if inputs.broken:
        first = inputs.broken[0]
        raise DataError(f"{inputs.source}, line {first.line}: {first.reason}")
    return replace(inputs, rows=inputs.rows[:limit])


def _case(model: LoadedTarget, settings: Settings, inputs: Inputs | None, *, raw: bool) -> Case:
    from outrider.audit.doctor.case import Case
    from outrider.drafters.build import resolve_draft

    if model.tokenizer is None:
        raise ConfigError("this target has no tokenizer, and requests are text")
    as_chats: dict[str, list[list[int]]] = {}
    if raw and inputs is not None and model.tokenizer.has_chat_template:
        texts = [row.prompt for row in inputs.rows if isinstance(row.prompt, str)]
        chats = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
        as_chats = {"as chats": chats} if len(chats) == len(inputs.rows) else {}
    return Case(
        target=model,
        draft=resolve_draft(settings.draft, model),
        prompts=_prompts(model, inputs),
        params=settings.sampling,
        num_draft_tokens=settings.engine.num_draft_tokens,
        renderings=as_chats,
        offline=settings.offline,
    )


def _prompts(model: LoadedTarget, inputs: Inputs | None) -> list[list[int]]:
    from outrider.engine.request import build_request
    from outrider.measure.workloads import BUNDLED
    from outrider.sampling.params import SamplingParams

    if inputs is None:
        assert model.tokenizer is not None
        return [model.tokenizer.encode_chat(prompt.messages) for prompt in BUNDLED]
    found = []
    for row in inputs.rows:
        prompt = prompt_of(row, model.tokenizer)
        try:
            request = build_request(
                prompt, SamplingParams(), id=row.id, seed=0, spec=model.spec, tokenizer=model.tokenizer
            )
        except PromptError as error:
            raise PromptError(f"request {row.id!r}: {error}") from None
        found.append(list(request.prompt))
    return found


def _print(report: DoctorReport) -> None:
    console = render.stdout()
    requests = f", {report.num_requests} requests" if report.num_requests else ""
    precision = f" in {report.precision}" if report.precision else ""
    console.print(f"{report.subject} for {report.target}{precision}{requests}", markup=False)
    console.print(report.verdict, style="bold", markup=False)
    console.print()
    if report.found:
        console.print(render.table(["", "cause", "found by", "lies in"], _rows(report.found), left=4))
        console.print()
    for number, finding in enumerate(report.found, start=1):
        console.print(f"{number}. {finding.title}", style="bold", markup=False)
        console.print(f"   evidence: {finding.evidence}", markup=False)
        if finding.remedy:
            console.print(f"   what to do: {finding.remedy}", markup=False)
        console.print()
    for finding in report.findings:
        if not finding.is_found:
            console.print(f"{finding.status}: {finding.cause}: {finding.evidence}", style="dim", markup=False)


_FOUND_BY = {
    "proved": "measurement: mended, it keeps more",
    "refused": "loading: it is refused",
    "seen": "comparison",
}


def _rows(found: Sequence[Finding]) -> list[list[str]]:
    from outrider.audit.doctor.report import PLACES

    return [
        [str(number), finding.cause, _FOUND_BY[finding.status], PLACES[finding.place]]
        for number, finding in enumerate(found, start=1)
    ]
