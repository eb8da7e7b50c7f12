"""Reads the header of a GGUF file: metadata and the table of tensors, every count checked against the file's size.

The ``gguf`` library's own reader builds a numpy object per token string (seconds for a vocabulary) and trusts counts; so
only its tables of types and its dequantiser are used. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from outrider.errors import UnsupportedModel, WeightsError

__all__ = ["GGUFFile", "GGUFTensor"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_NUMPY: Mapping[int, str] = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """A row of the tensor table.

    Attributes:
        shape: rows first, as torch counts (the file has them the other way round).
        offset: first byte in the file; num_bytes: how many, checked to lie inside the file.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file, mapped into memory.

    Attributes:
        metadata: key to value: ``int | float | bool | str``, ``list[str]``, or a numpy array.
        tensors: name to table row, in file order.

    Raises:
        WeightsError: not GGUF, truncated, or a header that contradicts itself.
        UnsupportedModel: a version or tensor type that this reader does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        reader = _Reader(self._bytes, path)
        num_tensors, num_keys = reader.counts()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = reader.string()
            if key in self.metadata:
                raise reader.broken(f"key {key!r} appears twice")
            self.metadata[key] = reader.value()
        self.tensors = _read_table(reader, num_tensors, _alignment(reader, self.metadata))

    def raw(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A copy of the tensor's bytes; the pages of the file are let go, so that a model is not in memory twice."""
        values = np.frombuffer(self._bytes, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset).copy()
        first_page = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED, first_page, tensor.offset + tensor.num_bytes - first_page)
        return values


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise WeightsError(f"{path}: the file is empty; fetch it again") from None
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None


def _alignment(reader: _Reader, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 2**20:
        raise reader.broken(f"general.alignment {alignment!r} is not a power of two")
    return alignment


def _read_table(reader: _Reader, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    rows = [_read_row(reader) for _ in range(num_tensors)]
    start = reader.position + -reader.position % alignment
    table: dict[str, GGUFTensor] = {}
    for name, kind, shape, offset in rows:
        if name in table:
            raise reader.broken(f"tensor {name!r} appears twice")
        num_bytes = _num_bytes(reader, name, kind, shape)
        if offset % alignment or start + offset + num_bytes > reader.size:
            raise reader.broken(
                f"tensor {name!r} should lie at bytes {start + offset} to {start + offset + num_bytes}, "
                f"but the file has {reader.size}"
            )
        table[name] = GGUFTensor(name=name, kind=kind, shape=shape, offset=start + offset, num_bytes=num_bytes)
    return table


def _read_row(reader: _Reader) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = reader.string()
    num_dimensions = reader.number("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise reader.broken(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(reader.number("<Q") for _ in range(num_dimensions))[::-1]
    raw_kind = reader.number("<I")
    try:
        kind = GGMLQuantizationType(raw_kind)
    except ValueError:
        raise UnsupportedModel(f"{reader.path}: tensor {name} has the unknown GGUF type number {raw_kind}") from None
    return name, kind, shape, reader.number("<Q")


def _num_bytes(reader: _Reader, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise reader.broken(f"tensor {name!r} of type {kind.name} cannot have shape {list(shape)}")
    return prod(shape) // block * block_bytes


class _Reader:
    """A cursor over the header. Nothing is allocated by a count that the rest of the file could not hold."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self.path = path
        self.size = len(data)
        self.position = 0

    def broken(self, reason: str) -> WeightsError:
        return WeightsError(f"{self.path}: not a sound GGUF file: {reason}; fetch it again")

    def counts(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of tensors and keys."""
        if self._data[:4] != _MAGIC:
            raise self.broken("it does not start with the letters GGUF")
        self.position = 4
        version = self.number("<I")
        if version not in _VERSIONS:
            kind = "big-endian GGUF" if version & 0xFFFF == 0 else f"GGUF version {version}"
            raise UnsupportedModel(f"{self.path}: {kind} is not supported; allowed: little-endian version 2 or 3")
        num_tensors, num_keys = self.number("<Q"), self.number("<Q")
        self.check_count(num_tensors, 8 + 4 + 8 + 4 + 8, "tensors")
        self.check_count(num_keys, 8 + 4 + 1, "keys")
        return num_tensors, num_keys

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count * min_bytes > self.size - self.position:
            raise self.broken(f"it declares {count} {what} at byte {self.position}, but has only {self.size} bytes")

    def number(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(code, self._data, self.position)
        except struct.error:
            raise self.broken(f"the header ends at byte {self.size}, in the middle") from None
        self.position += struct.calcsize(code)
        return value

    def string(self) -> str:
        num_bytes = self.number("<Q")
        self.check_count(num_bytes, 1, "characters of text")
        raw = self._data[self.position : self.position + num_bytes]
        self.position += num_bytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.broken(f"the text before byte {self.position} is not UTF-8") from None

    def value(self) -> Any:
        kind = self.number("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self.broken(f"value type {kind} at byte {self.position} is unknown")
        return self.number(_SCALARS[kind])

    def _array(self) -> Any:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            self.check_count(count, 8, "strings")
            return [self.string() for _ in range(count)]
        if kind not in _NUMPY:
            raise self.broken(f"an array of value type {kind} at byte {self.position} is not supported")
        dtype = np.dtype(_NUMPY[kind])
        self.check_count(count, dtype.itemsize, "array items")
        if count == 0:
            return np.zeros(0, dtype=dtype)
        values = np.frombuffer(self._data, dtype=dtype, count=count, offset=self.position).copy()
        self.position += values.nbytes
        return values.astype(bool) if kind == _BOOL else values
