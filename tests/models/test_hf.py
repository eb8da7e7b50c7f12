"""Folders written by transformers and safetensors come back; every variant that would run wrongly is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ModelNotFound, UnsupportedModel, WeightsError
from outrider.models.config import RopeConfig
from outrider.models.hf import open_folder, open_hub
from tests.models import _files


def _folder(tmp_path: Path, **changes: Any) -> Path:
    shape = _files.config()
    return _files.write_folder(tmp_path / "tiny", shape, _files.random_tensors(shape), **changes)


def _open(folder: Path) -> Any:
    return open_folder(folder, name="tiny")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A random Llama that transformers saved in shards, and its tensors."""
    import transformers

    torch.manual_seed(0)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            rope_parameters=rope,
            eos_token_id=[2, 3],
        )
    )
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder, max_shard_size="10KB")
    return folder, dict(model.state_dict())


def test_sharded_folder_of_transformers(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = saved
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    checkpoint = _open(folder)
    assert set(checkpoint.tensor_names()) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    assert (checkpoint.config.head_width, checkpoint.config.num_kv_heads) == (16, 2)
    assert checkpoint.config.eos_token_ids == (2, 3)
    assert checkpoint.config.rope == RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_positions=64)
    assert checkpoint.tokenizer is None


def test_bin_files_hold_the_same_model(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = saved
    for file in ("config.json", "generation_config.json"):
        shutil.copy(folder / file, tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    single = _open(tmp_path)
    assert torch.equal(single.tensor("model.norm.weight"), tensors["model.norm.weight"])
    assert single.fingerprint == _open(folder).fingerprint

    (tmp_path / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    parts = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for file, part in parts.items():
        torch.save(
            {name: tensors[name] for name in part},
            tmp_path / file,
            _use_new_zipfile_serialization=file.endswith("1.bin"),
        )
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    _files.write_json(tmp_path / "pytorch_model.bin.index.json", index)
    sharded = _open(tmp_path)
    assert sharded.fingerprint == single.fingerprint
    assert torch.equal(sharded.tensor(names[-1]), tensors[names[-1]])


def test_bfloat16_keeps_its_precision(tmp_path: Path) -> None:
    shape = _files.config()
    tensors = {name: tensor.bfloat16() for name, tensor in _files.random_tensors(shape).items()}
    checkpoint = _open(_files.write_folder(tmp_path / "tiny", shape, tensors))
    assert torch.equal(checkpoint.tensor("model.norm.weight"), tensors["model.norm.weight"])


def test_tied_head_in_the_file_is_not_needed_and_not_in_the_way(tmp_path: Path) -> None:
    shape = _files.config()
    tensors = _files.random_tensors(shape)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    checkpoint = _open(_files.write_folder(tmp_path / "tiny", shape, tensors))
    assert torch.equal(checkpoint.tensor("lm_head.weight"), tensors["model.embed_tokens.weight"])


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    gone = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "head_dim", "eos_token_id")
    shape = _files.config(num_kv_heads=4)
    changes: dict[str, Any] = dict.fromkeys(gone)
    folder = _files.write_folder(tmp_path / "tiny", shape, _files.random_tensors(shape), **changes)
    config = _open(folder).config
    assert (config.num_kv_heads, config.norm_eps, config.max_positions) == (4, 1e-6, 2048)
    assert (config.head_width, config.eos_token_ids, config.rope) == (16, (), RopeConfig())


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5.0}, RopeConfig(theta=5.0, kind="linear", factor=2)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeConfig()),
        ({"rope_parameters": {"type": "linear", "factor": 4, "rope_theta": 2}}, RopeConfig(theta=2, kind="linear", factor=4)),
        ({"rope_scaling": None, "rope_theta": 1e6}, RopeConfig(theta=1e6)),
    ],
)  # fmt: skip
def test_rope_in_old_and_new_form(tmp_path: Path, changes: dict[str, Any], rope: RopeConfig) -> None:
    assert _open(_folder(tmp_path, **changes)).config.rope == rope


def test_generation_config_wins_for_eos(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    assert _open(folder).config.eos_token_ids == (2,)
    _files.write_json(folder / "generation_config.json", {"eos_token_id": [0, 2, 0]})
    checkpoint = _open(folder)
    assert checkpoint.config.eos_token_ids == (0, 2)
    assert checkpoint.tokenizer.eos_token_ids == (0, 2)


def test_mistral_without_window_is_llama(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert _open(_folder(tmp_path, **changes, sliding_window=256)).config.num_layers == 2
    with pytest.raises(UnsupportedModel, match=r"sliding-window attention \(100 tokens"):
        _open(_folder(tmp_path, **changes, sliding_window=100))
    with pytest.raises(UnsupportedModel, match=r"sliding-window attention \(4096 tokens"):
        _open(_folder(tmp_path, **changes, max_position_embeddings=32768))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "'Qwen2ForCausalLM'"),
        ({"architectures": ["LlamaModel"]}, "'LlamaModel'"),
        ({"architectures": None, "model_type": "gemma"}, "'gemma'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
    ],
)
def test_variants_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        _open(_folder(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": 10**12}, "num_layers 1000000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"rms_norm_eps": -1.0}, "norm_eps -1.0"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": 3}, "rope_scaling is '3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1,
                           "original_max_position_embeddings": 8192}}, "contradict"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"tie_word_embeddings": False}, r"tensor lm_head.weight is missing; its shape should be \[264, 64\]"),
        ({"intermediate_size": 97}, r"gate_proj.weight has shape \[96, 64\]; the config asks for \[97, 64\]"),
    ],
)  # fmt: skip
def test_contradictions_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        _open(_folder(tmp_path, **changes))


