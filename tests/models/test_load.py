"""Names, paths and hub ids are told apart, and a wrong one is answered with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigError, ModelNotFound, WeightsError
from outrider.models import hf
from outrider.models.checkpoint import Checkpoint, MemoryTensors
from outrider.models.load import load_checkpoint, load_target
from tests.models import _files


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m-instuct", "did you mean 'smollm2-135m-instruct'.*known alias .smollm2-135m-instruct"),
        ("gpt5", "'gpt5' is unknown; give a known alias"),
        ("./missing.gguf", r"\./missing\.gguf does not exist"),
        ("org/missing.gguf", "does not exist"),
        ("/no/such/folder", "/no/such/folder does not exist"),
        ("~nobody-of-that-name/x", "does not exist"),
        ("a/b/c", "does not exist"),
        ("", "'' is not a name"),
        ("nul\0byte", "is not a name"),
        ("x" * 5000, "is unknown"),
        ("has blank/and more", "is unknown"),
    ],
)
def test_names_that_are_nothing(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message) as caught:
        load_checkpoint(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_files_that_are_no_model(tmp_path: Path) -> None:
    for name, message in (("a.txt", "is not a model"), ("model.safetensors", "give its folder"), ("b.gguf", "GGUF")):
        (tmp_path / name).write_text("hello")
        with pytest.raises(WeightsError, match=message):
            load_checkpoint(tmp_path / name)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load_checkpoint(str(tmp_path))


def test_paths_of_files_and_folders(tmp_path: Path) -> None:
    shape = _files.config()
    tensors = _files.random_tensors(shape)
    path = _files.write_gguf(tmp_path / "Tiny.GGUF", shape, tensors)
    folder = _files.write_folder(tmp_path / "folder", shape, tensors)
    for where in (path, str(path), folder, str(folder)):
        checkpoint = load_checkpoint(where, offline=True)
        assert (checkpoint.name, checkpoint.source) == (str(where), str(where))
        assert checkpoint.tokenizer is not None


def test_hub_ids_reach_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def open_hub(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options["revision"], options["token"], options["offline"]))
        return "opened"

    monkeypatch.setattr(hf, "open_hub", open_hub)
    monkeypatch.chdir(tmp_path)
    load_checkpoint("org/model-1.0_b", revision="abc", token="secret", offline=True)
    assert asked == [("org/model-1.0_b", "abc", "secret", True)]


def test_tool_rendering_reaches_the_tokenizer(tmp_path: Path) -> None:
    shape = _files.config()
    path = _files.write_gguf(tmp_path / "tiny.gguf", shape, _files.random_tensors(shape))
    plain, as_text = load_checkpoint(path).tokenizer, load_checkpoint(path, tool_rendering="system").tokenizer
    assert plain is not None and as_text is not None
    assert plain.template_hash != as_text.template_hash


def test_precision_is_checked_before_anything_is_fetched() -> None:
    with pytest.raises(ConfigError, match="'float31' is unknown"):
        load_target("no-such-model", dtype="float31")


def test_target_of_a_file_runs(tmp_path: Path) -> None:
    shape = _files.config()
    path = _files.write_gguf(tmp_path / "tiny.gguf", shape, _files.random_tensors(shape))
    target = load_target(path, dtype="float32", device="cpu")
    assert target.spec.vocab_size == shape.vocab_size and target.spec.fingerprint == load_checkpoint(path).fingerprint


def test_shape_is_checked_again_when_a_tensor_is_read() -> None:
    shape = _files.config()
    tensors = _files.random_tensors(shape)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:3]
    checkpoint = Checkpoint(
        name="x", config=shape, fingerprint="", tokenizer=None, source="", note="", tensors=MemoryTensors(tensors)
    )
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \[3\]; the config asks for \[64\]"):
        checkpoint.tensor("model.norm.weight")
