"""Scenario S12: what must be refused when a drafter is loaded, and what must not, by the command that a user types.

A refusal is one line on standard error and exit status 2, before anything is decoded.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.cli.main import main
from outrider.drafters.build import make_drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import HeadInfo, read_head, save_head
from outrider.drafters.lm import LMDrafter
from outrider.engine.config import MAX_DRAFT_TOKENS
from outrider.models.base import LoadedTarget
from outrider.models.checkpoint import expected_shapes
from outrider.models.config import LlamaConfig
from outrider.models.llama_weights import RandomWeights
from outrider.models.load import load_target
from tests.drafters.helpers import wish
from tests.models import _files

SHAPE: LlamaConfig = _files.config(hidden_size=32, num_layers=4, num_heads=4, head_width=8, tie_word_embeddings=False)
PADDED = replace(SHAPE, vocab_size=SHAPE.vocab_size + 128)
TAPS = (1, 2, 4)


@dataclass(frozen=True)
class World:
    """A target on disk, a head for it, and the target opened."""

    target: Path
    head: Path
    opened: LoadedTarget


def write_model(folder: Path, shape: LlamaConfig = SHAPE, *, seed: int = 5) -> Path:
    source = RandomWeights(config=shape, seed=seed)
    return _files.write_folder(folder, shape, {name: source.tensor(name) for name in expected_shapes(shape)})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("s12")
    folder = write_model(root / "target")
    target = load_target(folder, dtype="float32", device="cpu", backend="pytorch")
    head = EagleHead(EagleConfig.for_target(SHAPE, draft_vocab_size=100, tap_layers=TAPS))
    head.initialise(list(range(20, 220, 2)), seed=3)
    save_head(root / "head", head, HeadInfo.for_target(target))
    return World(target=folder, head=root / "head", opened=target)


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line of a refused command."""
        assert self.status == 2 and not self.out, self
        [line] = self.err.strip().splitlines()
        return line


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], world: World) -> Run:
    """``run("--draft", folder)``: decode a few tokens with the target."""

    def call(*argv: object, target: Path | None = None) -> Ran:
        capsys.readouterr()
        common = ["generate", "Hello", "--target", target or world.target, "--dtype", "float32", "-t", 6, "--json"]
        status = main([str(part) for part in (*common, *argv)])
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return call


def changed_head(world: World, out: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> Path:
    """A copy of the head with other values in config.json and other tensors; the weights carry no shape of their own."""
    shutil.copytree(world.head, out)
    values, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(values, tensors)
    (out / "config.json").write_text(json.dumps(values))
    save_file(tensors, out / "model.safetensors")
    return out


def test_a_draft_of_another_tokenizer(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "draft")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"A": 68', '"B": 68').replace('"B": 69', '"A": 69', 1))
    line = run("--draft", folder).refusal()
    assert f"token id 68 is 'B' in draft model {folder}" in line and "'A' in target" in line


def test_b_a_padded_draft_never_proposes_its_tail(run: Run, world: World, tmp_path: Path) -> None:
    """The tail's logits are made the largest of all; its ids must not come out even so."""
    folder = write_model(tmp_path / "draft", PADDED, seed=6)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][SHAPE.vocab_size :] *= 50
    save_file(tensors, folder / "model.safetensors")
    ran = run("--draft", folder, "-k", 4, "--schedule", "fixed")
    assert ran.status == 0
    result = json.loads(ran.out)
    assert result["speculation"]["drafted"] > 0 and max(result["token_ids"]) < SHAPE.vocab_size
    drafter = make_drafter(str(folder), world.opened)
    assert isinstance(drafter, LMDrafter)
    for spec in (str(folder), f"{folder}:width=3,depth=3"):
        proposer = make_drafter(spec, world.opened)
        assert proposer is not None
        proposer.start(0, [40, 41, 42])
        [proposal] = proposer.propose([wish([40, 41, 42], 4)])
        assert len(proposal) > 0 and max(proposal.tokens) < SHAPE.vocab_size


