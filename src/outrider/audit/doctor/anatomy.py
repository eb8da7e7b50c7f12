"""A head's folder read leniently: what the loader refuses is taken apart here, so that the cause can be named.

Nothing is drafted with what this finds; :func:`outrider.drafters.head_folder.load_head` stays the only way to serve a head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.drafters.eagle_config import EagleConfig, default_taps
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import EMBEDDING, HeadInfo
from outrider.errors import ModelNotFound, WeightsError, nearest
from outrider.models.base import TargetSpec
from outrider.models.reading import parsing, read_json

__all__ = ["Parts", "expected_tensors", "read_parts", "recorded_taps"]

_CONFIG, _WEIGHTS, _SHAPE_KEY = "config.json", "model.safetensors", "eagle3"
_MAPS = ("d2t", "t2d")
_BY_TENSOR = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm.", "fc_bias": "fc.bias"}
"""Options that show in the tensors: the option, and how its tensor's name begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What lies in the folder.

    Attributes:
        config: the shape as declared, with what is missing guessed; ``None`` if it makes no head.
        stored: the shape that the weights' file carries, where it differs: names to values.
        tensors: as stored. info: provenance; empty where there is none.
        guessed: keys of the config that are missing, with the value taken instead.
        missing, unknown, broken: names of tensors that should be there, should not, or hold no finite numbers.
        renamed: a missing tensor's name to the unknown one that must be it.
    """

    folder: Path
    config: EagleConfig | None
    stored: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    info: HeadInfo
    guessed: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """True if a head can be built, renamed tensors included."""
        return self.config is not None and not self.broken and set(self.missing) <= set(self.renamed)

    def by_tensors(self, config: EagleConfig) -> EagleConfig:
        """The config with those options that the tensors show."""
        flags = {flag: any(name.startswith(start) for name in self.tensors) for flag, start in _BY_TENSOR.items()}
        return replace(config, **flags)  # type: ignore[arg-type]

    def head(self, config: EagleConfig, embedding_VD: Tensor) -> EagleHead | None:
        """A float32 head of that shape from these tensors, vocabulary apart; ``None`` if they do not fit."""
        with torch.device("meta"):
            head = EagleHead(config)
        state = {}
        for name, wanted in head.state_dict().items():
            found = self.tensors.get(self.renamed.get(name, name))
            if name in _MAPS:
                state[name] = torch.zeros(wanted.shape, dtype=wanted.dtype)
            elif found is None or found.shape != wanted.shape:
                return None
            else:
                state[name] = found.float()
        head.load_state_dict(state, assign=True)
        own = self.tensors.get(EMBEDDING)
        table_VD = embedding_VD if own is None else own
        if table_VD.shape != (config.target_vocab_size, config.hidden_size):
            return None
        head.attach_embedding(table_VD)
        return head.requires_grad_(False)


def read_parts(folder: Path, spec: TargetSpec) -> Parts:
    """Take a head's folder apart.

    Raises:
        ModelNotFound, WeightsError: files that are not there, or not JSON and safetensors at all.
    """
    if not (folder / _CONFIG).is_file() or not (folder / _WEIGHTS).is_file():
        raise ModelNotFound(f"{folder} holds no head; give the folder with its {_CONFIG} and {_WEIGHTS}")
    values = read_json(folder / _CONFIG)
    info = _info(values)
    config, guessed = _shape(values.get("head"), recorded_taps(info) or default_taps(spec.num_layers))
    path = folder / _WEIGHTS
    with parsing(path, "safetensors file"), safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        written = json.loads((file.metadata() or {}).get(_SHAPE_KEY, "{}"))
    own = {} if config is None else config.to_json()
    stored = {name: value for name, value in written.items() if name in own and own[name] != value}
    parts = Parts(folder=folder, config=config, stored=stored, tensors=tensors, info=info, guessed=guessed)
    return parts if config is None else _compared(parts, parts.by_tensors(config))


def recorded_taps(info: HeadInfo) -> tuple[int, ...]:
    """Layers whose statistics were recorded at training, in the order of the taps."""
    names = [name.removeprefix("tap ") for name in info.hidden_statistics]
    return tuple(int(name) for name in names if name.isdecimal())


def expected_tensors(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of such a head."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in EagleHead(config).state_dict().items()}


def _compared(parts: Parts, config: EagleConfig) -> Parts:
    wanted = expected_tensors(config)
    missing = tuple(name for name in wanted if name not in parts.tensors)
    unknown = tuple(name for name in parts.tensors if name not in wanted and name != EMBEDDING)
    broken = tuple(name for name, tensor in parts.tensors.items() if not bool(tensor.isfinite().all()))
    renamed = {}
    for name in missing:
        fitting = [other for other in unknown if tuple(parts.tensors[other].shape) == wanted[name]]
        close = [other for other in fitting if len(fitting) == 1 or nearest(name, [other])]
        if len(close) == 1:
            renamed[name] = close[0]
    return replace(parts, missing=missing, unknown=unknown, broken=broken, renamed=renamed)


def _shape(given: object, likely_taps: tuple[int, ...]) -> tuple[EagleConfig | None, dict[str, Any]]:
    """The declared shape; taps that are missing are guessed."""
    known = {each.name: each for each in fields(EagleConfig)}
    values = {name: value for name, value in given.items() if name in known} if isinstance(given, dict) else {}
    guessed: dict[str, Any] = {}
    if "tap_layers" not in values:
        guessed["tap_layers"] = list(likely_taps)
    needed = [name for name, each in known.items() if each.default is each.default_factory is MISSING]
    if any(name not in values and name not in guessed for name in needed):
        return None, guessed
    try:
        return EagleConfig.from_json({**values, **guessed}, "head"), guessed
    except WeightsError:
        return None, guessed


def _info(values: Mapping[str, Any]) -> HeadInfo:
    """Provenance as far as it is there and of the right kind."""
    found: dict[str, Any] = {}
    for each in fields(HeadInfo):
        value = values.get(each.name)
        if isinstance(value, str if each.type == "str" else Mapping):
            found[each.name] = value
    return HeadInfo(**{"target_name": "", "target_fingerprint": "", **found})
