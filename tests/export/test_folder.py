"""Heads out and back: bit-equal, refused by name where an engine cannot run them, and computed anew from the files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafters.eagle_head import UnrolledAttention
from outrider.drafters.head_folder import HeadInfo, LoadedHead, read_head
from outrider.errors import ConfigError, ModelNotFound, UnsupportedModel, VocabularyMismatch, WeightsError
from outrider.export.folder import ENGINES, engine_named, export_head, import_head, read_exported
from outrider.export.sglang import SGLANG
from outrider.export.vllm import VLLM
from outrider.models.checkpoint import Checkpoint
from outrider.models.config import RopeConfig
from tests.drafters.heads import DRAFT_IDS
from tests.export.conftest import INFO, MakeHead
from tests.export.reference import reference_logits

LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=512)
LINEAR = RopeConfig(theta=3e4, kind="linear", factor=2.0)
EVERYWHERE: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16},
    {"fc_norm": True, "norm_output": True, "tap_layers": (1, 2, 3)},
    {"norm_before_fc": True, "rope": LLAMA3, "max_positions": 99, "tap_layers": (1, 3)},
    {"whole_vocabulary": True, "rope": LINEAR},
    {"hidden_size": 24, "own_embedding": True},
]
VLLM_ONLY: list[dict[str, Any]] = [
    {"tap_layers": (0, 1, 2, 3, 4)},
    {"num_layers": 2, "norm_before_residual": True},
    {"own_embedding": True, "tap_layers": (4,)},
]
SGLANG_ONLY: list[dict[str, Any]] = [{"fc_bias": True, "tap_layers": (1, 2, 3)}]


def options(values: dict[str, Any]) -> dict[str, Any]:
    """SGLang cannot tap the last output, the default of these heads."""
    return {"tap_layers": (1, 2, 3), **values}


ROUND_TRIPS = [
    *((VLLM, each) for each in (*EVERYWHERE, *VLLM_ONLY)),
    *((SGLANG, options(each)) for each in (*EVERYWHERE, *SGLANG_ONLY)),
]


@pytest.mark.parametrize("engine, changes", ROUND_TRIPS, ids=[f"{e.name}-{'-'.join(c)}" for e, c in ROUND_TRIPS])
def test_what_comes_back_is_what_went_out(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path, engine: Any, changes: dict[str, Any]
) -> None:
    head = make_head(**changes)
    export_head(head, checkpoint, engine, tmp_path / "out")
    import_head(read_exported(tmp_path / "out"), tmp_path / "back")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (head.folder / name).read_bytes()


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_tensors_are_the_trainers_and_none_is_missing(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path, engine: Any
) -> None:
    head = make_head(tap_layers=(1, 2, 3), dtype=torch.bfloat16)
    export_head(head, checkpoint, engine, tmp_path / "out")
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), head.head.state_dict()
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
    assert "embed_tokens.weight" not in found


def test_a_copied_embedding_is_the_targets_and_does_not_come_back(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    head = make_head(dtype=torch.bfloat16)
    exported = export_head(head, checkpoint, VLLM, tmp_path / "out", with_embedding=True)
    table = checkpoint.tensor("model.embed_tokens.weight").bfloat16()
    assert torch.equal(exported.tensors["embed_tokens.weight"], table)
    back = import_head(exported, tmp_path / "back")
    assert back.head.embedding is None
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (head.folder / "model.safetensors").read_bytes()


def test_an_own_embedding_goes_out_and_comes_back(make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path) -> None:
    head = make_head(own_embedding=True)
    exported = export_head(head, checkpoint, VLLM, tmp_path / "out", with_embedding=True)
    assert head.head.embedding is not None
    assert torch.equal(exported.tensors["embed_tokens.weight"], head.head.embedding)
    back = import_head(exported, tmp_path / "back").head.embedding
    assert back is not None and torch.equal(back, head.head.embedding)


def test_the_config_says_all_that_matters(make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path) -> None:
    export_head(make_head(tap_layers=(1, 3), max_positions=99), checkpoint, VLLM, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (values["vocab_size"], values["draft_vocab_size"]) == (40, len(DRAFT_IDS))
    assert values["max_position_embeddings"] == values["outrider"]["draft_window"] == 99
    assert values["rope_theta"] == 10000.0 and values["rope_scaling"] is None
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "bias", "attention_bias"):
        assert values[flag] is False
    own = values["outrider"]
    assert own["target_name"] == INFO.target_name and own["target_fingerprint"] == INFO.target_fingerprint
    assert own["template_hash"] == INFO.template_hash and own["embedding"] == "the target's, shared"


def vllm_taps(streams: list[str], ids: list[int]) -> list[str]:
    """vLLM's rule: before the first layer, then behind every layer i under number i + 1; a sorted set."""
    found = [streams[0]] if 0 in ids else []
    return found + [streams[layer + 1] for layer in range(len(streams) - 1) if layer + 1 in ids]