def renamed(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.query_proj.weight"] = tensors.pop("midlayer.self_attn.q_proj.weight")


def removed(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["midlayer.mlp.up_proj.weight"]


def other_hidden_size(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    values["head"]["target_hidden_size"] = 48


def layer_ids_missing(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del values["head"]["tap_layers"]


def layer_ids_out_of_range(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    values["head"]["tap_layers"] = [1, 2, 9]


def padded_head(values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    values["head"]["target_vocab_size"] += 128
    tensors["t2d"] = torch.cat((tensors["t2d"], torch.zeros(128, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed, ["model.safetensors", "midlayer.self_attn.q_proj.weight", "[32, 64]", "query_proj"]),
        (removed, ["model.safetensors", "midlayer.mlp.up_proj.weight", "[96, 32]", "missing"]),
        (other_hidden_size, ["config.json", "target_hidden_size is 48", "hidden size 32"]),
        (layer_ids_missing, ["config.json", "tap_layers is missing"]),
        (layer_ids_out_of_range, ["config.json", "tap_layers holds 9", "4 layers", "0 to 4"]),
        (padded_head, ["config.json", "target_vocab_size is 392", "has 264 tokens"]),
    ],
)
def test_c_to_g_heads_that_do_not_fit(
    run: Run,
    world: World,
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, Tensor]], None],
    words: list[str],
) -> None:
    """One line naming the file, the key and both values; the merged drafter reads heads by the same way."""
    folder = changed_head(world, tmp_path / "head", change)
    for draft in (str(folder), f"merged:{folder}"):
        line = run("--draft", draft).refusal()
        assert str(folder) in line and all(word in line for word in words), line


def test_h_a_folder_name_does_not_choose_the_method(run: Run, world: World, tmp_path: Path) -> None:
    """A plain model in a folder called after a method is a model; a head in a folder called after another is a head."""
    model = write_model(tmp_path / "eagle-test", seed=8)
    assert isinstance(make_drafter(str(model), world.opened), LMDrafter)
    assert json.loads(run("--draft", model).out)["speculation"]["drafter"] == str(model)
    head = tmp_path / "ngram-draft-model"
    shutil.copytree(world.head, head)
    assert isinstance(make_drafter(str(head), world.opened), EagleDrafter)


@pytest.mark.parametrize("key", ["draft_vocab_size", "eagle_aux_hidden_state_layer_ids"])
def test_h_a_head_of_another_engine_is_sent_to_import(run: Run, tmp_path: Path, key: str) -> None:
    folder = write_model(tmp_path / "their-head")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, key: 100}))
    line = run("--draft", folder).refusal()
    assert f"{folder}/config.json: key {key}" in line and f"outrider import {folder}" in line


@pytest.mark.parametrize("name", ["settings.toml", "settings.json"])
@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("num_speculatve_tokens", "num_draft_tokens"),
        ("num_speculative_tokens", "num_draft_tokens"),
        ("num_draft_token", "num_draft_tokens"),
        ("temprature", "temperature"),
    ],
)
def test_i_an_unknown_key_names_the_nearest(run: Run, tmp_path: Path, name: str, key: str, near: str) -> None:
    path = tmp_path / name
    path.write_text(f"{key} = 3\n" if name.endswith("toml") else json.dumps({key: 3}))
    line = run("--config", path).refusal()
    assert str(path) in line and repr(key) in line and f"did you mean '{near}'" in line


@pytest.mark.parametrize("k", [0, 1])
def test_j_few_draft_tokens(run: Run, world: World, k: int) -> None:
    ran = run("--draft", world.head, "-k", k, "--schedule", "fixed")
    result = json.loads(ran.out)
    assert ran.status == 0 and result["settings"]["drafter"]
    assert (result["speculation"]["drafted"] > 0) == (k == 1)


@pytest.mark.parametrize("k", [-1, 1000])
def test_j_impossible_numbers_of_draft_tokens(run: Run, world: World, k: int) -> None:
    line = run("--draft", world.head, "-k", k).refusal()
    assert "num_draft_tokens" in line and str(k) in line and f"0 to {MAX_DRAFT_TOKENS}" in line


def test_k_a_target_edited_since_the_head_was_trained(
    run: Run, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It decodes, with a warning that names both fingerprints."""
    folder = tmp_path / "edited"
    shutil.copytree(world.target, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] += 0.5
    save_file(tensors, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert run("--draft", world.head).status == 0
        assert not caplog.records
        assert run("--draft", world.head, target=folder).status == 0
    [record] = caplog.records
    recorded = read_head(world.head).info.target_fingerprint
    found = load_target(folder, dtype="float32", device="cpu", backend="pytorch").spec.fingerprint
    assert recorded != found and recorded in record.getMessage() and found in record.getMessage()


def test_l_toml_json_and_flags_come_to_the_same(run: Run, world: World, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "draft": str(world.head),
        "num_draft_tokens": 3,
        "schedule": "fixed",
        "temperature": 0.5,
        "seed": 7,
        "stop": ["zz"],
        "logit_bias": {"42": -5.0},
        "batch_size": 2,
    }
    toml, plain = tmp_path / "settings.toml", tmp_path / "settings.json"
    plain.write_text(json.dumps(values))
    bias = values.pop("logit_bias")
    toml.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items()) + "[logit_bias]\n42 = -5.0\n")
    flags = ["--draft", world.head, "-k", 3, "--schedule", "fixed", "--temperature", 0.5, "--seed", 7, "--stop", "zz"]
    flags += ["--logit-bias", f"42={bias['42']}", "--batch-size", 2]
    arms = [json.loads(run(*argv).out) for argv in (["--config", toml], ["--config", plain], flags)]
    assert arms[0]["settings"] == arms[1]["settings"] == arms[2]["settings"]
    assert arms[0]["token_ids"] == arms[1]["token_ids"] == arms[2]["token_ids"]
    assert arms[0]["settings"]["engine"]["num_draft_tokens"] == 3


def test_l_a_file_that_is_neither(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for text in ("[1]", "{broken", '{"a": NaN, }'):
        path.write_text(text)
        assert str(path) in run("--config", path).refusal()
