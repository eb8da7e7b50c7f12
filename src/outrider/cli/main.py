"""The ``outrider`` command: which commands there are, and how mistakes are reported.

A user's mistake is one line on standard error and exit status 2. A command interrupted by Ctrl-C exits with 130, one
whose reader went away (``| head``) with 1. Anything else is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from outrider.cli import audit, demo, doctor, export, generate, measure, models, serve, train
from outrider.errors import OutriderError

__all__ = ["app", "main"]

app = typer.Typer(
    name="outrider",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="generate", no_args_is_help=True)(generate.generate)
app.command(name="measure", no_args_is_help=True)(measure.measure)
app.command(name="demo")(demo.demo)
app.command(name="serve")(serve.serve)
app.command(name="doctor", no_args_is_help=True)(doctor.doctor)
app.command(name="models")(models.models)
app.command(name="export", no_args_is_help=True)(export.export)
app.command(name="import", no_args_is_help=True)(export.import_head)
app.add_typer(audit.app, name="audit")
app.add_typer(train.app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        from outrider import __version__

        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding: the same output, fewer passes of the model.

    Begin with `outrider demo`: it decodes with and without speculation on this machine, compares the outputs token by
    token, and prints what it gained.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        status = app(args=None if argv is None else list(argv), prog_name="outrider", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except OutriderError as error:
        return _complain(str(error))
    except typer.TyperException as error:
        message = _usage_message(error)
        return _complain(message) if message else 2
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _complain(message: str) -> int:
    sys.stderr.write(f"outrider: {' '.join(message.split())}\n")
    return 2


def _usage_message(error: typer.TyperException) -> str:
    format_message = getattr(error, "format_message", None)
    message = format_message() if format_message is not None else str(error)
    if not message:  # a command without arguments has printed its help already
        return ""
    context = getattr(error, "ctx", None)
    return f"{message} See {context.command_path} --help." if context is not None else message
