"""``outrider demo``: the whole idea on this machine, in a minute and a half."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options, render
from outrider.cli.options import Settings
from outrider.cli.session import load_model
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.measure.paired import PairedReport, PromptPair
    from outrider.models.base import LoadedTarget

__all__ = ["demo"]

Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts and tokens, one repeat: about 20 seconds.")]
FULL_TOKENS, QUICK_TOKENS = 128, 48
FULL_REPEATS, QUICK_PROMPTS = 2, 3


def demo(
    context: typer.Context,
    quick: Quick = False,
    json_lines: options.Json = False,
    config: options.Config = None,
    target: options.Target = None,
    draft: options.Draft = None,
    num_draft_tokens: options.NumDraftTokens = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
) -> None:
    """Decode bundled prompts plainly and with drafts, turn by turn, and compare speed and output.

    Prints for each prompt both speeds, tokens a pass, acceptance, the speed-up that the pass times predict beside the
    one that was measured, and whether both ways gave the same tokens. A difference is shown with its score gap.

    Examples:

    - `outrider demo`
    - `outrider demo --quick`
    - `outrider demo --draft ngram -k 4 --dtype int8`
    - `outrider demo --json > demo.json`
    """
    settings = options.resolve_settings(options.flags_of(context), config)
    if settings.draft == "none":
        raise ConfigError("the demo compares plain decoding with a drafter; give --draft another value than none")
    if not settings.sampling.is_greedy and settings.sampling.seed is None:
        raise ConfigError("the demo compares outputs; give --temperature 0 or a --seed")
    console = render.stderr()
    with console.status("loading the model") as status:
        model = load_model(settings)
        report = _compare(model, settings, quick, max_tokens, lambda name: status.update(f"decoding: {name}"))
    if json_lines:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        _print_report(report, model)
    if not report.is_lossless:
        raise typer.Exit(1)


def _compare(
    model: LoadedTarget, settings: Settings, quick: bool, max_tokens: int | None, say: Callable[[str], None]
) -> PairedReport:
    from dataclasses import replace

    from outrider.drafters.build import make_drafter
    from outrider.measure.paired import compare_paired
    from outrider.measure.workloads import bundled

    if model.tokenizer is None:
        raise ConfigError(f"{settings.target} has no tokenizer; the demo's prompts are text")
    tokenizer = model.tokenizer
    prompts = bundled(num_prompts=QUICK_PROMPTS if quick else None)
    limit = max_tokens or (QUICK_TOKENS if quick else FULL_TOKENS)
    return compare_paired(
        model,
        {prompt.name: tokenizer.encode_chat(prompt.messages) for prompt in prompts},
        kinds={prompt.name: prompt.kind for prompt in prompts},
        make_drafter=lambda: make_drafter(settings.draft, model),
        params=replace(settings.sampling, max_tokens=limit),
        config=replace(settings.engine, max_batch_size=1),
        repeats=1 if quick else FULL_REPEATS,
        on_run=say,
    )


def _print_report(report: PairedReport, model: LoadedTarget) -> None:
    console = render.stdout()
    reason, note = model.placement.reason, model.checkpoint_note
    used = report.settings
    because = f" ({reason})" if reason else ""
    console.print(
        f"target    {used['target']} in {used['precision']}{because} on {used['device']}, {used['path']} path"
    )
    if note:
        console.print(f"          {note}")
    console.print(
        f"drafter   {used['drafter']}, at most {used['engine']['num_draft_tokens']} draft tokens, "
        f"{used['threads']} threads, {report.repeats} interleaved repeats"
    )
    costs = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in report.row_costs_ms.items())
    console.print(f"a pass    milliseconds by rows: {costs}")
    console.print()
    columns = ["prompt", "tokens", "plain", "spec.", "tok/pass", "accepted", "predicted", "measured", "output"]
    console.print(render.table(columns, [_row(pair) for pair in (*report.prompts, report.overall)]))
    console.print()
    console.print("plain and spec. are tokens a second, decode passes only; docs/glossary.md defines the rest.")
    _print_identity(report)


def _row(pair: PromptPair) -> list[str]:
    return [
        pair.name,
        str(pair.num_tokens),
        render.number(pair.plain_speed, 1),
        render.number(pair.speculative_speed, 1),
        render.number(pair.tokens_per_pass),
        render.percent(pair.acceptance_rate),
        render.number(pair.predicted, unit="x"),
        render.number(pair.measured, unit="x"),
        "identical" if pair.is_identical else "differs",
    ]


def _print_identity(report: PairedReport) -> None:
    console = render.stdout()
    num_prompts, identical = len(report.prompts), sum(pair.is_identical for pair in report.prompts)
    if report.control is None:
        console.print(f"All {num_prompts} outputs are identical, token by token.", style="green")
        return
    for difference in report.differences:
        console.print(render.describe_difference(difference))
    console.print(render.describe_control(report.control))
    hint = "" if report.settings["precision"] == "float32" else "; rounding is finer with --dtype float32"
    rest = (
        f"every difference is a tie that rounding decides{hint}" if report.is_lossless else "NOT lossless: bugs above"
    )
    console.print(f"{identical} of {num_prompts} outputs are identical; {rest}.")