def sglang_taps(streams: list[str], ids: list[int]) -> list[str]:
    """SGLang's rule: the input of every layer whose number is an id plus one."""
    return [streams[layer] for layer in range(len(streams) - 1) if layer in [each + 1 for each in ids]]


@pytest.mark.parametrize("taps", [(1, 2, 3), (2, 3), (1, 3)])
def test_each_engine_finds_the_same_hidden_states_by_its_own_numbers(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path, taps: tuple[int, ...]
) -> None:
    streams = [f"before layer {layer}" for layer in range(4)] + ["last output"]
    head = make_head(tap_layers=taps)
    wanted = [streams[tap] for tap in taps]
    for engine, rule in ((VLLM, vllm_taps), (SGLANG, sglang_taps)):
        values = export_head(head, checkpoint, engine, tmp_path / engine.name).values
        inner = values["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert rule(streams, inner) == wanted and values["eagle_aux_hidden_state_layer_ids"] == inner
        assert values["num_aux_hidden_states"] == len(taps)
    assert vllm_taps(streams, [0, 4]) == ["before layer 0", "last output"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "fc_norm": True},
        {"norm_before_fc": True, "num_layers": 2},
        {"whole_vocabulary": True, "rope": LINEAR},
        {"hidden_size": 24, "own_embedding": True},
    ],
    ids=str,
)
def test_the_files_alone_give_the_heads_logits(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path, changes: dict[str, Any]
) -> None:
    head = make_head(**changes)
    export_head(head, checkpoint, VLLM, tmp_path / "out")
    table = checkpoint.tensor("model.embed_tokens.weight")
    generator = torch.Generator().manual_seed(9)
    taps_TD = torch.randn(7, 3 * 32, generator=generator)
    tokens_T = torch.randint(0, 40, (7,), generator=generator)
    reference = reference_logits(tmp_path / "out", taps_TD, tokens_T, table)
    ours = head.head.double()
    if ours.embedding is None:
        ours.attach_embedding(table.double())
    attend = UnrolledAttention(torch.ones(1, 7, 7).tril().bool())
    output = ours(ours.fuse(taps_TD.double()[None]), tokens_T[None], torch.arange(7)[None], attend)
    logits = ours.logits(output)[0]
    torch.testing.assert_close(reference[:, ours.target_ids()], logits, rtol=1e-6, atol=1e-6)
    assert int(reference.isinf().sum()) == 7 * (40 - ours.config.draft_vocab_size)


