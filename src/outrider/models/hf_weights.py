"""Tensors of a Hugging Face folder: safetensors (one file or shards) or pickled ``.bin`` files, which run no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.errors import ModelNotFound, UnsupportedModel, WeightsError
from outrider.models.checkpoint import TensorSource
from outrider.models.reading import parsing, read_json

__all__ = ["PickledTensors", "SafetensorsTensors", "open_weights"]

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_FLOAT_KINDS = ("F64", "F32", "F16", "BF16")
_FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_QUANTISED_SUFFIXES = (".qweight", ".qzeros", ".scales", ".weight_packed", ".weight_scale", ".weight_scale_inv")


def open_weights(folder: Path) -> TensorSource:
    """Open the weights of a folder: safetensors if there are any, else ``.bin`` files.

    Raises:
        ModelNotFound: the folder holds no weights under a known name.
        WeightsError: truncated or hostile files, or shards that are missing.
        UnsupportedModel: quantised tensors.
    """
    for name, kind in ((_SAFETENSORS, SafetensorsTensors), (_PICKLED, PickledTensors)):
        files = _files(folder, name)
        if files:
            return kind(folder, files)
    raise ModelNotFound(
        f"{folder} holds no weights; expected {_SAFETENSORS}, {_SAFETENSORS}.index.json, {_PICKLED} or {_PICKLED}.index.json"
    )


def _files(folder: Path, name: str) -> dict[str, str]:
    """Tensor name to file name; ``{"": file}`` for a single file, empty if there is neither."""
    if (folder / name).is_file():
        return {"": name}
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: weight_map is missing or empty")
    for file in set(map(str, weight_map.values())):
        if file != Path(file).name or not (folder / file).is_file():
            raise WeightsError(
                f"{index}: names the shard {file[:80]!r}, which is not a file in this folder; fetch it again"
            )
    return {str(tensor): str(file) for tensor, file in weight_map.items()}


class SafetensorsTensors:
    """Tensors of safetensors files, mapped into memory."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        self._folder = folder
        self._files = files
        self._handles: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(files.values())):
            self._open(folder / file)

    def _open(self, path: Path) -> None:
        with parsing(path, "safetensors file"):
            handle: Any = safe_open(path, framework="pt", device="cpu")
            for name in list(handle.keys()):
                row = handle.get_slice(name)
                _refuse_quantised(path, name, row.get_dtype(), row.get_dtype() in _FLOAT_KINDS)
                if name in self._handles:
                    raise WeightsError(f"{path}: tensor {name} is in another shard too")
                self._handles[name] = handle
                self._shapes[name] = tuple(row.get_shape())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        with parsing(self.where(name), "safetensors file"):
            tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor

    def where(self, name: str) -> str:
        return str(self._folder / _file_of(self._files, name))


class PickledTensors:
    """Tensors of ``pytorch_model*.bin`` files, read by torch's restricted unpickler."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        self._folder = folder
        self._files = files
        self._tensors: dict[str, Tensor] = {}
        for file in sorted(set(files.values())):
            self._tensors |= _unpickled(folder / file)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name].contiguous()

    def where(self, name: str) -> str:
        return str(self._folder / _file_of(self._files, name))


def _file_of(files: Mapping[str, str], name: str) -> str:
    return files.get(name) or files.get("") or next(iter(files.values()))


def _unpickled(path: Path) -> dict[str, Tensor]:
    with parsing(path, "PyTorch weight file"):
        try:
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format of PyTorch before 1.6 cannot be mapped
            values = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(values, dict):
            raise WeightsError(f"{path}: holds {type(values).__name__}; allowed: a dictionary of tensors")
        for name, tensor in values.items():
            _check_pickled(path, str(name), tensor)
    return {str(name): tensor for name, tensor in values.items()}


def _check_pickled(path: Path, name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise WeightsError(f"{path}: entry {name[:80]} is {type(tensor).__name__}; allowed: dense tensors")
    _refuse_quantised(path, name, str(tensor.dtype), tensor.dtype in _FLOAT_DTYPES)
    # A stride of 0 lets a small file declare a tensor of any size.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise WeightsError(f"{path}: tensor {name} declares {tensor.numel()} values, more than the file holds")


def _refuse_quantised(path: Path, name: str, kind: str, is_float: bool) -> None:
    if name.endswith(_QUANTISED_SUFFIXES) or not is_float:
        raise UnsupportedModel(
            f"{path}: tensor {name[:120]} of type {kind} belongs to a quantised checkpoint, which is not supported; "
            "give the unquantised checkpoint or a GGUF file"
        )
