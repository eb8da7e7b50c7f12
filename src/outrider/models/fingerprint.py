"""A hash that names a model's weights, taken before any precision conversion.

It covers the numbers of the config that change logits and, for every tensor in the order of its Hugging Face name, the
name, stored type, shape and bytes. So it does not depend on how a checkpoint is cut into files (shards, safetensors or
``.bin``), and it differs between a model and its quantised form.

Up to :data:`FULL_BYTES` of weights, every byte is hashed. Above, each tensor larger than 1 MiB is sampled: 256 blocks of
4 KiB, the first at its start, the last at its end, evenly spaced between; smaller tensors are hashed whole. Retraining,
fine-tuning or requantising changes nearly all bytes of a tensor and is always seen; an edit of a few numbers between two
sampled blocks of a model above the limit is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from outrider.models.config import LlamaConfig

__all__ = ["FULL_BYTES", "TensorBytes", "fingerprint"]

FULL_BYTES = 2**30
"""Weights up to this size are hashed whole."""

_NUM_BLOCKS = 256
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """One tensor as stored: ``data`` is flat ``uint8``, mapped or in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


def fingerprint(config: LlamaConfig, tensors: Iterable[TensorBytes], *, full_bytes: int = FULL_BYTES) -> str:
    """The fingerprint of a model: 32 hexadecimal digits.

    Args:
        config: the model's shape; eos ids and the window's length do not count, they change no logit.
        tensors: every stored tensor.
        full_bytes: hash everything up to this many bytes of weights, sample above.
    """
    rows = sorted(tensors, key=lambda row: row.name)
    sampled = sum(row.data.nbytes for row in rows) > full_bytes
    digest = hashlib.sha256(b"outrider fingerprint 1\n")
    digest.update(_shape_text(config).encode())
    for row in rows:
        digest.update(json.dumps([row.name, row.dtype, row.shape, row.data.nbytes]).encode())
        if sampled and row.data.nbytes > _NUM_BLOCKS * _BLOCK_BYTES:
            _update_sampled(digest, row.data)
        else:
            digest.update(row.data.data)
    return digest.hexdigest()[:32]


def _shape_text(config: LlamaConfig) -> str:
    numbers = asdict(config)
    for name in ("eos_token_ids", "max_positions"):
        del numbers[name]
    return json.dumps(numbers, sort_keys=True)


def _update_sampled(digest: Any, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    span = data.nbytes - _BLOCK_BYTES
    for block in range(_NUM_BLOCKS):
        start = span * block // (_NUM_BLOCKS - 1)
        digest.update(data[start : start + _BLOCK_BYTES].data)
