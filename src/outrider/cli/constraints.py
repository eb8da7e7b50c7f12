"""Flags that say what the output must look like, and how they become one ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.inputs import read_file
from outrider.errors import ConfigError, DataError
from outrider.sampling.constraint import StructuredOutputs

__all__ = [
    "CONSTRAINT_FLAGS",
    "Choice",
    "Grammar",
    "JsonObject",
    "JsonSchema",
    "NoWhitespace",
    "Prediction",
    "Regex",
    "constraint_of",
    "prediction_of",
]

_PANEL = "Constraints"

JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="The output is JSON that fits the schema in this file (- reads standard input).",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
JsonObject = Annotated[
    bool | None,
    typer.Option("--json-object", help="The output is a JSON object.", show_default=False, rich_help_panel=_PANEL),
]
Regex = Annotated[
    str | None,
    typer.Option(metavar="EXPRESSION", help="The whole output matches it.", show_default=False, rich_help_panel=_PANEL),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="The output is one of these; repeatable.", rich_help_panel=_PANEL),
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The output matches the Lark grammar in this file (- reads standard input).",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
NoWhitespace = Annotated[
    bool | None,
    typer.Option(
        "--no-whitespace",
        help="JSON without blanks between its parts; more of it is forced, which is faster.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
Prediction = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A text that the output may largely repeat: drafts are copied from it.",
        show_default=False,
        rich_help_panel="Speculation",
    ),
]

CONSTRAINT_FLAGS = ("json_schema", "json_object", "regex", "choice", "grammar", "no_whitespace")


def constraint_of(flags: Mapping[str, Any]) -> StructuredOutputs | None:
    """The constraint that a command's flags name, ``None`` if they name none.

    Raises:
        SamplingError: several at once, or one that cannot be right.
        DataError: a file that cannot be read.
        ConfigError: two files from standard input.
    """
    given = {name: flags[name] for name in CONSTRAINT_FLAGS if flags.get(name) not in (None, False, [], ())}
    if not given:
        return None
    files = [given[name] for name in ("json_schema", "grammar") if name in given]
    if [str(path) for path in files].count("-") > 1:
        raise ConfigError("--json-schema and --grammar cannot both be read from standard input; give one of them")
    return StructuredOutputs(
        json=_read(given.get("json_schema")),
        json_object=given.get("json_object", False),
        regex=given.get("regex"),
        choice=given.get("choice", ()),
        grammar=_read(given.get("grammar")),
        disable_any_whitespace=given.get("no_whitespace", False),
    )


def prediction_of(flags: Mapping[str, Any]) -> str | None:
    """The text of ``--prediction``, ``None`` without one.

    Raises:
        DataError: a file that cannot be read.
    """
    return _read(flags.get("prediction"))


def _read(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None
