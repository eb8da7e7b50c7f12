"""The check of an exported folder: sound ones pass, and every kind of damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.export.check import CheckReport, check_exported, flat
from outrider.export.engines import ENGINE_KEYS
from outrider.export.folder import ENGINES, export_head, read_exported
from outrider.export.sglang import SGLANG
from outrider.export.vllm import VLLM
from outrider.models.checkpoint import Checkpoint
from tests.export.conftest import MakeHead


@pytest.fixture
def folder(make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path) -> Path:
    export_head(make_head(tap_layers=(1, 2, 3)), checkpoint, VLLM, tmp_path / "out")
    return tmp_path / "out"


def checked(folder: Path) -> CheckReport:
    return check_exported(read_exported(folder))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> CheckReport:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return checked(folder)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> CheckReport:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))
    return checked(folder)


@pytest.mark.parametrize("name", ENGINES)
def test_what_was_exported_is_sound_and_every_key_is_listed(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path, name: str
) -> None:
    report = check_exported(export_head(make_head(tap_layers=(1, 2, 3)), checkpoint, ENGINES[name], tmp_path / "out"))
    assert report.is_sound and report.engine.startswith(f"{name} {ENGINES[name].version}")
    assert ("not tried" in report.engine) == (name == "sglang")
    uses = {key.key: key for key in report.keys}
    assert set(ENGINE_KEYS) <= set(uses)
    assert all(key in ENGINE_KEYS or key.startswith("outrider.") for key in uses)
    assert not any(use.is_used for key, use in uses.items() if key.startswith("outrider."))
    assert uses["norm_before_residual"].is_used == (name == "vllm")
    assert uses["bias"].is_used == (name == "sglang")
    assert json.loads(json.dumps(report.to_json()))["is_sound"] is True


def test_a_hundred_ids_are_looked_up_and_the_last_is_among_them(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    exported = export_head(make_head(), checkpoint, VLLM, tmp_path / "out")
    offsets = torch.arange(500) // 2
    exported.tensors.update(d2t=offsets, t2d=torch.zeros(1000, dtype=torch.bool))
    exported.tensors["t2d"][torch.arange(500) + offsets] = True
    ids = check_exported(exported).ids
    assert len(ids) == 100 and ids[0] == (0, 0) and ids[-1] == (499, 499 + 249)
    assert all(target == draft + draft // 2 for draft, target in ids)


@pytest.mark.parametrize(
    "name", ["midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "fc.weight", "d2t", "t2d"]
)
def test_a_deleted_tensor_is_noticed(folder: Path, name: str) -> None:
    report = change_tensors(folder, lambda tensors: tensors.pop(name))
    assert not report.is_sound
    assert any(f"tensor {name} " in problem and "is missing" in problem for problem in report.problems)


DAMAGE: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda t: t.update({"fc.weight": t["fc.weight"][:, 1:].contiguous()}), "tensor fc.weight has shape [32, 95]"),
    (lambda t: t.update({"fc.bias": torch.zeros(32)}), "tensor fc.bias is not one of this layout"),
    (lambda t: t["norm.weight"].fill_(torch.nan), "tensor norm.weight holds numbers that are not finite"),
    (lambda t: t.update(d2t=t["d2t"] + torch.arange(24)), "d2t"),
    (lambda t: t["d2t"].neg_(), "draft id"),
    (lambda t: t.update(d2t=t["d2t"].to(torch.bfloat16)), "d2t holds torch.bfloat16"),
    (lambda t: t["t2d"].logical_not_(), "which t2d does not mark"),
    (lambda t: t["t2d"].fill_(True), "t2d marks 40 tokens, d2t leads to 24"),
]


@pytest.mark.parametrize("change, text", DAMAGE)
def test_damaged_tensors_are_named(folder: Path, change: Callable[[dict[str, Tensor]], object], text: str) -> None:
    assert any(text in problem for problem in change_tensors(folder, change).problems)


KEYS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda v: v.pop("norm_before_residual"), "key norm_before_residual is missing (false if missing)"),
    (lambda v: v.pop("rope_theta"), "key rope_theta is missing"),
    (lambda v: v["eagle_config"].pop("norm_before_fc"), "key eagle_config.norm_before_fc is missing"),
    (lambda v: v.update(bias=True), "fc_bias is true"),
    (lambda v: v.update(attention_bias=True), "attention_bias is true"),
    (lambda v: v.update(num_aux_hidden_states=5), "num_aux_hidden_states is 5"),
    (lambda v: v.update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]), "allowed: one list"),
    (lambda v: v.update(fc_norm=True), "tensor fc_norm.0.weight [32] is missing"),
    (lambda v: v["outrider"].update(num_target_layers=2), "tap_layers holds 3, but the target has 2 layers"),
]


@pytest.mark.parametrize("change, text", KEYS)
def test_damaged_keys_are_named(folder: Path, change: Callable[[dict[str, Any]], object], text: str) -> None:
    assert any(text in problem for problem in change_config(folder, change).problems)


def test_unknown_keys_are_listed_as_ignored(folder: Path) -> None:
    report = change_config(folder, lambda values: values.update(dropout=0.1))
    [use] = [key for key in report.keys if key.key == "dropout"]
    assert not use.is_used and use.note == "not a key of this layout" and report.is_sound


def test_a_head_for_one_engine_is_not_taken_for_the_other(folder: Path) -> None:
    ours = read_exported(folder)
    other = read_exported(folder, engine=SGLANG)
    assert ours.config().tap_layers == (1, 2, 3) and other.config().tap_layers == (2, 3, 4)
    assert any("last layer's output" in problem for problem in check_exported(other).problems)


def test_keys_are_flat() -> None:
    values = {"a": 1, "eagle_config": {"b": 2}, "outrider": {"c": {"d": 3}}, "rope_scaling": {"e": 4}}
    assert flat(values) == {"a": 1, "eagle_config.b": 2, "outrider.c": {"d": 3}, "rope_scaling": {"e": 4}}
