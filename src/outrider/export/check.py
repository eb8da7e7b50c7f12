"""Goes over a folder that an engine is to load: every key, every tensor, and some of the draft vocabulary.

Engines load a head without complaint when a tensor is missing or a key is misread, and then draft badly. So this is the
place where it is noticed: each key is listed as used or ignored by the engine's version, each tensor is compared by name
and shape, and ids t = d + d2t[d] are looked up in ``t2d``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.head_folder import EMBEDDING
from outrider.errors import ModelError
from outrider.export.engines import ENGINE_KEYS, OWN_KEY, Engine
from outrider.export.folder import Exported
from outrider.export.layout import expected_shapes

__all__ = ["CheckReport", "KeyUse", "TensorCheck", "check_exported"]

NUM_IDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUse:
    """One key of the config (a dot leads into an object), and what the engine does with it."""

    key: str
    value: Any
    is_used: bool
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCheck:
    """One tensor: the shape that the config asks for and the one found, ``None`` where there is none."""

    name: str
    expected: tuple[int, ...] | None
    found: tuple[int, ...] | None

    @property
    def problem(self) -> str:
        """Empty if the tensor is as it must be."""
        if self.found is None:
            return f"tensor {self.name} {list(self.expected or ())} is missing; the engine would run without noticing"
        if self.expected is None:
            return f"tensor {self.name} is not one of this layout"
        if self.expected != self.found:
            return f"tensor {self.name} has shape {list(self.found)}; the config asks for {list(self.expected)}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What was found.

    Attributes:
        engine: name and version. keys, tensors: all of them.
        ids: draft id and target id of those that were looked up.
        problems: one line each; empty if the engine will run the head as it was trained.
    """

    engine: str
    keys: tuple[KeyUse, ...]
    tensors: tuple[TensorCheck, ...]
    ids: tuple[tuple[int, int], ...]
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"is_sound": self.is_sound, **asdict(self)}


def check_exported(exported: Exported, *, num_target_layers: int | None = None) -> CheckReport:
    """Check a folder for the engine that it was written for.

    Args:
        exported: what was read.
        num_target_layers: of the target; what the folder says itself if not given.
    """
    engine, values = exported.engine, exported.values
    keys = tuple(_key_uses(values, engine))
    problems = [*_key_problems(values, engine, is_ours=bool(exported.own))]
    tensors: tuple[TensorCheck, ...] = ()
    ids: tuple[tuple[int, int], ...] = ()
    layers = num_target_layers or exported.own.get("num_target_layers")
    try:
        config = exported.config(layers)
    except ModelError as error:
        problems.append(str(error))
    else:
        has_embedding = EMBEDDING in exported.tensors
        is_own = has_embedding and exported.own.get("embedding") == "its own"
        problems += engine.refusals(config, layers or max(config.tap_layers), is_own)
        tensors = tuple(_tensor_checks(exported.tensors, config, engine, has_embedding))
        problems += [each.problem for each in tensors if each.problem]
        problems += _value_problems(exported.tensors)
        ids = _ids(exported.tensors)
        problems += _id_problems(exported.tensors, ids, config)
    return CheckReport(engine=engine.label, keys=keys, tensors=tensors, ids=ids, problems=tuple(problems))


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as ``ENGINE_KEYS`` writes them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("eagle_config", OWN_KEY) and isinstance(value, Mapping):
            found |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            found[key] = value
    return found


def _key_uses(values: Mapping[str, Any], engine: Engine) -> Iterator[KeyUse]:
    for key, value in flat(values).items():
        is_used, note = engine.use_of(key, value)
        yield KeyUse(key=key, value=value, is_used=is_used, note=note)


def _key_problems(values: Mapping[str, Any], engine: Engine, *, is_ours: bool) -> Iterator[str]:
    """Keys that our exports always hold and this one lacks, and keys that ask for something the engine does not read."""
    found = flat(values)
    for key in ENGINE_KEYS if is_ours else ():
        if key not in found and key not in engine.ignored:
            note = engine.effects.get(key)
            yield f"key {key} is missing" + (f" ({note})" if note else "") + "; write it out"
    for key in ("norm_before_residual", "bias", "attention_bias", "mlp_bias"):
        if found.get(key) and key in engine.ignored:
            yield f"key {key} is {found[key]!r}, and {engine.name} {engine.version} ignores it: {engine.ignored[key]}"


def _tensor_checks(
    tensors: Mapping[str, Tensor], config: EagleConfig, engine: Engine, has_embedding: bool
) -> Iterator[TensorCheck]:
    expected = expected_shapes(config, engine, has_embedding=has_embedding)
    names = {name.replace("layers.0.", "midlayer.", 1): name for name in tensors}
    for name, shape in expected.items():
        found = tuple(tensors[names[name]].shape) if name in names else None
        yield TensorCheck(name=name, expected=shape, found=found)
    for name, theirs in names.items():
        if name not in expected:
            yield TensorCheck(name=theirs, expected=None, found=tuple(tensors[theirs].shape))


def _value_problems(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield f"tensor {name} holds numbers that are not finite"
        if name == "d2t" and tensor.dtype not in (torch.int64, torch.int32):
            yield f"tensor d2t holds {tensor.dtype}; allowed: whole numbers (int64), which rounding would corrupt"


def _ids(tensors: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    """Some draft ids, evenly spread, first and last among them, with t = d + d2t[d]."""
    if "d2t" not in tensors or tensors["d2t"].dim() != 1 or not len(tensors["d2t"]):
        return ()
    offsets = tensors["d2t"]
    count = min(NUM_IDS, len(offsets))
    chosen = sorted({round(index * (len(offsets) - 1) / max(1, count - 1)) for index in range(count)})
    return tuple((draft, draft + int(offsets[draft])) for draft in chosen)


def _id_problems(tensors: Mapping[str, Tensor], ids: tuple[tuple[int, int], ...], config: EagleConfig) -> Iterator[str]:
    marked = tensors.get("t2d")
    for (draft, target), following in zip(ids, (*ids[1:], None), strict=False):
        if not 0 <= target < config.target_vocab_size:
            yield f"draft id {draft} is target id {target}; allowed: 0 to {config.target_vocab_size - 1}"
            return
        if following is not None and following[1] - target < following[0] - draft:
            yield f"draft ids {draft} and {following[0]} are target ids {target} and {following[1]}; allowed: ascending"
            return
        if marked is not None and len(marked) > target and not bool(marked[target]):
            yield f"draft id {draft} is target id {target}, which t2d does not mark; d2t holds offsets, not ids"
            return
    if marked is not None and "d2t" in tensors and int(marked.sum()) != len(tensors["d2t"]):
        yield f"t2d marks {int(marked.sum())} tokens, d2t leads to {len(tensors['d2t'])}"
