"""``outrider serve``: an OpenAI-compatible server around one engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options, render
from outrider.cli.options import RUN_AND_ENGINE_KEYS, Settings, read_config, resolve_settings
from outrider.cli.session import Session, open_session
from outrider.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from outrider.serve.auth import KeyRing
    from outrider.serve.config import ServeConfig

__all__ = ["serve"]

SERVER, LIMITS = "Server", "Limits"

Host = Annotated[
    str | None,
    typer.Option(
        help="Address to listen on. 0.0.0.0 is every network of this machine: give keys then.",
        show_default="127.0.0.1",
        rich_help_panel=SERVER,
    ),
]
Port = Annotated[
    int | None,
    typer.Option("--port", "-p", help="TCP port; 0 takes a free one.", show_default="8000", rich_help_panel=SERVER),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File of API keys, one a line: KEY, or NAME KEY. The variable OUTRIDER_API_KEYS (commas between keys) adds "
        "to it. Without keys everybody who can connect may use the server.",
        show_default=False,
        rich_help_panel=SERVER,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(help="Name that requests give as model.", show_default="the target's", rich_help_panel=SERVER),
]
ToolFormat = Annotated[
    str | None,
    typer.Option(
        help="How the model writes tool calls: auto (by its template), hermes, qwen, smollm or llama.",
        show_default="auto",
        rich_help_panel=SERVER,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Further name that the Host header may carry on a loopback server without keys (a proxy's); repeatable.",
        rich_help_panel=SERVER,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--max-batch-size",
        "--batch-size",
        help="Sequences decoded together; more wait.",
        show_default="64",
        rich_help_panel=LIMITS,
    ),
]
CacheMemory = Annotated[
    float | None,
    typer.Option(
        "--cache-memory-gb",
        metavar="GB",
        help="Most memory for keys and values of all requests and cached prefixes, in 10^9 bytes; past it requests wait.",
        show_default="half of what is free",
        rich_help_panel=LIMITS,
    ),
]
MaxWaiting = Annotated[
    int | None,
    typer.Option(
        help="Requests that may wait; one more is refused with 429 and Retry-After.",
        show_default="256",
        rich_help_panel=LIMITS,
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Most time for a request, waiting included (408).",
        show_default="600",
        rich_help_panel=LIMITS,
    ),
]
DrainTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Most time that running requests get after SIGTERM.",
        show_default="60",
        rich_help_panel=LIMITS,
    ),
]
MaxBody = Annotated[
    int | None,
    typer.Option(metavar="BYTES", help="Largest request body (413).", show_default="4194304", rich_help_panel=LIMITS),
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", help="Longest prompt.", show_default="the window's", rich_help_panel=LIMITS),
]
MaxChoices = Annotated[
    int | None,
    typer.Option(help="Most outputs of one request: prompts x n.", show_default="128", rich_help_panel=LIMITS),
]

# Flag (and key of the file) on the left, field of the server's configuration on the right.
_SERVE_KEYS = {
    "host": "host",
    "port": "port",
    "model_name": "model_name",
    "tool_format": "tool_format",
    "allowed_host": "allowed_hosts",
    "max_waiting": "max_waiting",
    "request_timeout": "request_timeout_s",
    "drain_timeout": "drain_timeout_s",
    "max_body": "max_body_bytes",
    "max_prompt_tokens": "max_prompt_tokens",
    "max_choices": "max_choices",
}
_KEYS = (*_SERVE_KEYS, "api_key_file", *RUN_AND_ENGINE_KEYS)


def serve(
    context: typer.Context,
    config: options.Config = None,
    host: Host = None,
    port: Port = None,
    api_key_file: ApiKeyFile = None,
    model_name: ModelName = None,
    tool_format: ToolFormat = None,
    allowed_host: AllowedHost = None,
    max_waiting: MaxWaiting = None,
    batch_size: BatchSize = None,
    cache_memory_gb: CacheMemory = None,
    request_timeout: RequestTimeout = None,
    drain_timeout: DrainTimeout = None,
    max_body: MaxBody = None,
    max_prompt_tokens: MaxPromptTokens = None,
    max_choices: MaxChoices = None,
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
) -> None:
    """Serve the model over HTTP, as OpenAI's API has it, for this machine only unless you say otherwise.

    Endpoints: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/metrics` (Prometheus), and a page to try
    it at `/`. A request may bring any field that OpenAI or vLLM knows: it is honoured, or refused with a 400 that names it.
    SIGTERM ends the server once everything accepted is finished.

    Examples:

    - `outrider serve --draft suffix`
    - `outrider serve --target model.gguf --port 9000 --max-waiting 32`
    - `outrider serve --host 0.0.0.0 --api-key-file keys.txt --config serve.toml`

    Ask it: `curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{"messages": [{"role": "user",
    "content": "Hello"}]}'`
    """
    plan = _resolve(_given(context), config)
    bound = plan.bind()
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("outrider.serve").setLevel(logging.INFO)
    session = open_session(plan.settings)
    _announce(plan, session)

    from outrider.serve.run import serve as listen

    def say_ready() -> None:
        name, number = bound.getsockname()[:2]
        shown = f"[{name}]" if ":" in name else name
        typer.echo(f"outrider: ready on http://{shown}:{number}")

    listen(session.engine, bound, config=plan.server, keys=plan.keys, on_ready=say_ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything that was decided before the model is loaded."""

    settings: Settings
    server: ServeConfig
    keys: KeyRing

    def bind(self) -> Any:
        from outrider.serve.run import bind

        return bind(self.server)


def _given(context: typer.Context) -> dict[str, Any]:
    """The flags that the user really gave."""
    return {
        name: value for name, value in context.params.items() if name in _KEYS and value is not None and value != []
    }


def _resolve(flags: Mapping[str, Any], config: Path | None) -> _Plan:
    """Merge flags, file and defaults.

    Raises:
        ConfigError: an unknown key, a value that is not possible, a key file that cannot be used.
        MissingExtra: the server's packages are not installed.
    """
    try:
        from outrider.serve.auth import read_keys
        from outrider.serve.config import ServeConfig
        from outrider.serve.run import bind  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"the server needs the package {error.name!r}; install the extra: pip install 'outrider[serve]'"
        ) from None

    values = {**read_config(config, _KEYS), **flags}
    key_file = values.get("api_key_file")
    if not isinstance(key_file, str | Path | None):
        raise ConfigError(f"api_key_file {key_file!r} is not possible; allowed: a path")
    server = {_SERVE_KEYS[key]: values[key] for key in values if key in _SERVE_KEYS}
    run = {key: values[key] for key in values if key in RUN_AND_ENGINE_KEYS}
    return _Plan(
        settings=resolve_settings(run, None),
        server=ServeConfig.from_dict(server),
        keys=read_keys(None if key_file is None else Path(key_file)),
    )


def _announce(plan: _Plan, session: Session) -> None:
    """Say on standard error what every setting came to, and what is risky about them."""
    described = session.describe()
    del described["sampling"]
    described["server"] = plan.server.to_json()
    described["api_keys"] = "none: everybody who can connect may use it" if plan.keys.is_open else "required"
    render.print_settings(described, render.stderr())
    if plan.keys.is_open and not plan.server.is_loopback:
        render.stderr().print(
            f"outrider: warning: listening on {plan.server.host} without API keys; give --api-key-file", style="yellow"
        )