def test_error_names_the_shard_the_tensor_and_both_shapes(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    name = "model.layers.1.mlp.up_proj.weight"
    shard = next(file for file in folder.glob("model-*.safetensors") if name in load_file(file))
    save_file({**load_file(shard), name: torch.zeros(3, 5)}, shard)
    with pytest.raises(WeightsError) as caught:
        _open(folder)
    assert shard.name in str(caught.value) and f"{name} has shape [3, 5]; the config asks for [48, 32]" in str(
        caught.value
    )
    shard.unlink()
    with pytest.raises(WeightsError, match=f"names the shard '{shard.name}'"):
        _open(folder)


def test_index_cannot_point_out_of_the_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    _files.write_json(
        folder / "model.safetensors.index.json", {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    )
    with pytest.raises(WeightsError, match="not a file in this folder"):
        _open(folder)


def test_quantised_tensors_without_a_config_entry_are_refused(tmp_path: Path) -> None:
    shape = _files.config()
    for name, tensor in (
        ("model.layers.0.mlp.up_proj.qweight", torch.zeros(4, dtype=torch.int32)),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(96, 64).to(torch.float8_e4m3fn)),
    ):
        folder = _files.write_folder(tmp_path / "tiny", shape, {**_files.random_tensors(shape), name: tensor})
        with pytest.raises(UnsupportedModel, match=f"tensor {name}"):
            _open(folder)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    shape = _files.config()
    tensors = {**_files.random_tensors(shape), "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    with pytest.raises(WeightsError, match="q_norm"):
        _open(_files.write_folder(tmp_path / "tiny", shape, tensors))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(tmp_path: Path, bad: float) -> None:
    shape = _files.config()
    tensors = _files.random_tensors(shape)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 7] = bad
    checkpoint = _open(_files.write_folder(tmp_path / "tiny", shape, tensors))
    with pytest.raises(
        WeightsError, match=r"model.safetensors: tensor model.layers.1.mlp.down_proj.weight holds 1 values"
    ):
        checkpoint.tensor("model.layers.1.mlp.down_proj.weight")


def test_large_finite_values_are_not_mistaken_for_infinite_ones(tmp_path: Path) -> None:
    shape = _files.config()
    tensors = _files.random_tensors(shape)
    tensors["model.norm.weight"][:] = 3e38  # their sum overflows float32
    checkpoint = _open(_files.write_folder(tmp_path / "tiny", shape, tensors))
    assert torch.equal(checkpoint.tensor("model.norm.weight"), tensors["model.norm.weight"])


def test_truncated_safetensors(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for length in (0, 5, 8, 100, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"model\.safetensors: not a sound safetensors file"):
            _open(folder)


def test_pickles_run_no_code_and_declare_no_more_than_they_hold(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").unlink()
    target = folder / "pytorch_model.bin"
    torch.save({"model.norm.weight": Path("/")}, target)
    with pytest.raises(WeightsError, match="not a sound PyTorch weight file"):
        _open(folder)
    torch.save({"model.norm.weight": torch.zeros(1).expand(2**40)}, target)
    with pytest.raises(WeightsError, match="more than the file holds"):
        _open(folder)
    torch.save([torch.zeros(1)], target)
    with pytest.raises(WeightsError, match="holds list"):
        _open(folder)
    torch.save({"model.norm.weight": 3}, target)
    with pytest.raises(WeightsError, match="is int"):
        _open(folder)


def test_folder_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        _open(tmp_path)
    folder = _folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="holds no weights"):
        _open(folder)


def test_tokenizer_and_templates(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    tokenizer = _open(folder).tokenizer
    assert tokenizer.encode("hello 12") == _files.tokenizer().encode("hello 12")
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    named = [
        {"name": "default", "template": "plain {{ eos_token }}"},
        {"name": "tool_use", "template": "{{ tools|length }}"},
    ]
    _files.write_json(
        folder / "tokenizer_config.json", {"chat_template": named, "eos_token": {"content": "<|im_end|>"}}
    )
    tokenizer = _open(folder).tokenizer
    assert tokenizer.render_chat(chat) == "plain <|im_end|>"
    assert tokenizer.render_chat(chat, tools=[{"name": "f"}]) == "1"
    (folder / "chat_template.jinja").write_text("from the file")
    assert _open(folder).tokenizer.render_chat(chat) == "from the file"


def test_broken_tokenizer_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not a sound tokenizer"):
        _open(folder)


def test_hub_downloads_only_what_is_needed_and_falls_back_to_bin(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    asked: list[list[str]] = []

    def snapshot(patterns: list[str]) -> str:
        asked.append(patterns)
        return str(folder)

    checkpoint = open_hub("org/tiny", revision="abc", snapshot=snapshot)
    assert (checkpoint.name, checkpoint.source) == ("org/tiny", "org/tiny at abc (Hugging Face hub)")
    assert len(asked) == 1 and "model.safetensors" in asked[0] and not any("bin" in pattern for pattern in asked[0])
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    open_hub("org/tiny", snapshot=snapshot)
    assert len(asked) == 3 and "pytorch_model.bin" in asked[2]


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError("bad"), RuntimeError("404")])
def test_hub_failures_say_what_to_do(error: Exception) -> None:
    def snapshot(patterns: list[str]) -> str:
        raise error

    with pytest.raises(ModelNotFound, match=f"hub model 'org/tiny' cannot be had: .*{error}; check the name"):
        open_hub("org/tiny", snapshot=snapshot)
    with pytest.raises(ModelNotFound, match="run once without offline mode"):
        open_hub("org/tiny", snapshot=snapshot, offline=True)


def test_hub_offline_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="org/tiny-that-is-not-there"):
        open_hub("org/tiny-that-is-not-there", offline=True)
