"""Options shared by the commands, and how a flag, a configuration file and a default become one setting.

A flag wins over the file, the file over the default. Keys of the file are the flags' names with underscores::

    target = "smollm2-135m-instruct"
    draft = "suffix"
    num_draft_tokens = 8
    temperature = 0.7
    stop = ["\\n\\n"]
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.constraints import constraint_of, prediction_of
from outrider.engine.config import EngineConfig
from outrider.errors import ConfigError, SamplingError, nearest
from outrider.sampling.params import SamplingParams

__all__ = [
    "DEFAULT_TARGET",
    "RUN_AND_ENGINE_KEYS",
    "Settings",
    "build_sampling",
    "flags_of",
    "read_config",
    "resolve_settings",
]

DEFAULT_TARGET = "smollm2-135m-instruct"

MODEL, SPECULATION, SAMPLING, OUTPUT = "Model", "Speculation", "Sampling", "Input and output"

# --- model
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-m",
        help="Alias, Hugging Face folder or hub id, or GGUF file of the model to decode.",
        show_default=DEFAULT_TARGET,
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, int8, int4 (groups of 32, a Q4_1 file's own grid), int4-g128 (groups of 128), or auto: "
        "what this processor multiplies fastest, never 4 bits.",
        show_default="auto",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, a GPU as torch names it, or auto.", show_default="auto", rich_help_panel=MODEL)
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads.", show_default="as torch sees fit", rich_help_panel=MODEL)
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False, rich_help_panel=MODEL)
]
Backend = Annotated[
    str | None,
    typer.Option(
        help="auto, native (C++ kernels for few rows; any precision but float32 on a CPU), pytorch, or paged (PyTorch over "
        "pages, for GPUs).",
        show_default="auto",
        rich_help_panel=MODEL,
    ),
]
Offline = Annotated[
    bool | None,
    typer.Option(
        "--offline", help="Use only what is on disk; fetch nothing.", show_default=False, rich_help_panel=MODEL
    ),
]
ToolRendering = Annotated[
    str | None,
    typer.Option(
        help="How chats with tools are rendered: template (refused if the model's template knows none), or system: "
        "as JSON in the system message.",
        show_default="template",
        rich_help_panel=MODEL,
    ),
]

# --- speculation
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Who proposes: none, ngram, suffix, self (an int8 copy of the target; self:dtype=int4 in 4 bits), "
        "slice:8 (its first 8 layers), random, a model with the same tokenizer, the folder of a trained head, or "
        "merged:HEAD (head and suffix in one tree), or auto:suffix,HEAD (the planner chooses, step by step). Options follow "
        "a colon: HEAD:depth=4,width=3,num_nodes=9 drafts trees.",
        show_default="auto: what was fastest in this precision on the card of the target's own head, else suffix",
        rich_help_panel=SPECULATION,
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens",
        "-k",
        help="Most draft tokens a step; 0 loads the drafter and never drafts.",
        show_default="8",
        rich_help_panel=SPECULATION,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="adaptive drafts where and as far as it pays, by measured costs (docs/planner.md); fixed always drafts k tokens.",
        show_default="adaptive",
        rich_help_panel=SPECULATION,
    ),
]
Verification = Annotated[
    str | None,
    typer.Option(
        help="auto, or compare: draw-and-compare for every request.",
        show_default="auto",
        rich_help_panel=SPECULATION,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Sequences decoded together.", show_default="64", rich_help_panel=SPECULATION),
]

# --- sampling
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="0", rich_help_panel=SAMPLING)]
TopK = Annotated[
    int | None, typer.Option(help="Keep the k likeliest tokens.", show_default="all", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the likeliest tokens up to this mass.", show_default="1", rich_help_panel=SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this share of the likeliest one's probability.",
        show_default="0",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Divides logits of tokens in prompt or output.", show_default="1", rich_help_panel=SAMPLING),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(help="Taken once from tokens in the output.", show_default="0", rich_help_panel=SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="Taken once per occurrence in the output.", show_default="0", rich_help_panel=SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Added to a token's logit; repeatable.", rich_help_panel=SAMPLING),
]
BadWords = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Must not be generated; repeatable.", rich_help_panel=SAMPLING),
]
MinTokens = Annotated[
    int | None,
    typer.Option(help="No end of sequence before this many tokens.", show_default="0", rich_help_panel=SAMPLING),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-t", help="Most output tokens.", show_default="256", rich_help_panel=SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Ends the output and is not part of it; repeatable.", rich_help_panel=SAMPLING),
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(metavar="ID", help="Ends the output too; repeatable.", rich_help_panel=SAMPLING),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos",
        help="Go on past the model's end of sequence.",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Makes the output a fixed function of the request, whatever the drafter.",
        show_default="fresh noise",
        rich_help_panel=SAMPLING,
    ),
]
NumChoices = Annotated[
    int | None, typer.Option("--n", "-n", help="Choices a prompt.", show_default="1", rich_help_panel=SAMPLING)
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Log-probabilities of the output and of the K likeliest tokens (with --json).",
        show_default="none",
        rich_help_panel=SAMPLING,
    ),
]
LogprobsMode = Annotated[
    str | None,
    typer.Option(help="raw, or processed (after the fields above).", show_default="raw", rich_help_panel=SAMPLING),
]

# --- input and output
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="TOML or JSON file of these settings; flags win over it.", rich_help_panel=OUTPUT
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.", rich_help_panel=OUTPUT)]
Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write the report as a page, too.", show_default=False, rich_help_panel=OUTPUT),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Say on standard error what every setting came to.", rich_help_panel=OUTPUT),
]

_RUN_KEYS = (
    "target",
    "draft",
    "dtype",
    "device",
    "backend",
    "threads",
    "revision",
    "offline",
    "chat",
    "tool_rendering",
    "prediction",
)
# Flag (and key of the file) on the left, field of the engine's configuration on the right.
_ENGINE_KEYS = {f.name: f.name for f in fields(EngineConfig) if f.name != "max_batch_size"} | {
    "batch_size": "max_batch_size"
}
_SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams))
RUN_AND_ENGINE_KEYS = (*_RUN_KEYS, *_ENGINE_KEYS)
"""Keys of a configuration file that say what runs and how, without the sampling fields of a request."""
_KNOWN_KEYS = (*RUN_AND_ENGINE_KEYS, *_SAMPLING_KEYS)
_TYPES: dict[str, type] = {
    "target": str,
    "draft": str,
    "dtype": str,
    "device": str,
    "backend": str,
    "threads": int,
    "revision": str,
    "offline": bool,
    "chat": bool,
    "tool_rendering": str,
    "prediction": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a command needs to decode, resolved from flags, file and defaults."""

    target: str = DEFAULT_TARGET
    draft: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    threads: int | None = None
    revision: str | None = None
    offline: bool = False
    chat: bool = True
    tool_rendering: str = "template"
    prediction: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)


