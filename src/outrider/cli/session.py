"""From settings to a loaded model and an engine."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.cli.inputs import Row
from outrider.cli.options import Settings, build_sampling
from outrider.errors import ConfigError, PromptError
from outrider.sampling.params import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.models.base import LoadedTarget
    from outrider.models.chat import ToolRendering
    from outrider.models.tokenizer import Tokenizer

__all__ = ["Session", "load_model", "open_session", "prompt_of", "row_params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A loaded target and the engine around it."""

    settings: Settings
    target: LoadedTarget
    engine: Engine

    def describe(self) -> dict[str, Any]:
        """Every effective setting, ``auto`` resolved, as JSON values."""
        described = self.engine.settings(self.settings.sampling)
        described["precision_reason"] = self.target.placement.reason or "as asked for"
        described["weights"] = self.target.checkpoint_note
        described["chat"] = self.settings.chat
        described["tool_rendering"] = self.settings.tool_rendering
        return described


def load_model(settings: Settings) -> LoadedTarget:
    """Load the target alone; a first fetch is announced on standard error."""
    from outrider.device import set_num_threads
    from outrider.models.load import load_target

    if settings.threads is not None:
        set_num_threads(settings.threads)
    return load_target(
        settings.target,
        dtype=settings.dtype,
        device=settings.device,
        backend=settings.backend,
        revision=settings.revision,
        offline=settings.offline,
        tool_rendering=_tool_rendering(settings.tool_rendering),
        progress=lambda line: print(f"outrider: {line}", file=sys.stderr),
    )


def open_session(settings: Settings) -> Session:
    """Load target and drafter and build the engine."""
    from outrider.drafters.build import make_drafter, resolve_draft
    from outrider.engine.engine import Engine

    target = load_model(settings)
    settings = replace(settings, draft=resolve_draft(settings.draft, target))
    drafter = make_drafter(settings.draft, target, offline=settings.offline)
    engine = Engine(target, drafter=drafter, config=settings.engine)
    return Session(settings=settings, target=target, engine=engine)


def _tool_rendering(given: str) -> ToolRendering:
    if given == "template":
        return "template"
    if given == "system":
        return "system"
    raise ConfigError(f"tool_rendering {given!r} is unknown; allowed: template, system")


def prompt_of(row: Row, tokenizer: Tokenizer | None) -> Any:
    """What the engine is handed for a row; a chat with tools is rendered here, since the engine takes messages only."""
    if row.tools is None:
        return row.prompt
    if tokenizer is None:
        raise PromptError("this target has no tokenizer; give the prompt as token ids")
    assert isinstance(row.prompt, list)
    messages = [message for message in row.prompt if isinstance(message, dict)]
    return tokenizer.encode_chat(messages, tools=row.tools)


def row_params(row: Row, base: SamplingParams) -> SamplingParams:
    """Sampling fields of a row: its own, then the command's.

    Raises:
        SamplingError: a field of the row is not possible.
    """
    return build_sampling({**asdict(base), **row.sampling}) if row.sampling else base
