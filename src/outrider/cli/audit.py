"""``outrider audit``: evidence that speculation changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options, render
from outrider.cli.audit_calibration import calibration
from outrider.cli.audit_inputs import read_prompts, token_prompts, write_page
from outrider.cli.options import Settings
from outrider.cli.session import load_model
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.audit.identity import IdentityReport
    from outrider.audit.law import LawReport
    from outrider.drafters.base import Drafter
    from outrider.models.base import LoadedTarget
    from outrider.sampling.params import SamplingParams

__all__ = ["app", "calibration", "identity", "law"]

app = typer.Typer(
    help="Evidence that speculation changes nothing: exact laws, identical outputs, sampled tokens placed in their laws.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

app.command()(calibration)

Cases = Annotated[int, typer.Option(help="Random small worlds to enumerate.")]
LawSeed = Annotated[int, typer.Option("--seed", help="Which random worlds.")]
Drafters = Annotated[
    list[str] | None,
    typer.Option("--draft", "-d", help="Drafter to try; repeatable.", show_default="ngram, suffix, self, random"),
]
Ks = Annotated[
    list[int] | None,
    typer.Option("--num-draft-tokens", "-k", help="Draft tokens a step; repeatable.", show_default="1, 4, 8"),
]
File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Prompts: text or JSON Lines.", show_default="bundled prompts"),
]
Limit = Annotated[int | None, typer.Option(help="Use only the first prompts of the file.", show_default="all")]
Seeds = Annotated[int, typer.Option(help="How many seeded samplings to compare, besides greedy.")]
Temperature = Annotated[float, typer.Option("--temperature", help="Temperature of the seeded samplings.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-t", help="Output tokens a prompt.")]

DEFAULT_DRAFTERS = ("ngram", "suffix", "self", "random")
DEFAULT_KS = (1, 4, 8)


@app.command()
def law(cases: Cases = 200, seed: LawSeed = 0, json_lines: options.Json = False, html: options.Html = None) -> None:
    """Enumerate what the verifiers commit, exactly, and compare it with the target's own law.

    In small random worlds every draw, acceptance and correction is integrated in float64 through the very functions that
    the engine runs. The distance from plain decoding must be rounding (below 1e-12), whatever the drafter's law is.

    Examples:

    - `outrider audit law`
    - `outrider audit law --cases 1000 --seed 7`
    - `outrider audit law --json | jq .worst_total_variation`
    """
    from outrider.audit.law import audit_law

    with render.stderr().status("enumerating"):
        report = audit_law(num_cases=cases, seed=seed)
    write_page(html, lambda: _law_page(report))
    if json_lines:
        typer.echo(json.dumps(report.to_json()))
    else:
        _print_law(report)
    if not report.is_lossless:
        raise typer.Exit(1)


def _law_page(report: LawReport) -> str:
    from outrider.audit.pages import law_page

    return law_page(report)


def _identity_page(report: IdentityReport) -> str:
    from outrider.audit.pages import identity_page

    return identity_page(report)


def _print_law(report: LawReport) -> None:
    console = render.stdout()
    rows = [
        [row.kind, str(row.cases), str(row.branches), f"{row.worst:.1e}", "exact" if row.is_lossless else "BIASED"]
        for row in report.rows
    ]
    console.print(render.table(["verification", "worlds", "branches", "worst distance", "verdict"], rows))
    console.print()
    worst = f"worst total variation distance {report.worst:.1e}"
    console.print(f"{report.verdict}: {report.cases} worlds (seed {report.seed}), {worst}")


@app.command()
def identity(
    context: typer.Context,
    file: File = None,
    limit: Limit = None,
    drafters: Drafters = None,
    ks: Ks = None,
    seeds: Seeds = 1,
    sampling_temperature: Temperature = 0.8,
    tokens: MaxTokens = 64,
    json_lines: options.Json = False,
    html: options.Html = None,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    batch_size: options.BatchSize = 8,
) -> None:
    """Decode prompts with and without speculation and compare the outputs token by token.

    Greedy output, and output with a seed, must not change by one token. A difference is explained by reading the shared
    text again: a **tie** is a score gap below a tolerance that a plain-against-plain control sets (float32: at most
    1e-4); anything else is a **bug**, and the exit status is 1.

    Examples:

    - `outrider audit identity`
    - `outrider audit identity --dtype float32 -d ngram -d self -k 1 -k 8`
    - `outrider audit identity -f prompts.jsonl --limit 20 --seeds 3 -t 128 --json`
    """
    settings = options.resolve_settings(options.flags_of(context), None)
    sampling = _samplings(seeds, sampling_temperature, tokens)
    inputs = None if file is None else read_prompts(file, limit)
    with render.stderr().status("loading the model") as status:
        model = load_model(settings)
        report = _audit(
            model,
            token_prompts(model, inputs),
            drafters or list(DEFAULT_DRAFTERS),
            ks or list(DEFAULT_KS),
            sampling,
            settings,
            lambda arm: status.update(f"decoding: {arm}"),
        )
    write_page(html, lambda: _identity_page(report))
    if json_lines:
        typer.echo(json.dumps(report.to_json()))
    else:
        _print_identity(report)
    if not report.is_lossless:
        raise typer.Exit(1)


def _samplings(seeds: int, temperature: float, max_tokens: int) -> dict[str, SamplingParams]:
    from outrider.sampling.params import SamplingParams

    if seeds < 0:
        raise ConfigError(f"--seeds {seeds} is not possible; allowed: 0 or more")
    greedy = SamplingParams(max_tokens=max_tokens)
    seeded = {
        f"temperature {temperature:g}, seed {seed}": replace(greedy, temperature=temperature, seed=seed)
        for seed in range(1, seeds + 1)
    }
    return {"greedy": greedy, **seeded}


def _audit(
    model: LoadedTarget,
    prompts: Mapping[str, Sequence[int]],
    drafters: Sequence[str],
    ks: Sequence[int],
    sampling: Mapping[str, SamplingParams],
    settings: Settings,
    say: Callable[[str], None],
) -> IdentityReport:
    from outrider.audit.identity import audit_identity
    from outrider.drafters.build import make_drafter

    for k in ks:
        replace(settings.engine, num_draft_tokens=k)  # refuses an impossible k before anything is decoded
    return audit_identity(
        model,
        prompts,
        drafters={spec: _fresh(partial(make_drafter, spec, model)) for spec in drafters},
        num_draft_tokens=ks,
        sampling=sampling,
        config=settings.engine,
        on_arm=say,
    )


def _fresh(make: Callable[[], Drafter | None]) -> Callable[[], Drafter | None]:
    """Make one drafter now, so that a mistake in its name is found before anything is decoded; further ones later."""
    ready = [make()]
    return lambda: ready.pop() if ready else make()


def _print_identity(report: IdentityReport) -> None:
    console = render.stdout()
    console.print(f"target {report.target}, {report.precision} on {report.device}, weights {report.fingerprint[:12]}")
    console.print(render.describe_control(report.control))
    console.print()
    rows = [
        [
            arm.drafter,
            str(arm.num_draft_tokens),
            arm.sampling,
            f"{arm.num_identical} of {arm.num_outputs}",
            str(arm.num_tokens),
            f"{arm.accepted} of {arm.drafted}",
            arm.verdict,
        ]
        for arm in report.arms
    ]
    columns = ["drafter", "k", "sampling", "identical", "tokens", "drafts kept", "verdict"]
    console.print(render.table(columns, rows))
    console.print()
    for difference in report.differences:
        console.print(render.describe_difference(difference))
    if any(arm.verdict == "void" for arm in report.arms):
        console.print("void: nothing was drafted there, so nothing was proved; try longer outputs or other prompts")
    console.print("every output is the target's own" if report.is_lossless else "NOT lossless: see the bugs above")
