"""A head on disk: bit-equal round trips, and refusals that name file, key and both values."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.drafters import head_folder
from outrider.drafters.head_folder import is_head_folder, load_head, save_head
from outrider.errors import ModelNotFound, UnsupportedModel, VocabularyMismatch, WeightsError
from outrider.models.llama import LlamaTarget

from .heads import tiny_head, tiny_info, tiny_target


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return tiny_target()


@pytest.fixture
def folder(tmp_path: Path, target: LlamaTarget) -> Path:
    save_head(tmp_path / "head", tiny_head(target), tiny_info(target))
    return tmp_path / "head"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"num_layers": 2, "fc_bias": True, "fc_norm": True}])
def test_round_trips_are_bit_equal(
    tmp_path: Path, target: LlamaTarget, dtype: torch.dtype | None, changes: dict[str, Any]
) -> None:
    head = tiny_head(target, **changes)
    info = tiny_info(target)
    save_head(tmp_path, head, info, dtype=dtype)
    loaded = load_head(tmp_path, target)
    wanted = head.state_dict() if dtype is None else head.to(dtype).state_dict()
    got = loaded.head.state_dict()
    assert list(got) == list(wanted)
    assert all(torch.equal(got[name], wanted[name]) and got[name].dtype == wanted[name].dtype for name in wanted)
    assert loaded.info == info and loaded.head.config == head.config
    assert not any(parameter.requires_grad for parameter in loaded.head.parameters())
    save_head(tmp_path / "again", loaded.head, loaded.info)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_the_embedding_is_the_targets_unless_the_head_brings_one(
    folder: Path, tmp_path: Path, target: LlamaTarget
) -> None:
    table = target.checkpoint.tensor("model.embed_tokens.weight")
    loaded = load_head(folder, target).head
    assert loaded.embedding is not None and torch.equal(loaded.embedding, table)
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    loaded.attach_embedding(table + 1)
    save_head(tmp_path / "own", loaded, tiny_info(target), with_embedding=True)
    own = load_head(tmp_path / "own", target).head.embedding
    assert own is not None and torch.equal(own, table + 1)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    change_tensors(folder, lambda tensors: None)  # the copy of the shape in the weights would be found first


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.query_proj.weight"] = tensors.pop("midlayer.self_attn.q_proj.weight")


def offset_too_far(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"][-1] += 1


def ids_for_offsets(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = (tensors["d2t"] + torch.arange(24)) // 2


def other_mark(tensors: dict[str, Tensor]) -> None:
    tensors["t2d"][0] = True


def not_finite(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][3, 4] = torch.nan


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("norm.weight"), r"model.safetensors: tensor norm.weight \[32\] is missing$"),
        (renamed, r"q_proj.weight \[24, 64\] is missing; did you mean 'midlayer.self_attn.query_proj.weight'"),
        (lambda t: t.update(extra=torch.zeros(1)), "tensor extra is unknown"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), r"fc.weight has shape \[32, 64\].*\[32, 96\]"),
        (lambda t: t.update(d2t=t["d2t"].float()), "tensor d2t holds torch.float32; allowed: torch.int64"),
        (offset_too_far, "d2t leads to token id 40; allowed: 0 to 39"),
        (ids_for_offsets, "d2t leads to token id|do not ascend|t2d marks other tokens"),
        (other_mark, "t2d marks other tokens"),
        (not_finite, "tensor fc.weight holds numbers that are not finite"),
    ],
)
def test_broken_tensors_are_refused(
    folder: Path, target: LlamaTarget, change: Callable[[dict[str, Tensor]], None], text: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(WeightsError, match=text):
        load_head(folder, target)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda v: v["head"].pop("tap_layers"), WeightsError, "config.json: head: tap_layers is missing"),
        (lambda v: v["head"].update(tap_layers=[1, 2, 5]), UnsupportedModel, "tap_layers holds 5.*4 layers; allowed: 0 to 4"),
        (lambda v: v["head"].update(target_hidden_size=48), UnsupportedModel, "target_hidden_size is 48.*hidden size 32"),
        (lambda v: v["head"].update(target_vocab_size=41), VocabularyMismatch, "target_vocab_size is 41.*has 40 tokens"),
        (lambda v: v["head"].update(hidden_size=24), WeightsError, r"tensor fc.weight has shape \[32, 96\].*\[24, 96\]"),
        (lambda v: v.update(acceptence={}), WeightsError, "key 'acceptence' is unknown; did you mean 'acceptance'"),
        (lambda v: v.update(target_name=3), WeightsError, "target_name is '3'; allowed: a text"),
        (lambda v: v.update(data=[1]), WeightsError, r"data is \[1\]; allowed: an object"),
        (lambda v: v.pop("head"), WeightsError, "config.json: head is missing"),
        (lambda v: v.update(kind="dflash"), UnsupportedModel, "kind is 'dflash'; allowed: eagle3"),
    ],
)  # fmt: skip
def test_wrong_configs_are_refused(
    folder: Path, target: LlamaTarget, change: Callable[[dict[str, Any]], None], error: type[Exception], text: str
) -> None:
    change_config(folder, change)
    with pytest.raises(error, match=text) as raised:
        load_head(folder, target)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)


def test_files_of_different_heads_are_refused(folder: Path, tmp_path: Path, target: LlamaTarget) -> None:
    save_head(tmp_path / "other", tiny_head(target, norm_output=True), tiny_info(target))
    (tmp_path / "other" / "config.json").replace(folder / "config.json")
    with pytest.raises(WeightsError, match=r"norm_output is False, but True in config\.json"):
        load_head(folder, target)


def test_a_head_of_another_width_needs_its_own_embedding(tmp_path: Path, target: LlamaTarget) -> None:
    narrow = tiny_head(target, target_hidden_size=32)
    config = {**narrow.config.to_json(), "hidden_size": 16}
    from outrider.drafters.eagle_config import EagleConfig
    from outrider.drafters.eagle_head import EagleHead

    head = EagleHead(EagleConfig.from_json(config, "x"))
    head.initialise(narrow.target_ids().tolist(), seed=0)
    head.attach_embedding(torch.randn(40, 16))
    save_head(tmp_path, head, tiny_info(target))
    with pytest.raises(WeightsError, match="hidden_size is 16 and target random:5's 32"):
        load_head(tmp_path, target)
    save_head(tmp_path, head, tiny_info(target), with_embedding=True)
    assert load_head(tmp_path, target).head.config.hidden_size == 16


def test_truncated_files_and_missing_ones_are_refused(folder: Path, tmp_path: Path, target: LlamaTarget) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model.safetensors: not a sound safetensors file"):
        load_head(folder, target)
    path.unlink()
    with pytest.raises(WeightsError, match=r"model.safetensors is missing"):
        load_head(folder, target)
    with pytest.raises(ModelNotFound, match=r"holds no config.json"):
        load_head(tmp_path / "nowhere", target)
    assert is_head_folder(folder) and not is_head_folder(tmp_path) and not is_head_folder("suffix")


def test_another_fingerprint_is_a_warning_with_both(
    folder: Path, target: LlamaTarget, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_head(folder, target)
        assert not caplog.records
        load_head(folder, tiny_target(seed=6))
    [record] = caplog.records
    assert "random:5" in record.getMessage() and "random:6" in record.getMessage()


def test_an_interrupted_save_leaves_the_old_head(
    folder: Path, target: LlamaTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "model.safetensors").read_bytes()

    def broken(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(head_folder, "save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_head(folder, tiny_head(target, seed=9), tiny_info(target))
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    load_head(folder, target)


def test_the_readme_says_how_to_run_it(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    assert "--draft PATH/TO/head" in page and "before layers 1, 2, 4" in page and "* tau: 1.25" in page
