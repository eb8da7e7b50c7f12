"""``outrider models``: what can be loaded by name, and how it would run here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli import options, render

if TYPE_CHECKING:
    from outrider.models.fetch import ModelInfo

__all__ = ["models"]


def models(json_lines: options.Json = False, device: options.Device = None) -> None:
    """List the models that have a short name, and say which precision `auto` means on this machine.

    Besides these names, `--target` takes a GGUF file, a Hugging Face folder or a hub id of a Llama model. A model is
    fetched when it is first used; nothing is fetched here.

    Examples:

    - `outrider models`
    - `outrider models --json | jq .auto`
    """
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
