"""Prompts of the audits: a file's rows, or the bundled ones, as token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.inputs import Inputs, Row, read_inputs
from outrider.cli.session import prompt_of
from outrider.errors import ConfigError, DataError, OutriderError, PromptError

if TYPE_CHECKING:
    from outrider.models.base import LoadedTarget

__all__ = ["read_prompts", "token_prompts", "write_page"]


def read_prompts(file: Path, limit: int | None) -> Inputs:
    """The first rows of a file; a broken one is an error, since an audit must be of what was asked for."""
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} is not possible; allowed: 1 or more")
    inputs = read_inputs(None, file)
    if inputs.broken:
        first = inputs.broken[0]
        raise DataError(f"{inputs.source}, line {first.line}: {first.reason}")
    return replace(inputs, rows=inputs.rows[:limit])


def token_prompts(model: LoadedTarget, inputs: Inputs | None) -> dict[str, list[int]]:
    """Token ids by name: the file's rows, or the bundled prompts."""
    from outrider.measure.workloads import BUNDLED

    if model.tokenizer is None:
        raise ConfigError("this target has no tokenizer, and the audit's prompts are text")
    if inputs is None:
        return {prompt.name: model.tokenizer.encode_chat(prompt.messages) for prompt in BUNDLED}
    return {row.id: _token_ids(row, model) for row in inputs.rows}


def write_page(path: Path | None, make: Callable[[], str]) -> None:
    """Write a report as HTML, if a path was given."""
    if path is None:
        return
    try:
        path.write_text(make(), encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"--html {path} cannot be written: {error.strerror}") from None


def _token_ids(row: Row, model: LoadedTarget) -> list[int]:
    from outrider.engine.request import build_request
    from outrider.sampling.params import SamplingParams

    prompt = prompt_of(row, model.tokenizer)
    try:
        request = build_request(prompt, SamplingParams(), id=row.id, seed=0, spec=model.spec, tokenizer=model.tokenizer)
    except PromptError as error:
        raise PromptError(f"prompt {row.id!r}: {error}") from None
    return list(request.prompt)
