"""A head on disk: a folder with ``model.safetensors``, ``config.json`` and a generated ``README.md``.

``config.json`` says what the head is (its shape, taps included), which target it was made for, what it was trained on,
what the target's hidden states looked like then, and how many of its drafts were kept. Files are replaced one at a time,
each whole; the weights carry their shape too, so that a folder that was torn between two heads is refused, not run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_readme import readme
from outrider.errors import ModelNotFound, UnsupportedModel, VocabularyMismatch, WeightsError, nearest
from outrider.files import replace_file
from outrider.models.base import TargetSpec
from outrider.models.llama_weights import WeightSource
from outrider.models.reading import parsing, read_json
from outrider.models.tokenizer import Tokenizer

__all__ = [
    "EMBEDDING",
    "HeadInfo",
    "HeadTarget",
    "LoadedHead",
    "TargetShape",
    "check_head",
    "check_target",
    "is_head_folder",
    "load_head",
    "read_head",
    "read_info",
    "refuse_foreign_head",
    "save_card",
    "save_head",
]

KIND = "eagle3"
_CONFIG, _WEIGHTS, _README = "config.json", "model.safetensors", "README.md"
EMBEDDING = "embed_tokens.weight"
_SHAPE_KEY = "eagle3"
_FOREIGN_KEYS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")

logger = logging.getLogger(__name__)


class TargetShape(Protocol):
    """What decides whether a head fits a target at all."""

    @property
    def name(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


class HeadTarget(Protocol):
    """What a head must know of the target it drafts for; every loaded target is one."""

    @property
    def spec(self) -> TargetSpec: ...
    @property
    def checkpoint(self) -> WeightSource: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInfo:
    """What is known of a head besides its weights; plain JSON values.

    Attributes:
        target_name, target_fingerprint: the target that it was made for.
        template_hash: of the chat template that its training chats were rendered with; empty if there was none.
        data: summary of the training data. training: the recipe.
        hidden_statistics: mean and spread of each tap on the training data, to recognise a target that has changed.
        acceptance: what was measured on held-out prompts.
        record: of tensors and answers, to compare with what is found later (:mod:`outrider.drafters.head_record`).
    """

    target_name: str
    target_fingerprint: str
    template_hash: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    hidden_statistics: Mapping[str, Any] = field(default_factory=dict)
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def for_target(target: HeadTarget, **known: Mapping[str, Any]) -> HeadInfo:
        """With the target's name, fingerprint and template filled in; ``known`` are the other fields."""
        return HeadInfo(
            target_name=target.spec.name,
            target_fingerprint=target.spec.fingerprint,
            template_hash=_template_hash(target),
            **known,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """A head as read, in the precision of its file. :func:`load_head` attaches the target's embedding if it has none."""

    head: EagleHead
    info: HeadInfo
    folder: Path


def is_head_folder(path: str | Path) -> bool:
    """True if the folder's ``config.json`` says that a head lies there."""
    try:
        config = Path(path).expanduser() / _CONFIG
        return config.is_file() and read_json(config).get("kind") == KIND
    except (WeightsError, OSError, ValueError, RuntimeError):
        return False


def refuse_foreign_head(path: str | Path) -> None:
    """Say what to do with a head in another engine's layout, which as a model would be refused for a reason of no use.

    Raises:
        UnsupportedModel: the folder's ``config.json`` has keys that only such heads have.
    """
    try:
        config = Path(path).expanduser() / _CONFIG
        keys = read_json(config).keys() if config.is_file() else ()
    except (WeightsError, OSError, ValueError, RuntimeError):
        return
    for key in _FOREIGN_KEYS:
        if key in keys:
            raise UnsupportedModel(
                f"{config}: key {key} belongs to a head in another engine's layout; allowed: a head of Outrider's own; "
                f"outrider import {path} --out HEAD makes one"
            )


def save_head(
    folder: Path, head: EagleHead, info: HeadInfo, *, dtype: torch.dtype | None = None, with_embedding: bool = False
) -> None:
    """Write a head; what lay in the folder under other names stays.

    Args:
        folder: made if it is not there.
        head: weights that are all finite.
        info: what goes beside them.
        dtype: stored precision of the weights; ``None`` keeps theirs.
        with_embedding: store the embedding table too (a head whose table is not the target's).
    """
    tensors = {name: _stored(tensor, dtype) for name, tensor in head.state_dict().items()}
    if with_embedding:
        assert head.embedding is not None
        tensors[EMBEDDING] = _stored(head.embedding, dtype)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values()), "a head that is not ready to be saved"
    folder.mkdir(parents=True, exist_ok=True)
    shape = {_SHAPE_KEY: json.dumps(head.config.to_json())}
    replace_file(folder / _WEIGHTS, lambda path: save_file(tensors, path, metadata=shape))
    save_card(folder, head.config, info)