@pytest.mark.parametrize(
    "engine, changes, reason",
    [
        (VLLM, {"fc_bias": True}, "fc_bias is true"),
        (VLLM, {"tap_layers": (2, 1)}, r"tap_layers is \[2, 1\]; allowed: ascending"),
        (SGLANG, {"tap_layers": (2, 4)}, "holds 4, the last layer's output"),
        (SGLANG, {"tap_layers": (0, 2)}, "holds 0"),
        (SGLANG, {"tap_layers": (1, 2), "norm_before_residual": True}, "norm_before_residual is true"),
        (SGLANG, {"tap_layers": (1, 2), "num_layers": 2}, "num_layers is 2"),
        (SGLANG, {"tap_layers": (2,)}, "as wide as the head"),
        (SGLANG, {"tap_layers": (1, 2), "own_embedding": True}, "embedding of its own"),
    ],
)
def test_what_an_engine_cannot_honour_is_refused_by_name(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path, engine: Any, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{engine.name} .* cannot run this head: .*{reason}"):
        export_head(make_head(**changes), checkpoint, engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_heads_of_other_targets_are_refused_or_warned_of(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(VocabularyMismatch, match="target_vocab_size is 41"):
        export_head(make_head(target_vocab_size=41), checkpoint, VLLM, tmp_path / "out")
    with pytest.raises(UnsupportedModel, match="tap_layers holds 7"):
        export_head(make_head(tap_layers=(7,)), checkpoint, VLLM, tmp_path / "out")
    other = LoadedHead(head=make_head().head, info=HeadInfo(target_name="b", target_fingerprint="0"), folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        export_head(other, checkpoint, VLLM, tmp_path / "out")
    assert "the head was made for target b with fingerprint 0" in caplog.text


def test_folders_that_hold_something_else_are_left_alone(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    head = make_head()
    with pytest.raises(ConfigError, match="which no export wrote"):
        export_head(head, checkpoint, VLLM, head.folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pytorch_model.bin").write_bytes(b"old")
    with pytest.raises(ConfigError, match=r"holds pytorch_model\.bin"):
        export_head(head, checkpoint, VLLM, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        export_head(head, checkpoint, VLLM, tmp_path / "file")
    exported = export_head(head, checkpoint, VLLM, tmp_path / "new")
    export_head(head, checkpoint, VLLM, tmp_path / "new")  # an earlier export is replaced
    with pytest.raises(ConfigError, match="holds something else than a head"):
        import_head(exported, tmp_path / "new")
    with pytest.raises(UnsupportedModel, match="head of Outrider's own already"):
        read_exported(head.folder)
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        read_exported(tmp_path / "nowhere")


def test_a_missing_tensor_is_named(make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path) -> None:
    export_head(make_head(), checkpoint, VLLM, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match=r"midlayer\.hidden_norm\.weight \[32\] is missing"):
        import_head(read_exported(tmp_path / "out"), tmp_path / "back")
    path.unlink()
    with pytest.raises(WeightsError, match=r"and so is pytorch_model\.bin"):
        read_exported(tmp_path / "out")


def public_head(folder: Path, head: LoadedHead, **changes: Any) -> None:
    """As others publish heads: a pickled file, few keys, the first layer by its other name."""
    folder.mkdir()
    config = head.head.config
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "num_hidden_layers": 1,
        "vocab_size": 40,
        "draft_vocab_size": len(DRAFT_IDS),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    values = {key: value for key, value in {**values, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name.replace("midlayer.", "layers.0."): each for name, each in head.head.state_dict().items()}
    torch.save(tensors, folder / "pytorch_model.bin")


def test_public_heads_come_in_with_their_target_named(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    head = make_head(tap_layers=(1, 2))
    public_head(tmp_path / "public", head)
    with pytest.raises(ConfigError, match="give --target"):
        import_head(read_exported(tmp_path / "public"), tmp_path / "back")
    back = import_head(read_exported(tmp_path / "public"), tmp_path / "back", checkpoint=checkpoint)
    assert back.head.config.tap_layers == (1, 2), "the authors' layers of a target with four"
    assert back.info.target_fingerprint == checkpoint.fingerprint
    wanted = head.head.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in back.head.state_dict().items())


@pytest.mark.parametrize("name, taps", [("vllm", (1, 2, 3)), ("sglang", (2, 3, 4))])
def test_a_public_list_of_taps_is_read_by_the_engines_numbers(
    make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path, name: str, taps: tuple[int, ...]
) -> None:
    public_head(tmp_path / "public", make_head(), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    exported = read_exported(tmp_path / "public", engine=engine_named(name))
    assert import_head(exported, tmp_path / "back", checkpoint=checkpoint).head.config.tap_layers == taps


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"architectures": ["MistralForCausalLM"]}, UnsupportedModel, "architecture is 'MistralForCausalLM'"),
        ({"speculators_model_type": "eagle3"}, UnsupportedModel, "written by speculators"),
        ({"attention_bias": True}, UnsupportedModel, "attention_bias is true"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, UnsupportedModel, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, WeightsError, "lacks factor"),
        ({"head_dim": None, "num_attention_heads": 7}, WeightsError, "head_dim is missing"),
        ({"rms_norm_eps": None, "intermediate_size": None}, WeightsError, "intermediate_size is missing"),
        ({"eagle_aux_hidden_state_layer_ids": "1,2"}, WeightsError, "allowed: layer indexes"),
        ({"eagle_aux_hidden_state_layer_ids": [1], "num_aux_hidden_states": 2}, WeightsError, "but 1 taps are listed"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2]}},
            WeightsError,
            "allowed: one list",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    make_head: MakeHead,
    checkpoint: Checkpoint,
    tmp_path: Path,
    changes: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    public_head(tmp_path / "public", make_head(tap_layers=(1, 2)), **changes)
    with pytest.raises(error, match=text):
        import_head(read_exported(tmp_path / "public"), tmp_path / "back", checkpoint=checkpoint)
    assert not (tmp_path / "back").exists()


def test_unknown_engines_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        engine_named("vlm")


def test_an_imported_head_reads_back(make_head: MakeHead, checkpoint: Checkpoint, tmp_path: Path) -> None:
    exported = export_head(make_head(), checkpoint, VLLM, tmp_path / "out")
    back = import_head(exported, tmp_path / "back", checkpoint=checkpoint)
    assert back.info == INFO == read_head(tmp_path / "back").info