def flags_of(context: typer.Context) -> dict[str, Any]:
    """The settings among a command's flags that the user really gave; a repeatable one that was not is empty."""
    given = {name: value for name, value in context.params.items() if name in _KNOWN_KEYS}
    given = {name: value for name, value in given.items() if value is not None and value not in ((), [])}
    if context.params.get("prediction") is not None:
        given["prediction"] = prediction_of(context.params)
    constraint = constraint_of(context.params)
    return given if constraint is None else {**given, "structured_outputs": constraint}


def resolve_settings(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """Merge flags, file and defaults.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a value of the wrong kind or out of range.
    """
    values = {**read_config(config, _KNOWN_KEYS), **flags}
    engine = EngineConfig.from_dict({_ENGINE_KEYS[key]: values[key] for key in values if key in _ENGINE_KEYS})
    sampling = {key: values[key] for key in values if key in _SAMPLING_KEYS}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _parse_bias(sampling["logit_bias"])
    run = {key: _checked(key, values[key]) for key in values if key in _RUN_KEYS}
    return Settings(engine=engine, sampling=build_sampling(sampling), **run)


def read_config(path: Path | None, known: Sequence[str]) -> dict[str, Any]:
    """Values of a TOML file, ``{}`` for none.

    Raises:
        ConfigError: it cannot be read, is not TOML, or holds a key that is not ``known``.
    """
    if path is None:
        return {}
    values = _parsed(path)
    for key in values:
        if key not in known:
            hint = nearest(key, known) or f"; allowed: {', '.join(known)}"
            raise ConfigError(f"config file {path}: key {key!r} is unknown{hint}")
    return values


def _parsed(path: Path) -> dict[str, Any]:
    """What the file holds: JSON if its name ends so, else TOML."""
    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if is_json else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not {'JSON' if is_json else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} holds {type(values).__name__}; allowed: an object of settings")
    return values


def _checked(key: str, value: Any) -> Any:
    allowed = _TYPES[key]
    if not isinstance(value, allowed) or (allowed is int and isinstance(value, bool)):
        kinds = {str: "a text", int: "an integer", bool: "true or false"}
        raise ConfigError(f"{key} {value!r} is not possible; allowed: {kinds[allowed]}")
    return value


def build_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """Sampling fields from named values of any kind.

    Raises:
        SamplingError: an unknown name, a value of the wrong kind or out of range.
    """
    try:
        return SamplingParams.from_dict(values)
    except (TypeError, AttributeError) as error:
        # A file may hold a number where a list belongs; the fields' own checks expect the right container.
        raise SamplingError(f"a sampling field has a value of the wrong kind: {error}") from None


def _parse_bias(given: Any) -> dict[int, float]:
    """``["42=-5"]`` from flags, or a table ``{42 = -5}`` from the file."""
    pairs = list(given.items()) if isinstance(given, Mapping) else [str(item).partition("=")[::2] for item in given]
    bias: dict[int, float] = {}
    for token, value in pairs:
        try:
            bias[int(token)] = float(value)
        except (TypeError, ValueError):
            raise SamplingError(f"logit_bias {token}={value} is not possible; allowed: ID=NUMBER, as 42=-5") from None
    return bias