def save_card(folder: Path, shape: EagleConfig, info: HeadInfo) -> None:
    """Write a head's ``config.json`` and README anew; its weights, which must lie there, stay."""
    config = {"kind": KIND, "version": 1, "head": shape.to_json(), **asdict(info)}
    text = json.dumps(config, indent=2) + "\n"
    replace_file(folder / _CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    page = readme(folder.name, shape, config, (folder / _WEIGHTS).stat().st_size)
    replace_file(folder / _README, lambda path: path.write_text(page, encoding="utf-8"))


def load_head(folder: str | Path, target: HeadTarget) -> LoadedHead:
    """Read a head for this target.

    A target with another fingerprint, or another chat template, than the head was trained with is a warning: the head
    drafts, perhaps badly, and the output is the target's all the same.

    Raises:
        ModelNotFound: no head lies there.
        WeightsError: a missing, renamed or misshapen tensor, an unknown or impossible key.
        UnsupportedModel, VocabularyMismatch: a head for a target of another width, depth or vocabulary.
    """
    folder = Path(folder).expanduser()
    where = str(folder / _CONFIG)
    config, info = _read_config(folder / _CONFIG)
    check_target(config, target.spec, where)
    head = _read_weights(folder / _WEIGHTS, config)
    if head.embedding is None:
        head.attach_embedding(_target_embedding(target, config, where))
    _warn_of_differences(info, target, where)
    return LoadedHead(head=head, info=info, folder=folder)


def read_head(folder: str | Path) -> LoadedHead:
    """Read a head without its target: its embedding is ``None`` unless it brings one of its own.

    Raises:
        ModelNotFound, WeightsError, UnsupportedModel: as :func:`load_head`.
    """
    folder = Path(folder).expanduser()
    config, info = _read_config(folder / _CONFIG)
    return LoadedHead(head=_read_weights(folder / _WEIGHTS, config), info=info, folder=folder)


def read_info(folder: str | Path) -> HeadInfo:
    """What a head's folder says of it; no weights are read.

    Raises:
        ModelNotFound, WeightsError, UnsupportedModel: as :func:`load_head`.
    """
    return _read_config(Path(folder).expanduser() / _CONFIG)[1]


def check_target(config: EagleConfig, spec: TargetShape, where: str) -> None:
    """Make sure that a head of this shape can read this target's taps and speak its tokens.

    Raises:
        UnsupportedModel, VocabularyMismatch: name the key and both values.
    """
    if config.target_hidden_size != spec.hidden_size:
        raise UnsupportedModel(
            f"{where}: target_hidden_size is {config.target_hidden_size}, but target {spec.name} has hidden size "
            f"{spec.hidden_size}; give the head's own target, or a head trained for this one"
        )
    if config.target_vocab_size != spec.vocab_size:
        raise VocabularyMismatch(
            f"{where}: target_vocab_size is {config.target_vocab_size}, but target {spec.name} has {spec.vocab_size} "
            "tokens; give the head's own target, or a head trained for this one"
        )
    for tap in config.tap_layers:
        if tap > spec.num_layers:
            raise UnsupportedModel(
                f"{where}: tap_layers holds {tap}, but target {spec.name} has {spec.num_layers} layers; "
                f"allowed: 0 to {spec.num_layers}"
            )


def _template_hash(target: HeadTarget) -> str:
    return "" if target.tokenizer is None else target.tokenizer.template_hash


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """On the CPU, contiguous; only floating-point tensors change their type (the vocabulary's must not)."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=wanted).contiguous()


def _object(values: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = values.get(name)
    if not isinstance(value, Mapping):
        raise WeightsError(f"{where}: {name} is {'missing' if value is None else repr(value)[:60]}; allowed: an object")
    return value


def _read_config(path: Path) -> tuple[EagleConfig, HeadInfo]:
    if not path.is_file():
        raise ModelNotFound(f"{path.parent} holds no {_CONFIG}; give the folder of a trained head")
    values = read_json(path)
    if values.get("kind") != KIND:
        raise UnsupportedModel(f"{path}: kind is {str(values.get('kind'))[:40]!r}; allowed: {KIND}")
    info = _read_info(values, str(path))
    return EagleConfig.from_json(_object(values, "head", str(path)), f"{path}: head"), info


def _read_info(values: Mapping[str, Any], where: str) -> HeadInfo:
    known = [each.name for each in fields(HeadInfo)]
    allowed = ["kind", "version", "head", *known]
    for name in values:
        if name not in allowed:
            raise WeightsError(
                f"{where}: key {name!r} is unknown{nearest(name, allowed)}; allowed: {', '.join(allowed)}"
            )
    given: dict[str, Any] = {}
    for each in fields(HeadInfo):
        if each.type == "str":
            value = values.get(each.name, "")
            if not isinstance(value, str):
                raise WeightsError(f"{where}: {each.name} is {str(value)[:60]!r}; allowed: a text")
            given[each.name] = value
        elif each.name in values:
            given[each.name] = _object(values, each.name, where)
    return HeadInfo(**given)


def _read_weights(path: Path, config: EagleConfig) -> EagleHead:
    if not path.is_file():
        raise WeightsError(f"{path} is missing; fetch the head again")
    with parsing(path, "safetensors file"), safe_open(path, framework="pt", device="cpu") as file:
        names, metadata = list(file.keys()), file.metadata() or {}
        _check_belongs(metadata, config, path)
        tensors = {name: file.get_tensor(name) for name in names}
    return check_head(tensors, config, path)


def check_head(tensors: Mapping[str, Tensor], config: EagleConfig, path: Path) -> EagleHead:
    """The head that these tensors make; an embedding among them is attached.

    Args:
        tensors: by their names in the state dict. config: the shape that they must have. path: of the file, for errors.

    Raises:
        WeightsError: a missing, unknown or misshapen tensor, or ids that make no draft vocabulary.
    """
    own = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    with torch.device("meta"):
        head = EagleHead(config)
    _check_tensors(own, head.state_dict(), path)
    head.load_state_dict(own, assign=True)
    _check_vocabulary(head, path)
    if EMBEDDING in tensors:
        expected = (config.target_vocab_size, config.hidden_size)
        _check_shape(EMBEDDING, tensors[EMBEDDING], torch.empty(expected, device="meta"), path)
        head.attach_embedding(tensors[EMBEDDING])
    return head.requires_grad_(False)


def _check_belongs(metadata: Mapping[str, str], config: EagleConfig, path: Path) -> None:
    written = json.loads(metadata[_SHAPE_KEY]) if _SHAPE_KEY in metadata else {}
    given = config.to_json()
    for name, value in written.items():
        if given.get(name) != value:
            raise WeightsError(
                f"{path}: {name} is {value!r}, but {given.get(name)!r} in {_CONFIG}; "
                "the two files are of different heads, fetch both again"
            )


def _check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Same names, shapes and kinds, and finite numbers."""
    extra = [name for name in found if name not in expected]
    for name, wanted in expected.items():
        if name not in found:
            hint = nearest(name, extra)
            what = f"; found {', '.join(extra[:3])}" if extra and not hint else hint
            raise WeightsError(f"{path}: tensor {name} {list(wanted.shape)} is missing{what}")
        _check_shape(name, found[name], wanted, path)
        if found[name].is_floating_point() != wanted.is_floating_point():
            raise WeightsError(f"{path}: tensor {name} holds {found[name].dtype}; allowed: {wanted.dtype}")
        if not bool(found[name].isfinite().all()):
            raise WeightsError(f"{path}: tensor {name} holds numbers that are not finite; train or fetch it again")
    if extra:
        known = ", ".join(expected)
        raise WeightsError(f"{path}: tensor {extra[0]} is unknown{nearest(extra[0], expected)}; allowed: {known}")


def _check_shape(name: str, found: Tensor, wanted: Tensor, path: Path) -> None:
    if found.shape != wanted.shape:
        raise WeightsError(
            f"{path}: tensor {name} has shape {list(found.shape)}; the config asks for {list(wanted.shape)}"
        )


def _check_vocabulary(head: EagleHead, path: Path) -> None:
    head.d2t, head.t2d = head.d2t.to(torch.int64), head.t2d.to(torch.bool)
    ids_U, size = head.target_ids(), head.config.target_vocab_size
    low, high = int(ids_U.min()), int(ids_U.max())
    if low < 0 or high >= size:
        bad = low if low < 0 else high
        raise WeightsError(f"{path}: d2t leads to token id {bad}; allowed: 0 to {size - 1}")
    if bool((ids_U.diff() <= 0).any()):
        raise WeightsError(f"{path}: d2t leads to token ids that do not ascend; it must hold offsets, not ids")
    marked = torch.zeros(size, dtype=torch.bool)
    marked[ids_U] = True
    if not torch.equal(marked, head.t2d):
        raise WeightsError(f"{path}: t2d marks other tokens than d2t leads to; fetch the head again")


def _target_embedding(target: HeadTarget, config: EagleConfig, where: str) -> Tensor:
    if config.hidden_size != target.spec.hidden_size:
        raise WeightsError(
            f"{where}: hidden_size is {config.hidden_size} and target {target.spec.name}'s {target.spec.hidden_size}; "
            f"such a head needs an embedding of its own, tensor {EMBEDDING} in {_WEIGHTS}"
        )
    return target.checkpoint.tensor("model.embed_tokens.weight")


def _warn_of_differences(info: HeadInfo, target: HeadTarget, where: str) -> None:
    spec = target.spec
    if info.target_fingerprint != spec.fingerprint:
        logger.warning(
            "%s: the head was made for target %s with fingerprint %s, but %s has %s; fewer drafts may be kept",
            where,
            info.target_name,
            info.target_fingerprint or "unknown",
            spec.name,
            spec.fingerprint,
        )
    tokenizer = target.tokenizer
    if info.template_hash and tokenizer is not None and not tokenizer.is_same_template(info.template_hash):
        logger.warning(
            "%s: the head was trained with chat template %s, but the target's is %s; fewer drafts may be kept",
            where,
            info.template_hash,
            tokenizer.template_hash,
        )
