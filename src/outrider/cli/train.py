"""``outrider train``: make a drafter for a target from one's own traffic."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text as RichText

from outrider.cli import options, render
from outrider.cli.inputs import read_file, read_rows
from outrider.cli.session import load_model
from outrider.errors import ConfigError, nearest

if TYPE_CHECKING:
    from outrider.drafters.eagle_config import EagleConfig
    from outrider.drafters.head_folder import LoadedHead
    from outrider.models.base import LoadedTarget
    from outrider.train.answers import AnswerSettings, AnswerSource
    from outrider.train.config import TrainConfig
    from outrider.train.corpus import Corpus, Turns
    from outrider.train.run import Job

__all__ = ["app", "eagle3"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Train a drafter on your own traffic.")

DATA, RECIPE, HEAD, RUN = "Data", "Recipe", "Head", "Run"


def _option(help: str, panel: str, *names: str, default: str | bool = False) -> Any:
    return typer.Option(*names, help=help, show_default=default, rich_help_panel=panel)


Traffic = Annotated[
    Path,
    typer.Argument(
        metavar="TRAFFIC.jsonl",
        help="JSON Lines: messages, prompt or ShareGPT conversations a line.",
        show_default=False,
    ),
]
Out = Annotated[Path | None, _option("Folder of the head; made if it is not there.", RUN, "--out", "-o")]
Answers = Annotated[
    str,
    _option(
        "target: the target answers each prompt (best); keep: train on the file's answers.", DATA, default="target"
    ),
]
Temperatures = Annotated[
    str, _option("Rows take these in turns when the target answers.", DATA, "--temperature", default="0,0.7,1.0")
]
MaxAnswerTokens = Annotated[int, _option("Most tokens of an answer.", DATA, default="256")]
Endpoint = Annotated[
    str | None,
    _option("Base URL of a server with OpenAI's interface that serves the target; it answers instead.", DATA),
]
EndpointModel = Annotated[str | None, _option("What that server calls the model.", DATA, default="the target's name")]
TurnsOption = Annotated[
    str, _option("Train on all assistant turns of a chat, or on the last.", DATA, "--turns", default="all")
]
MaxLength = Annotated[int, _option("Most tokens of a text, prompt included.", DATA, default="2048")]
Limit = Annotated[int | None, _option("Use the first rows only.", DATA, default="all")]
HeldOut = Annotated[
    int, _option("Texts never trained on, decoded by the engine to choose the best head.", DATA, default="16")
]
HeldOutTokens = Annotated[int, _option("Tokens decoded of each.", DATA, default="64")]
Preview = Annotated[int | None, _option("Print this many rows with the trained tokens marked, and stop.", DATA)]
Epochs = Annotated[int, _option("Times that each text is shown.", RECIPE, default="3")]
Positions = Annotated[
    int | None, _option("Stop after so many loss-masked positions.", RECIPE, default="when the epochs are over")
]
BatchPositions = Annotated[int, _option("Loss-masked positions an update.", RECIPE, default="1024")]
LearningRate = Annotated[
    float, _option("Highest learning rate of AdamW (warm-up, then a cosine).", RECIPE, "--lr", default="0.001")
]
Unroll = Annotated[int, _option("Steps of training-time test: how deep the head learns to draft.", RECIPE, default="4")]
StepDecay = Annotated[float, _option("Weight of each step relative to the one before.", RECIPE, default="0.8")]
Loss = Annotated[
    str, _option("ce, kl, tv (how often a drawn draft is refused) or lk (their hybrid).", RECIPE, default="ce")
]
WeightDecay = Annotated[float, _option("Weight decay of matrices.", RECIPE, default="0.01")]
ClipNorm = Annotated[float, _option("Most norm of a gradient.", RECIPE, default="1")]
Warmup = Annotated[float, _option("Share of updates that warm up.", RECIPE, default="0.03")]
LawTokens = Annotated[int, _option("Likeliest tokens kept of each of the target's laws.", RECIPE, default="128")]
SeedOption = Annotated[int, _option("Of answers, start weights and order.", RECIPE, "--seed", default="0")]
TapsAt = Annotated[
    str | None,
    _option(
        "Layers whose input is tapped, as 2,15,27; the number of layers is the last output.",
        HEAD,
        "--tap-layers",
        default="low, middle, high",
    ),
]
DraftVocab = Annotated[int, _option("Tokens that the head can propose, the most frequent ones.", HEAD, default="8192")]
Layers = Annotated[int, _option("Layers of the head.", HEAD, default="1")]
Init = Annotated[
    str,
    _option(
        "First weights: random, target-head (LM head and norm), target-layer:29 (that layer, too), or head:HEAD "
        "(go on from a trained head, with its shape and draft vocabulary).",
        HEAD,
        default="target-head",
    ),
]
HeadOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        metavar="KEY=VALUE",
        help="Another field of the head, as norm_before_residual=true, intermediate_size=1024; repeatable.",
        rich_help_panel=HEAD,
    ),
]
TapsMode = Annotated[
    str,
    _option(
        "live: the target runs for each batch; store: once, into shards on disk (faster from two epochs on).",
        RUN,
        "--taps",
        default="live",
    ),
]
DiskBudget = Annotated[float, _option("Most gigabytes of stored taps.", RUN, default="20")]
Resume = Annotated[bool, _option("Go on with the run in --out; give the same options.", RUN, "--resume")]
EvaluateEvery = Annotated[int, _option("Updates between evaluations.", RUN, default="a tenth of the run")]
SaveEvery = Annotated[float, _option("Seconds between checkpoints.", RUN, default="120")]


@app.callback()
def root() -> None:
    """Train a drafter on your own traffic."""


@app.command(name="eagle3", no_args_is_help=True)
def eagle3(
    context: typer.Context,
    traffic: Traffic,
    out: Out = None,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    revision: options.Revision = None,
    offline: options.Offline = None,
    tool_rendering: options.ToolRendering = None,
    answers: Answers = "target",
    temperature: Temperatures = "0,0.7,1.0",
    max_answer_tokens: MaxAnswerTokens = 256,
    batch_size: options.BatchSize = 64,
    endpoint: Endpoint = None,
    endpoint_model: EndpointModel = None,
    turns: TurnsOption = "all",
    max_length: MaxLength = 2048,
    limit: Limit = None,
    held_out: HeldOut = 16,
    held_out_tokens: HeldOutTokens = 64,
    preview: Preview = None,
    epochs: Epochs = 3,
    positions: Positions = None,
    batch_positions: BatchPositions = 1024,
    lr: LearningRate = 1e-3,
    unroll: Unroll = 4,
    step_decay: StepDecay = 0.8,
    loss: Loss = "ce",
    weight_decay: WeightDecay = 0.01,
    clip_norm: ClipNorm = 1.0,
    warmup: Warmup = 0.03,
    law_tokens: LawTokens = 128,
    seed: SeedOption = 0,
    tap_layers: TapsAt = None,
    draft_vocab: DraftVocab = 8192,
    layers: Layers = 1,
    init: Init = "target-head",
    head: HeadOptions = None,
    taps: TapsMode = "live",
    disk_budget: DiskBudget = 20.0,
    resume: Resume = False,
    evaluate_every: EvaluateEvery = 0,
    save_every: SaveEvery = 120.0,
) -> None:
    """Train an EAGLE-3 head: a small layer that reads the target's hidden states and proposes its next tokens.

    The target answers the prompts of your traffic, the head learns to foresee those answers, and the engine measures on
    held-out prompts how many tokens a pass it brings. The best head lies in `--out`, ready for `--draft`. An interrupted
    run goes on with `--resume`; answers and stored taps are kept in any case. The head never changes what the target says.

    Examples:

    - `outrider train eagle3 traffic.jsonl --preview 3`
    - `outrider train eagle3 traffic.jsonl --out my-head --limit 200`
    - `outrider train eagle3 traffic.jsonl --out my-head --taps store --epochs 8 --init target-layer:29`
    - `outrider generate "Hello" --draft my-head`
    """
    # Read when PyTorch is loaded: its threads are not to spin where the kernels' own threads want to run.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from outrider.device import keep_prepared_products

    flags = context.params
    settings = options.resolve_settings({k: v for k, v in options.flags_of(context).items() if k in _MODEL_KEYS}, None)
    _check_words(flags)
    config = _config(flags)
    if preview is None and out is None:
        raise ConfigError("--out is missing; give the folder that the head is to lie in")
    keep_prepared_products()
    model = load_model(settings)
    corpus = _read(traffic, model, flags)
    if preview is not None:
        _preview(corpus, model, preview)
        return
    with _Screen() as screen:
        from outrider.train.run import train_eagle

        job = _job(model, corpus, config, flags)
        train_eagle(job, screen)


_MODEL_KEYS = ("target", "dtype", "device", "backend", "threads", "revision", "offline", "tool_rendering")
_WORDS = {"answers": ("target", "keep"), "turns": ("all", "last"), "taps": ("live", "store")}


def _check_words(flags: dict[str, Any]) -> None:
    for name, allowed in _WORDS.items():
        if flags[name] not in allowed:
            hint = nearest(str(flags[name]), allowed)
            raise ConfigError(f"--{name} {flags[name]!r} is unknown; allowed: {', '.join(allowed)}{hint}")
    for name in ("limit", "preview", "max_length", "batch_size"):
        if flags[name] is not None and flags[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {flags[name]} is not possible; allowed: 1 or more")
    if flags["held_out"] < 0 or flags["held_out_tokens"] < 2:
        raise ConfigError("--held-out must be 0 or more, --held-out-tokens 2 or more")
    if flags["endpoint"] and flags["answers"] == "keep":
        raise ConfigError("--endpoint answers prompts and --answers keep leaves answers alone; give one of them")


def _config(flags: dict[str, Any]) -> TrainConfig:
    from outrider.train.config import TrainConfig

    return TrainConfig(
        num_epochs=flags["epochs"],
        max_positions=flags["positions"],
        batch_positions=flags["batch_positions"],
        learning_rate=flags["lr"],
        warmup_share=flags["warmup"],
        weight_decay=flags["weight_decay"],
        clip_norm=flags["clip_norm"],
        unroll=flags["unroll"],
        step_decay=flags["step_decay"],
        loss=flags["loss"],
        num_law_tokens=flags["law_tokens"],
        seed=flags["seed"],
        evaluate_every=flags["evaluate_every"],
        save_every_s=flags["save_every"],
    )


def _read(path: Path, model: LoadedTarget, flags: dict[str, Any]) -> Corpus:
    from outrider.train.corpus import read_corpus

    if model.tokenizer is None:
        raise ConfigError("this target has no tokenizer, and traffic is text")
    wants_answers = flags["answers"] == "target"
    inputs = read_rows(read_file(path), name=str(path), keep_answers=not wants_answers)
    inputs = replace(inputs, rows=inputs.rows[: flags["limit"]])
    turns: Turns = "all" if flags["turns"] == "all" else "last"
    return read_corpus(
        inputs,
        model.tokenizer,
        wants_answers=wants_answers,
        max_length=min(flags["max_length"], model.spec.max_positions),
        turns=turns,
    )


def _preview(corpus: Corpus, model: LoadedTarget, num_rows: int) -> None:
    """Rows as the head sees them; trained tokens green, between marks that survive a pipe."""
    from outrider.train.corpus import marked_runs

    assert model.tokenizer is not None
    console = render.stdout()
    for text in corpus.texts[:num_rows]:
        waits = "" if text.num_trained or not text.messages else ", the target's answer follows"
        header = f"row {text.id} (line {text.line}): {len(text.tokens)} tokens, {text.num_trained} trained{waits}"
        console.print(header, style="bold", markup=False)
        line = RichText()
        for run, is_trained in marked_runs(text, model.tokenizer):
            line.append(f"⟦{run}⟧" if is_trained else run, style="green" if is_trained else "dim")
        console.print(line)
    for reason, lines in corpus.skipped.items():
        shown = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
        console.print(f"left out: {len(lines)} {reason} (lines {shown})", markup=False)


def _job(model: LoadedTarget, corpus: Corpus, config: TrainConfig, flags: dict[str, Any]) -> Job:
    from outrider.train.corpus import summary_of
    from outrider.train.run import Job
    from outrider.train.start import Start

    start = Start.parse(flags["init"], model.spec.num_layers)
    return Job(
        target=model,
        corpus=corpus,
        out=flags["out"],
        config=config,
        shape=_shape(model, flags) if start.head is None else _shape_of(start.head, model, flags),
        start=start,
        answers=_answers(model, flags),
        taps="store" if flags["taps"] == "store" else "live",
        disk_budget_bytes=round(flags["disk_budget"] * 1e9),
        max_length=min(flags["max_length"], model.spec.max_positions),
        num_held_out=flags["held_out"],
        held_out_tokens=flags["held_out_tokens"],
        summary={"file": flags["traffic"].name, "answers": flags["answers"], **summary_of(corpus)},
        is_resumed=flags["resume"],
    )


def _answers(model: LoadedTarget, flags: dict[str, Any]) -> tuple[AnswerSettings, AnswerSource] | None:
    from outrider.train.answers import AnswerSettings, EndpointAnswers, EngineAnswers

    if flags["answers"] == "keep":
        return None
    try:
        temperatures = tuple(float(part) for part in flags["temperature"].split(","))
    except ValueError:
        raise ConfigError(f"--temperature {flags['temperature']!r} is not a list of numbers, as 0,0.7,1.0") from None
    settings = AnswerSettings(
        temperatures=temperatures,
        max_tokens=flags["max_answer_tokens"],
        seed=flags["seed"],
        batch_size=flags["batch_size"],
    )
    if flags["endpoint"] is None:
        return settings, EngineAnswers(model, batch_size=flags["batch_size"])
    assert model.tokenizer is not None
    name = flags["endpoint_model"] or model.spec.name
    return settings, EndpointAnswers(flags["endpoint"], model=name, tokenizer=model.tokenizer)


def _shape(model: LoadedTarget, flags: dict[str, Any]) -> EagleConfig:
    from outrider.drafters.eagle_config import EagleConfig

    changes: dict[str, Any] = {"num_layers": flags["layers"], "max_positions": flags["max_length"]}
    if flags["tap_layers"] is not None:
        try:
            changes["tap_layers"] = tuple(int(part) for part in flags["tap_layers"].split(","))
        except ValueError:
            raise ConfigError(f"--tap-layers {flags['tap_layers']!r} is not a list of layers, as 2,15,27") from None
        if max(changes["tap_layers"]) > model.spec.num_layers:
            raise ConfigError(f"--tap-layers {flags['tap_layers']}: allowed are 0 to {model.spec.num_layers}")
    changes |= _head_options(flags["head"] or [], {field.name: field.type for field in fields(EagleConfig)})
    size = min(flags["draft_vocab"], model.spec.vocab_size)
    return EagleConfig.for_target(model.checkpoint.config, draft_vocab_size=size, **changes)


def _shape_of(start: LoadedHead, model: LoadedTarget, flags: dict[str, Any]) -> EagleConfig:
    """The shape of a head that training goes on from; a flag that asks for another is refused."""
    from outrider.drafters.head_folder import check_target

    check_target(start.head.config, model.spec, str(start.folder))
    for name, default in (("tap_layers", None), ("layers", 1), ("draft_vocab", 8192), ("head", None)):
        if flags[name] not in (default, []):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is part of the head that --init {flags['init']} goes on from; leave {flag} out")
    return replace(start.head.config, max_positions=max(flags["max_length"], start.head.config.max_positions))


def _head_options(given: list[str], known: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in given:
        name, _, value = item.partition("=")
        if known.get(name) not in ("int", "bool"):
            raise ConfigError(
                f"--head {item!r}: {name!r} is not a field of a head that can be set{nearest(name, known)}"
            )
        is_flag = known[name] == "bool"
        if value not in ("true", "false") if is_flag else not value.isdecimal():
            raise ConfigError(f"--head {item!r}: {name} is {'true or false' if is_flag else 'a number'}")
        found[name] = value == "true" if is_flag else int(value)
    return found


class _Screen:
    """Lines and progress bars on standard error."""

    def __init__(self) -> None:
        self._console = render.stderr()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[note]} ·"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Something worth a line."""
        self._console.print(line, markup=False)

    def progress(self, stage: str, done: float, total: float, note: str = "") -> None:
        """How far a stage is."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, note=note)
        self._progress.update(self._tasks[stage], completed=done, note=note)
