"""Heads in an engine's folder: written from a head of ours, and read back into one.

What comes back is bit for bit what went out, weights, vocabulary and embedding, and an export is read back and compared
before it is called done.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafters.eagle_config import EagleConfig, default_taps
from outrider.drafters.head_folder import (
    EMBEDDING,
    HeadInfo,
    LoadedHead,
    check_head,
    check_target,
    is_head_folder,
    read_head,
    save_head,
)
from outrider.errors import ConfigError, ModelNotFound, UnsupportedModel, WeightsError, nearest
from outrider.export.engines import OWN_KEY, Engine
from outrider.export.layout import config_of, expected_shapes, layout_of, tensors_of
from outrider.export.sglang import SGLANG
from outrider.export.vllm import VLLM
from outrider.files import replace_file, write_json
from outrider.models.checkpoint import Checkpoint
from outrider.models.reading import parsing, read_json

__all__ = ["ENGINES", "Exported", "TargetFacts", "engine_named", "export_head", "import_head", "read_exported"]

ENGINES = {"vllm": VLLM, "sglang": SGLANG}

_CONFIG, _WEIGHTS, _PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
_COPIED = "the target's, copied"
_LATER_FIELD = "record"  # earlier exports do not have it

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What exporting and importing must know of a target; its weights are not loaded."""

    name: str
    fingerprint: str
    template_hash: str
    hidden_size: int
    vocab_size: int
    num_layers: int

    @staticmethod
    def of(checkpoint: Checkpoint) -> TargetFacts:
        """Of a model that was opened."""
        tokenizer = checkpoint.tokenizer
        return TargetFacts(
            name=checkpoint.name,
            fingerprint=checkpoint.fingerprint,
            template_hash="" if tokenizer is None else tokenizer.template_hash,
            hidden_size=checkpoint.config.hidden_size,
            vocab_size=checkpoint.config.vocab_size,
            num_layers=checkpoint.config.num_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A folder in the layout as it lies there: nothing of it has been checked yet.

    Attributes:
        values: its ``config.json``. engine: whose numbering of taps it follows.
        tensors: by name, as stored.
    """

    folder: Path
    values: dict[str, Any]
    engine: Engine
    tensors: dict[str, Tensor]

    @property
    def own(self) -> Mapping[str, Any]:
        """What Outrider wrote for itself; empty in heads that others made."""
        own = self.values.get(OWN_KEY, {})
        if not isinstance(own, dict):
            raise WeightsError(f"{self.folder / _CONFIG}: {OWN_KEY} is {str(own)[:60]!r}; allowed: an object")
        return own

    def config(self, num_target_layers: int | None = None) -> EagleConfig:
        """Its shape; the target's number of layers says which taps are meant where the file lists none."""
        taps = () if num_target_layers is None else default_taps(num_target_layers)
        return config_of(self.values, self.engine, str(self.folder / _CONFIG), default_taps=taps)


def engine_named(name: str) -> Engine:
    """The engine of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine {name!r} is unknown{nearest(name, ENGINES)}; allowed: {', '.join(ENGINES)}")
    return ENGINES[name]


def export_head(
    head: LoadedHead, checkpoint: Checkpoint, engine: Engine, out: Path, *, with_embedding: bool = False
) -> Exported:
    """Write a head for an engine, and read it back.

    Args:
        head: as :func:`outrider.drafters.head_folder.read_head` gives it.
        checkpoint: the target's.
        engine: one of ``ENGINES``.
        out: a new or empty folder, or one that an earlier export wrote.
        with_embedding: write the target's embedding table too, for loaders that do not share it. A head's own is always
            written.

    Raises:
        ConfigError: the folder holds something else.
        UnsupportedModel: the engine cannot run such a head, or the head is of another target; names all reasons.
    """
    target, config = TargetFacts.of(checkpoint), head.head.config
    check_target(config, target, str(head.folder))
    _refuse(engine, config, target, has_own=head.head.embedding is not None)
    _warn_of_another(head.info, target, head.folder)
    embedding, origin = _embedding(head, checkpoint, with_embedding)
    tensors = tensors_of(head.head, engine, embedding)
    own = {
        "num_target_layers": target.num_layers,
        "embedding": origin,
        "draft_window": config.max_positions,
        "draft_vocabulary": config.draft_vocab_size,
    }
    dtype = str(head.head.fc.weight.dtype).removeprefix("torch.")
    values = layout_of(config, head.info, engine, dtype=dtype, own=own)
    _claim(out)
    replace_file(out / _WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_json(out / _CONFIG, values)
    return _read_back(out, tensors, config)


def read_exported(folder: Path, *, engine: Engine | None = None) -> Exported:
    """Read a folder in the layout, ours or a public one.

    Args:
        folder: with ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin``.
        engine: whose numbering of taps it follows; what the folder itself says if not given, else vLLM.

    Raises:
        ModelNotFound: no head in that layout lies there. WeightsError: files that cannot be read.
    """
    folder = folder.expanduser()
    if not (folder / _CONFIG).is_file():
        raise ModelNotFound(f"{folder} holds no {_CONFIG}; give the folder of a head in the layout of vLLM or SGLang")
    values = read_json(folder / _CONFIG)
    if is_head_folder(folder):
        raise UnsupportedModel(f"{folder} is a head of Outrider's own already; give an exported one")
    own = values.get(OWN_KEY)
    if engine is None:
        engine = engine_named(str(own["engine"])) if isinstance(own, dict) and "engine" in own else VLLM
    return Exported(folder=folder, values=values, engine=engine, tensors=_read_tensors(folder))


def import_head(exported: Exported, out: Path, *, checkpoint: Checkpoint | None = None) -> LoadedHead:
    """Write a head of ours from one in the layout.

    Args:
        exported: what was read.
        out: the head's folder; new or empty, or a head that it replaces.
        checkpoint: the target; needed for heads that were not exported by Outrider.

    Raises:
        ConfigError: the target must be named, or the folder holds something else.
        WeightsError: a missing, unknown or misshapen tensor, or ids that make no draft vocabulary.
    """
    info, num_layers = _provenance(exported, checkpoint)
    config = exported.config(num_layers)
    if checkpoint is not None:
        check_target(config, TargetFacts.of(checkpoint), str(exported.folder))
    tensors = _ours(exported, config)
    path = exported.folder / _WEIGHTS
    head = check_head(tensors, config, path)
    if (out / _CONFIG).exists() and not is_head_folder(out):
        raise ConfigError(f"{out} holds something else than a head; give a new folder")
    save_head(out, head, info, with_embedding=EMBEDDING in tensors)
    return read_head(out)


def _refuse(engine: Engine, config: EagleConfig, target: TargetFacts, *, has_own: bool) -> None:
    reasons = list(engine.refusals(config, target.num_layers, has_own))
    if reasons:
        raise UnsupportedModel(f"{engine.name} {engine.version} cannot run this head: {'; '.join(reasons)}")


def _warn_of_another(info: HeadInfo, target: TargetFacts, folder: Path) -> None:
    if info.target_fingerprint != target.fingerprint:
        logger.warning(
            "%s: the head was made for target %s with fingerprint %s, but %s has %s; fewer drafts may be kept",
            folder,
            info.target_name,
            info.target_fingerprint or "unknown",
            target.name,
            target.fingerprint,
        )


def _embedding(head: LoadedHead, checkpoint: Checkpoint, is_wanted: bool) -> tuple[Tensor | None, str]:
    """The table to write, and where it is from."""
    if head.head.embedding is not None:
        return head.head.embedding, "its own"
    if not is_wanted:
        return None, "the target's, shared"
    return checkpoint.tensor("model.embed_tokens.weight").to(head.head.fc.weight.dtype), _COPIED


def _claim(out: Path) -> None:
    """Make sure that the folder may be written: what lies there under other names would be loaded, too."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    held = {each.name for each in out.iterdir()}
    is_ours = held <= {_CONFIG, _WEIGHTS} and (_CONFIG not in held or OWN_KEY in read_json(out / _CONFIG))
    if held and not is_ours:
        raise ConfigError(f"{out} holds {min(held)}, which no export wrote; give a new folder")


def _read_back(out: Path, tensors: Mapping[str, Tensor], config: EagleConfig) -> Exported:
    exported = read_exported(out)
    assert exported.config() == config, "a shape that does not come back as it went out"
    found = exported.tensors
    assert sorted(found) == sorted(tensors)
    assert all(found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in tensors.items())
    return exported


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path, pickled = folder / _WEIGHTS, folder / _PICKLED
    if path.is_file():
        with parsing(path, "safetensors file"), safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    if not pickled.is_file():
        raise WeightsError(f"{path} is missing, and so is {_PICKLED}; fetch the head again")
    with parsing(pickled, "PyTorch weight file"):
        values = torch.load(pickled, map_location="cpu", weights_only=True)
        if not isinstance(values, dict) or not all(isinstance(each, Tensor) for each in values.values()):
            raise WeightsError(f"{pickled}: holds something else than tensors by name")
    return {str(name): tensor.contiguous() for name, tensor in values.items()}


def _provenance(exported: Exported, checkpoint: Checkpoint | None) -> tuple[HeadInfo, int | None]:
    """What is known of the head, and its target's number of layers."""
    own = exported.own
    if own:
        names = [each.name for each in fields(HeadInfo) if each.name in own or each.name != _LATER_FIELD]
        missing = [name for name in names if name not in own]
        if missing:
            raise WeightsError(f"{exported.folder / _CONFIG}: {OWN_KEY}.{missing[0]} is missing; export the head again")
        return HeadInfo(**{name: own[name] for name in names}), None
    if checkpoint is None:
        raise ConfigError(f"{exported.folder} does not say which target the head is for; give --target")
    target = TargetFacts.of(checkpoint)
    info = HeadInfo(
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        template_hash=target.template_hash,
        data={"imported from": exported.folder.name},
    )
    return info, target.num_layers


def _ours(exported: Exported, config: EagleConfig) -> dict[str, Tensor]:
    """The tensors under our names, with the vocabulary that a full one leaves out, and without a copied embedding."""
    tensors = {_our_name(name): tensor for name, tensor in exported.tensors.items()}
    if exported.own.get("embedding") == _COPIED:
        tensors.pop(EMBEDDING, None)
    if config.draft_vocab_size == config.target_vocab_size and "d2t" not in tensors:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(config.target_vocab_size, dtype=torch.bool)
    order = expected_shapes(config, SGLANG, has_embedding=True)
    return {name: tensors[name] for name in (*order, *tensors) if name in tensors}


def _our_name(name: str) -> str:
    """Some writers call the first layer ``layers.0``, as the engines do inside."""
    return name.replace("layers.0.", "midlayer.") if name.startswith("layers.0.") else name
