"""``outrider export`` and ``outrider import``: heads to and from the engines that one runs in production."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options, render
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.export.check import CheckReport
    from outrider.export.folder import Exported
    from outrider.models.checkpoint import Checkpoint

__all__ = ["export", "import_head"]

Head = Annotated[Path, typer.Argument(metavar="HEAD", help="Folder of a head.", show_default=False)]
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a head in the layout of vLLM or SGLang.", show_default=False)
]
To = Annotated[str, typer.Option("--to", help="Engine that is to run the head: vllm or sglang.", show_default=False)]
ExportOut = Annotated[Path, typer.Option("--out", "-o", help="Folder to write; new or empty.", show_default=False)]
ImportOut = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder of the head; made if it is not there.", show_default=False)
]
ExportTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-m",
        help="The target, where it is not found by the name in the head.",
        show_default="the head's own",
    ),
]
ImportTarget = Annotated[
    str | None,
    typer.Option("--target", "-m", help="The target; needed for heads that others made.", show_default=False),
]
WithEmbedding = Annotated[
    bool, typer.Option("--with-embedding", help="Write the target's embedding too, for loaders that do not share it.")
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Engine whose numbering of taps the folder follows: vllm or sglang.",
        show_default="what the folder says, else vllm",
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Only check the folder: every key, every tensor; status 1 if unsound.")
]


def export(
    head: Head,
    to: To,
    out: ExportOut,
    target: ExportTarget = None,
    with_embedding: WithEmbedding = False,
    json_lines: options.Json = False,
    offline: options.Offline = None,
) -> None:
    """Write a head for vLLM or SGLang, and check what was written.

    Weights are copied bit for bit. Options of a head that the engine cannot honour are refused by name. Each key of the
    written config is listed with what the engine's version does with it.

    Examples:

    - `outrider export my-head --to vllm --out my-head-vllm`
    - `outrider export my-head --to sglang --out my-head-sglang --json`
    """
    from outrider.drafters.head_folder import read_head
    from outrider.export.check import check_exported
    from outrider.export.folder import engine_named, export_head

    engine, found = engine_named(to), read_head(head)
    checkpoint = _open(target or found.info.target_name, offline)
    exported = export_head(found, checkpoint, engine, out, with_embedding=with_embedding)
    report = check_exported(exported)
    _show(report, exported, json_lines)
    if not json_lines:
        render.stdout().print(_use(to, out), markup=False, highlight=False, soft_wrap=True)
    _end(report)


def import_head(
    folder: Folder,
    out: ImportOut = None,
    target: ImportTarget = None,
    source: From = None,
    check: Check = False,
    json_lines: options.Json = False,
    offline: options.Offline = None,
) -> None:
    """Read a head in the layout of vLLM or SGLang into one of Outrider's, or check one with `--check`.

    Examples:

    - `outrider import my-head-vllm --out my-head`
    - `outrider import public-head --out my-head --target my-model`
    - `outrider import my-head-vllm --check`
    """
    from outrider.export import folder as folders
    from outrider.export.check import check_exported

    if check == (out is not None):
        raise ConfigError("give either --out, the folder of the head, or --check")
    exported = folders.read_exported(folder, engine=folders.engine_named(source) if source else None)
    checkpoint = _open(target, offline) if target else None
    if out is None:
        report = check_exported(exported, num_target_layers=checkpoint.config.num_layers if checkpoint else None)
        _show(report, exported, json_lines)
        _end(report)
        return
    head = folders.import_head(exported, out, checkpoint=checkpoint)
    if json_lines:
        typer.echo(json.dumps({"head": str(out), "target": head.info.target_name, "tensors": len(exported.tensors)}))
    else:
        typer.echo(f"{out}: {len(exported.tensors)} tensors, for target {head.info.target_name}")


def _open(name: str, offline: bool | None) -> Checkpoint:
    """The target without its weights."""
    from outrider.models.load import load_checkpoint

    def announce(line: str) -> None:
        print(f"outrider: {line}", file=sys.stderr)

    return load_checkpoint(name, offline=bool(offline), progress=announce)


def _show(report: CheckReport, exported: Exported, json_lines: bool) -> None:
    """Keys with their use, tensors in one line, problems last."""
    if json_lines:
        typer.echo(json.dumps({"folder": str(exported.folder), **report.to_json()}))
        return
    console = render.stdout()
    for key in report.keys:
        value = json.dumps(key.value, ensure_ascii=False)
        shown = value if len(value) <= 48 else value[:45] + "..."
        note = f" ({key.note})" if key.note else ""
        line = f"{'used   ' if key.is_used else 'ignored'}  {key.key} = {shown}{note}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    sound = sum(not each.problem for each in report.tensors)
    num_bytes = sum(tensor.nbytes for tensor in exported.tensors.values())
    console.print(f"{sound} of {len(report.tensors)} tensors as the config asks for, {num_bytes / 1e6:.1f} MB")
    console.print(f"{len(report.ids)} draft ids looked up")
    for problem in report.problems:
        console.print(f"problem: {problem}", markup=False, highlight=False, soft_wrap=True)
    verdict = "sound" if report.is_sound else "not sound"
    console.print(f"{exported.folder}: {verdict} for {report.engine}", markup=False, highlight=False, soft_wrap=True)


def _use(engine: str, out: Path) -> str:
    """How the engine is started with it; MODEL is the target's folder or hub id."""
    if engine == "vllm":
        settings = json.dumps({"method": "eagle3", "model": str(out), "num_speculative_tokens": 4})
        return f"vllm serve MODEL --speculative-config '{settings}'"
    return (
        f"python -m sglang.launch_server --model-path MODEL --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {out} --speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 5"
    )


def _end(report: CheckReport) -> None:
    if not report.is_sound:
        raise typer.Exit(1)
