"""``outrider models``: what can be loaded by name, how it would run here, and what its passes cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options, render
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.engine.costs import CostTable
    from outrider.models.fetch import ModelInfo

__all__ = ["models"]

Costs = Annotated[
    bool,
    typer.Option(
        "--costs",
        help="Time passes of --target and drafts of --draft on this machine, now, and keep the table for the planner.",
    ),
]


def models(
    context: typer.Context,
    json_lines: options.Json = False,
    device: options.Device = None,
    costs: Costs = False,
    target: options.Target = None,
    dtype: options.Dtype = None,
    backend: options.Backend = None,
    threads: options.Threads = None,
    draft: options.Draft = None,
) -> None:
    """List the models that have a short name, and say which precision `auto` means on this machine.

    Besides these names, `--target` takes a GGUF file, a Hugging Face folder or a hub id of a Llama model. A model is
    fetched when it is first used; nothing is fetched here.

    Examples:

    - `outrider models`
    - `outrider models --json | jq .auto`
    - `outrider models --costs --target smollm2-135m-instruct --draft self` (what the planner reckons with)
    """
    if costs:
        _print_costs(options.resolve_settings(options.flags_of(context), None), json_lines)
        return
    given = {"target": target, "dtype": dtype, "backend": backend, "threads": threads, "draft": draft}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name} says nothing about the list of models; give --costs as well, or leave it out")
    from outrider.models.fetch import list_models

    found, auto = list_models(), _auto(device or "auto")
    if json_lines:
        typer.echo(json.dumps({"models": [_plain(model) for model in found], "auto": auto}))
        return
    console = render.stdout()
    for model in found:
        console.print(f"{model.alias}: {model.quantisation}, {model.num_bytes / 1e6:.0f} MB, {model.licence}")
        where = f"cached: {model.path}" if model.cached else f"not cached; fetched at first use: {model.source}"
        console.print(f"  {where}")
    console.print()
    console.print(f"precisions: {', '.join(auto['precisions'])}; auto is {auto['precision']}, since {auto['reason']}")
    console.print(f"device: auto is {auto['device']}, {auto['threads']} threads")


def _print_costs(settings: options.Settings, json_lines: bool) -> None:
    from outrider.cli.session import load_model
    from outrider.device import one_torch_thread
    from outrider.drafters.build import make_drafter
    from outrider.drafters.portfolio import members_of
    from outrider.engine.measure_costs import cost_file, keep, measure_costs

    target = load_model(settings)
    members = members_of(make_drafter(settings.draft, target))
    with one_torch_thread(target.spec.path.startswith("native")):
        table = measure_costs(target, members)
    path = cost_file(target, members)
    keep(path, table, target, members)
    if json_lines:
        typer.echo(json.dumps({"target": target.spec.name, "path": target.spec.path, "costs": table.to_json()}))
        return
    console = render.stdout()
    console.print(f"{target.spec.name}, {target.spec.precision}, {target.spec.path}; kept in {path}", soft_wrap=True)
    for line in _cost_lines(table):
        console.print(line)


def _cost_lines(table: CostTable) -> list[str]:
    """The table in words, milliseconds."""
    passes = zip(table.passes.rows, table.passes.ms, strict=True)
    lines = [f"pass over {rows:4d} rows: {ms:8.2f} ms" for rows, ms in passes]
    lines.append(f"each further sequence: {table.sequence_ms:.3f} ms")
    lines.append(f"each row behind 1000 more cached tokens: {1000 * table.attended_ms:.3f} ms")
    for name, costs in table.drafts.items():
        lines.append(
            f"drafter {name}: call {costs.fixed:.3f} ms, level {costs.level:.3f}, sequence {costs.sequence:.3f}, "
            f"sequence and level {costs.node:.3f}, missed token {costs.row:.4f}"
        )
    return lines


def _plain(model: ModelInfo) -> dict[str, Any]:
    return {
        "alias": model.alias,
        "source": model.source,
        "licence": model.licence,
        "num_bytes": model.num_bytes,
        "quantisation": model.quantisation,
        "cached": model.cached,
        "path": str(model.path),
    }


def _auto(device: str) -> dict[str, Any]:
    import torch

    from outrider.device import PRECISIONS, resolve_placement

    placement = resolve_placement("auto", device)
    return {
        "precision": placement.precision,
        "reason": placement.reason,
        "device": str(placement.device),
        "threads": torch.get_num_threads(),
        "precisions": list(PRECISIONS),
    }
