"""``outrider audit calibration``: is sampled output a draw from the target's own law?"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options, render
from outrider.cli.audit_inputs import read_prompts, token_prompts, write_page
from outrider.cli.options import Settings
from outrider.cli.session import load_model
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.audit.calibration import CalibrationSettings
    from outrider.audit.calibration_report import CalibrationReport, SelfTestReport
    from outrider.audit.sources import OutputSource
    from outrider.drafters.base import Drafter
    from outrider.models.base import LoadedTarget

__all__ = ["calibration"]

WHAT, SERVER = "What is audited", "A server instead of this engine"
DEFAULTS = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 64}

File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Prompts: text or JSON Lines.", show_default="bundled", rich_help_panel=WHAT),
]
Limit = Annotated[
    int | None, typer.Option(help="Use only the first prompts.", show_default="all", rich_help_panel=WHAT)
]
Tokens = Annotated[int, typer.Option("--tokens", help="Output tokens to look at, of each arm.", rich_help_panel=WHAT)]
Null = Annotated[
    str,
    typer.Option(
        "--null",
        help="auto, one-sample (against the recomputed law) or two-sample (against the plain arm).",
        rich_help_panel=WHAT,
    ),
]
Order = Annotated[
    str,
    typer.Option(
        "--processor-order",
        help="Whose order of sampling fields: vllm (ours), sglang, llama.cpp, transformers, tgi, or stages joined by commas.",
        rich_help_panel=WHAT,
    ),
]
AuditSeed = Annotated[int, typer.Option("--audit-seed", help="Of everything drawn here.", rich_help_panel=WHAT)]
SelfTest = Annotated[
    bool,
    typer.Option(
        "--self-test",
        help="Plant faults in the engine and show that each is caught (drafter: the head that came along, or a slice).",
        rich_help_panel=WHAT,
    ),
]
FaultNames = Annotated[
    list[str] | None,
    typer.Option("--fault", help="Plant only these; repeatable.", show_default="all", rich_help_panel=WHAT),
]
Endpoint = Annotated[
    str | None,
    typer.Option(help="Base URL of a server that serves the target.", show_default=False, rich_help_panel=SERVER),
]
EndpointModel = Annotated[
    str | None,
    typer.Option(help="Name the server knows the target by.", show_default="the target's", rich_help_panel=SERVER),
]
EndpointKind = Annotated[str, typer.Option(help="openai (vLLM, SGLang), llama.cpp or tgi.", rich_help_panel=SERVER)]
PlainEndpoint = Annotated[
    str | None,
    typer.Option(help="The same server without speculation: the null.", show_default=False, rich_help_panel=SERVER),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(help="Environment variable with the key.", show_default=False, rich_help_panel=SERVER),
]
Retokenise = Annotated[
    bool,
    typer.Option("--retokenise", help="Without token ids, tokenise the text again (risky).", rich_help_panel=SERVER),
]
Parallel = Annotated[int, typer.Option("--parallel", help="Requests under way.", rich_help_panel=SERVER)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """The flags that name a server."""

    url: str | None
    plain_url: str | None
    model: str | None
    kind: str
    api_key_env: str | None
    may_retokenise: bool
    num_parallel: int


def calibration(
    context: typer.Context,
    file: File = None,
    limit: Limit = None,
    num_tokens: Tokens = 20_000,
    null: Null = "auto",
    processor_order: Order = "vllm",
    audit_seed: AuditSeed = 0,
    self_test: SelfTest = False,
    fault: FaultNames = None,
    endpoint: Endpoint = None,
    endpoint_model: EndpointModel = None,
    endpoint_kind: EndpointKind = "openai",
    plain_endpoint: PlainEndpoint = None,
    api_key_env: ApiKeyEnv = None,
    retokenise: Retokenise = False,
    parallel: Parallel = 16,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    draft: options.Draft = None,
    num_draft_tokens: options.NumDraftTokens = None,
    verification: options.Verification = None,
    batch_size: options.BatchSize = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    bad_words: options.BadWords = None,
    min_tokens: options.MinTokens = None,
    max_tokens: options.MaxTokens = None,
    config: options.Config = None,
    json_lines: options.Json = False,
    html: options.Html = None,
) -> None:
    """Decode with fresh noise, read the answers again, and hold every token against the law it should be drawn from.

    Sampled text cannot be compared with other sampled text, but every token can be placed in its own law: the target reads
    the answer again, applies the sampling fields, and says how likely each token was. Draws from that law fill it evenly;
    drafts that are favoured, a temperature on one side, a penalty forgotten behind a draft do not. A sound engine is accused
    once in 1000 audits; the report says how small a deviation this many tokens can see.

    Temperature is 0.8 and top_p 0.95 unless you say otherwise. With `--endpoint` a server is asked (it must return token
    ids) and the target's weights are read here; `--plain-endpoint` is the same server without speculation, which tells a
    fault from its other arithmetic. Exit status 1: biased, or nothing proved.

    Examples:

    - `outrider audit calibration -d ngram`
    - `outrider audit calibration -d slice:20 -k 4 --temperature 1.3 --repetition-penalty 1.2 --html audit.html`
    - `outrider audit calibration --endpoint http://localhost:8000/v1 --plain-endpoint http://localhost:8001/v1 -f rows.jsonl`
    - `outrider audit calibration --self-test`
    """
    defaults = DEFAULTS if config is None else {}
    settings = options.resolve_settings({**defaults, **options.flags_of(context)}, config)
    settings = replace(settings, engine=replace(settings.engine, schedule="fixed"))
    server = _Server(
        url=endpoint,
        plain_url=plain_endpoint,
        model=endpoint_model,
        kind=endpoint_kind,
        api_key_env=api_key_env,
        may_retokenise=retokenise,
        num_parallel=parallel,
    )
    from outrider.audit.calibration import CalibrationSettings

    asked = CalibrationSettings(
        num_tokens=num_tokens, null=null, order=processor_order, seed=audit_seed, is_foreign=endpoint is not None
    )
    _check_flags(server, self_test, fault, draft)
    inputs = None if file is None else read_prompts(file, limit)
    with render.stderr().status("loading the model") as status:
        model = load_model(settings)
        prompts = token_prompts(model, inputs)
        if self_test:
            tested = _self_test(model, prompts, settings, asked, fault, status.update)
            _show_self_test(tested, json_lines, html)
            is_good = tested.is_right
        else:
            report = _audit(model, prompts, settings, asked, server, status.update)
            _show(report, json_lines, html)
            is_good = report.is_sound
    if not is_good:
        raise typer.Exit(1)


def _check_flags(server: _Server, self_test: bool, faults: Sequence[str] | None, draft: str | None) -> None:
    if server.plain_url is not None and server.url is None:
        raise ConfigError("--plain-endpoint is the null of an --endpoint; give both")
    if self_test and server.url is not None:
        raise ConfigError("--self-test plants faults in this engine; leave --endpoint out")
    if faults and not self_test:
        raise ConfigError("--fault names a planted fault; give --self-test, too")
    if draft == "none" and server.url is None and not self_test:
        raise ConfigError("--draft none drafts nothing, so there is nothing to audit; give another drafter")


def _audit(
    model: LoadedTarget,
    prompts: Mapping[str, Sequence[int]],
    settings: Settings,
    asked: CalibrationSettings,
    server: _Server,
    say: Callable[[str], None],
) -> CalibrationReport:
    from outrider.audit.calibration import audit_calibration

    is_unnamed = settings.draft in (Settings().draft, "none")
    make = None if server.url is not None and is_unnamed else _maker(settings.draft, model)
    source, plain = _sources(model, settings, asked, server, make)
    return audit_calibration(
        model,
        prompts,
        source=source,
        plain=plain,
        params=settings.sampling,
        make_drafter=make,
        settings=asked,
        on_progress=say,
    )


def _sources(
    model: LoadedTarget,
    settings: Settings,
    asked: CalibrationSettings,
    server: _Server,
    make: Callable[[], Drafter] | None,
) -> tuple[OutputSource, OutputSource | None]:
    if server.url is not None:
        plain = None if server.plain_url is None else _endpoint(model, settings, server, server.plain_url)
        return _endpoint(model, settings, server, server.url), plain
    assert make is not None
    return _engine(model, settings, asked, make(), 2), _engine(model, settings, asked, None, 3)


def _engine(
    model: LoadedTarget, settings: Settings, asked: CalibrationSettings, drafter: Drafter | None, stream: int
) -> OutputSource:
    import numpy as np

    from outrider.audit.sources import EngineSource

    noise = np.random.default_rng([asked.seed, stream])
    return EngineSource(model, drafter=drafter, config=settings.engine, params=settings.sampling, noise=noise)


def _endpoint(model: LoadedTarget, settings: Settings, server: _Server, url: str) -> OutputSource:
    from outrider.audit.endpoint import EndpointSource

    return EndpointSource(
        url,
        kind=server.kind,
        model=server.model or settings.target,
        params=settings.sampling,
        spec=model.spec,
        tokenizer=model.tokenizer,
        api_key_env=server.api_key_env,
        num_parallel=server.num_parallel,
        may_retokenise=server.may_retokenise,
    )


def _maker(spec: str, model: LoadedTarget) -> Callable[[], Drafter]:
    """Makers of fresh drafters: a mistake in the name is found at once, and a draft model is loaded once."""
    from outrider.drafters.build import make_drafter
    from outrider.drafters.lm import LMDrafter

    first = make_drafter(spec, model)
    if isinstance(first, LMDrafter):
        lm, size = first, model.spec.vocab_size
        return lambda: LMDrafter(lm.model, name=lm.name, tree=lm.tree, vocab_size=size)
    ready = [first]

    def make() -> Drafter:
        drafter = ready.pop() if ready else make_drafter(spec, model)
        assert drafter is not None, "a drafter of this name was made before"
        return drafter

    return make


def _self_test(
    model: LoadedTarget,
    prompts: Mapping[str, Sequence[int]],
    settings: Settings,
    asked: CalibrationSettings,
    names: Sequence[str] | None,
    say: Callable[[str], None],
) -> SelfTestReport:
    from outrider.audit.faults import FAULTS, fault_named
    from outrider.audit.selftest import self_test
    from outrider.drafters.shipped import head_for

    draft = settings.draft
    if draft == Settings().draft:
        # Faults of speculation show where drafts are drawn from a law of their own, and kept.
        draft = head_for(model) or f"slice:{max(1, 2 * model.spec.num_layers // 3)}"
    return self_test(
        model,
        prompts,
        make_drafter=_maker(draft, model),
        params=settings.sampling,
        config=settings.engine,
        settings=asked,
        faults=[fault_named(name) for name in names] if names else FAULTS,
        on_progress=say,
    )


def _show(report: CalibrationReport, json_lines: bool, html: Path | None) -> None:
    from outrider.audit import pages
    from outrider.audit.calibration_report import VERDICTS

    write_page(html, lambda: pages.calibration_page(report))
    if json_lines:
        typer.echo(json.dumps(report.to_json()))
        return
    console = render.stdout()
    console.print(f"target {report.target}, {report.precision} on {report.device}, weights {report.fingerprint[:12]}")
    console.print(
        f"{report.tokens} tokens in {report.outputs} answers to {report.prompts} prompts; null: {report.null}"
    )
    console.print(render.describe_control(report.control))
    console.print()
    columns = ["number", "stratum", "tokens", "mean", "z", "detectable"]
    console.print(render.table(columns, [pages.channel_cells(each) for each in report.channels], left=2))
    console.print()
    _print_lines({**pages.weight_of(report), **_drafted(report)})
    for line in report.unchecked:
        console.print(f"not checked: {line}")
    for repeat in report.repeats:
        console.print(f"noise used twice: prompt {repeat.prompt_id}, {repeat.tokens} equal tokens")
    console.print(f"{report.verdict}: {VERDICTS[report.verdict]}")


def _drafted(report: CalibrationReport) -> dict[str, str]:
    if report.speculation is None:
        return {}
    s = report.speculation
    return {"drafts kept": f"{s.accepted} of {s.drafted}; {render.number(s.tokens_per_pass)} tokens a pass"}


def _print_lines(values: Mapping[str, Any]) -> None:
    console = render.stdout()
    for name, value in values.items():
        console.print(f"{name}: {value}")


def _show_self_test(report: SelfTestReport, json_lines: bool, html: Path | None) -> None:
    from outrider.audit.pages import selftest_page

    write_page(html, lambda: selftest_page(report))
    if json_lines:
        typer.echo(json.dumps(report.to_json()))
        return
    console = render.stdout()
    rows = [
        [
            row.fault,
            row.sampling,
            "caught" if row.is_caught else "not accused",
            str(row.tokens),
            row.cause,
        ]
        for row in report.rows
    ]
    console.print(f"target {report.target}, {report.precision}, {report.path}, weights {report.fingerprint[:12]}")
    console.print(f"drafter {report.drafter}, {report.num_draft_tokens} draft tokens")
    console.print(render.table(["planted fault", "sampling", "verdict", "tokens", "cause"], rows, left=3))
    good = "every planted fault was caught, and the sound engine was not accused"
    console.print(good if report.is_right else "NOT as it should be: see the table")
