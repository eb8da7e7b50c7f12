"""Opens a Hugging Face folder or hub id as a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend

from outrider.errors import ModelNotFound, UnsupportedModel
from outrider.models.chat import ToolRendering
from outrider.models.checkpoint import Checkpoint, TensorSource, check_tensors
from outrider.models.fingerprint import TensorBytes, fingerprint
from outrider.models.hf_config import read_config
from outrider.models.hf_weights import open_weights
from outrider.models.reading import parsing, read_json, read_text
from outrider.models.tokenizer import Tokenizer

__all__ = ["open_folder", "open_hub"]

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
_SAFETENSORS_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
_PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")

Snapshot = Callable[[list[str]], str]
"""Downloads the files that match some patterns and returns the folder."""


def open_folder(folder: Path, *, name: str, source: str = "", tool_rendering: ToolRendering = "template") -> Checkpoint:
    """Open a folder with ``config.json``, weights and, usually, ``tokenizer.json``.

    Args:
        folder: the folder.
        name: what the user asked for.
        source: where the folder came from; its path if empty.
        tool_rendering: see :class:`outrider.models.tokenizer.Tokenizer`.

    Raises:
        ModelNotFound: no config or no weights in the folder.
        WeightsError: broken, incomplete or hostile files.
        UnsupportedModel: an architecture, quantisation or tokenizer that this runtime does not run.
    """
    config = read_config(folder)
    tensors = open_weights(folder)
    unused = {each for each in tensors.shapes() if each.endswith("rotary_emb.inv_freq")}
    check_tensors(config, tensors, ignored=unused)
    return Checkpoint(
        name=name,
        config=config,
        fingerprint=fingerprint(config, _tensor_bytes(tensors, unused)),
        tokenizer=_tokenizer(folder, config.eos_token_ids, tool_rendering),
        source=source or str(folder),
        note="",
        tensors=tensors,
    )


def open_hub(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    tool_rendering: ToolRendering = "template",
    snapshot: Snapshot | None = None,
) -> Checkpoint:
    """Open a model of the Hugging Face hub, downloading what is not in the hub's cache.

    Args:
        repo_id: such as ``org/name``; revision: branch, tag or commit; token: access token.
        offline: use only what is in the hub's cache.
        tool_rendering: see :class:`outrider.models.tokenizer.Tokenizer`.
        snapshot: how to download; the hub's own client by default.

    Raises:
        ModelNotFound: the model, revision or network is not there; the text says which and what to do.
        ModelError: as :func:`open_folder`.
    """
    fetch = snapshot or _hub_snapshot(repo_id, revision, token, offline)
    folder = _downloaded(fetch, (*_SMALL_FILES, *_SAFETENSORS_FILES), repo_id, offline)
    if not any(folder.glob("*.safetensors")):
        folder = _downloaded(fetch, (*_SMALL_FILES, *_PICKLED_FILES), repo_id, offline)
    source = f"{repo_id} at {revision or 'main'} (Hugging Face hub)"
    return open_folder(folder, name=repo_id, source=source, tool_rendering=tool_rendering)


def _hub_snapshot(repo_id: str, revision: str | None, token: str | None, offline: bool) -> Snapshot:
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str]) -> str:
        return str(
            snapshot_download(
                repo_id, revision=revision, token=token, local_files_only=offline, allow_patterns=patterns
            )
        )

    return fetch


def _downloaded(fetch: Snapshot, patterns: Iterable[str], repo_id: str, offline: bool) -> Path:
    try:
        return Path(fetch(list(patterns)))
    except Exception as error:  # the hub's client lets errors of its own, of HTTP and of the system through
        reason = " ".join(str(error).split())[:300]
        way_out = (
            "run once without offline mode, or give a folder"
            if offline
            else "check the name, the revision, the network and the access token, or give a folder"
        )
        raise ModelNotFound(
            f"hub model {repo_id!r} cannot be had: {type(error).__name__}: {reason}; {way_out}"
        ) from None


def _tensor_bytes(tensors: TensorSource, unused: set[str]) -> list[TensorBytes]:
    """Stored bytes of every tensor, in memory or mapped."""
    rows = []
    for name, shape in tensors.shapes().items():
        if name not in unused:
            tensor = tensors.read(name).contiguous()
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            rows.append(TensorBytes(name=name, dtype=str(tensor.dtype), shape=shape, data=data))
    return rows


def _tokenizer(folder: Path, eos_token_ids: tuple[int, ...], tool_rendering: ToolRendering) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    with parsing(path, "tokenizer"):
        backend = Backend.from_str(read_text(path))
    settings = _optional_json(folder / "tokenizer_config.json")
    template, tool_template = _templates(folder, settings)
    try:
        return Tokenizer(
            backend,
            special_tokens=_special_tokens(_optional_json(folder / "special_tokens_map.json"))
            | _special_tokens(settings),
            eos_token_ids=eos_token_ids,
            chat_template=template,
            tool_template=tool_template,
            tool_rendering=tool_rendering,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Entries such as ``bos_token``, written as text or as an object with ``content``."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _templates(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The chat template and, if there is one, the template for chats with tools. Files win over settings."""
    named: dict[str, str] = {}
    given = settings.get("chat_template")
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        for entry in given:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                named[str(entry.get("name"))] = entry["template"]
    for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (folder / file).is_file():
            named[name] = read_text(folder / file)
    return named.get("default"), named.get("tool_use")
