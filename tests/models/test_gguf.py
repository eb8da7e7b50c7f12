"""GGUF files written by the gguf library come back as the tensors, numbers and tokens that went in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outrider.errors import UnsupportedModel, WeightsError
from outrider.models.config import RopeConfig
from outrider.models.gguf import inverse_permute, open_gguf
from tests.models import _files


def _write(tmp_path: Path, **options: Any) -> Path:
    shape = options.pop("shape", _files.config())
    tensors = options.pop("tensors", None) or _files.random_tensors(shape)
    return _files.write_gguf(tmp_path / "tiny.gguf", shape, tensors, **options)


def test_float_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    shape = _files.config(tie_word_embeddings=False)
    tensors = _files.random_tensors(shape)
    checkpoint = open_gguf(_write(tmp_path, shape=shape, tensors=tensors), name="tiny")
    assert checkpoint.config == shape
    assert set(checkpoint.tensor_names()) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    assert checkpoint.note == "GGUF (F32)"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_tensors_are_what_the_library_dequantises(tmp_path: Path, kind: str) -> None:
    shape = _files.config()
    tensors = _files.random_tensors(shape)
    stored = gguf.GGMLQuantizationType[kind]
    checkpoint = open_gguf(_write(tmp_path, shape=shape, tensors=tensors, kind=stored), name="tiny")
    for name in (
        "model.layers.1.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
    ):
        expected = gguf.dequantize(gguf.quantize(tensors[name].numpy(), stored), stored)
        assert np.array_equal(checkpoint.tensor(name).numpy(), expected), name
    assert kind in checkpoint.note
    if kind == "Q4_1":
        assert checkpoint.note == "4-bit GGUF (Q4_1), dequantised"


def test_query_and_key_rows_are_put_back_into_rotate_half_order(tmp_path: Path) -> None:
    shape = _files.config()
    tensors = _files.random_tensors(shape)
    checkpoint = open_gguf(_write(tmp_path, shape=shape, tensors=tensors), name="tiny")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        assert torch.equal(checkpoint.tensor(name), tensors[name])
    interleaved = np.arange(8, dtype=np.float32).reshape(8, 1)  # one head of width 8: pairs (0, 1), (2, 3), ...
    assert inverse_permute(interleaved, 1).reshape(-1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_blocks_are_handed_out_as_they_lie_in_the_file(tmp_path: Path, kind: str) -> None:
    """The same numbers as the dequantised tensor, rows in the same order."""
    checkpoint = open_gguf(_write(tmp_path, kind=gguf.GGMLQuantizationType[kind]), name="tiny")
    for name in checkpoint.tensor_names():
        grid = checkpoint.grid(name)
        if name.endswith("norm.weight"):
            assert grid is None
            continue
        assert grid is not None and int(grid.levels.max()) == 15 and grid.group == 32
        torch.testing.assert_close(grid.dequantised(), checkpoint.tensor(name), rtol=1e-6, atol=1e-6)


def test_other_types_and_damaged_blocks_are_on_no_grid(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    assert open_gguf(_write(tmp_path, kind=gguf.GGMLQuantizationType.Q8_0), name="tiny").grid(name) is None
    path = _write(tmp_path, kind=gguf.GGMLQuantizationType.Q4_1)
    row = open_gguf(path, name="tiny").tensors._rows[name]
    damaged = bytearray(path.read_bytes())
    damaged[row.offset : row.offset + 2] = np.float16("nan").tobytes()
    path.write_bytes(damaged)
    checkpoint = open_gguf(path, name="tiny")
    assert checkpoint.grid(name) is None
    with pytest.raises(WeightsError, match="NaN"):
        checkpoint.tensor(name)


def test_lm_head_is_tied_exactly_if_the_file_has_none(tmp_path: Path) -> None:
    tied = open_gguf(_write(tmp_path), name="tiny")
    assert tied.config.tie_word_embeddings
    assert "lm_head.weight" not in tied.tensor_names()
    assert torch.equal(tied.tensor("lm_head.weight"), tied.tensor("model.embed_tokens.weight"))


def test_eos_ids_of_all_kinds_are_read_once_each(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    checkpoint = open_gguf(_write(tmp_path, keys=keys), name="tiny")
    assert checkpoint.config.eos_token_ids == (2, 0)
    assert checkpoint.tokenizer is not None and checkpoint.tokenizer.eos_token_ids == (2, 0)


def test_linear_rope(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert open_gguf(_write(tmp_path, keys=keys), name="tiny").config.rope == RopeConfig(kind="linear", factor=4.0)


def _llama3_divisors(theta: float, width: int, low: float, high: float) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter computes them (factor 8, original window 8192)."""
    divisors = []
    for i in range(width // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / width)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(8.0)
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2.0, 16.0)])
def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path, low: float, high: float) -> None:
    shape = _files.config(num_heads=1, num_kv_heads=1, head_width=64, rope=RopeConfig(theta=500000.0))
    divisors = _llama3_divisors(500000.0, 64, low, high)
    rope = open_gguf(_write(tmp_path, shape=shape, extra={"rope_freqs.weight": divisors}), name="tiny").config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("llama3", 8.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == pytest.approx((low, high), rel=1e-3)


def test_divisors_of_one_are_plain_rope(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    assert open_gguf(_write(tmp_path, extra=extra), name="tiny").config.rope.kind == "default"


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        open_gguf(_write(tmp_path, extra=extra), name="tiny")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.attention.value_length": 8}, "value heads"),
        ({"llama.attention.sliding_window": 100}, "sliding-window"),
        ({"llama.logit_scale": 2.0}, "logit_scale"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.attention.head_count_kv": 3}, "do not divide"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama'"),
        ({"tokenizer.ggml.pre": "deepseek-v3"}, "pre-tokenizer 'deepseek-v3'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer 'None'"),
    ],
)
def test_variants_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        open_gguf(_write(tmp_path, keys=keys), name="tiny")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'qwen3'"):
        open_gguf(_write(tmp_path, architecture="qwen3"), name="tiny")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.embedding_length": None}, "lacks llama.embedding_length"),
        ({"llama.block_count": "two"}, "unexpected value 'two'"),
        ({"llama.block_count": 4_000_000_000}, "num_layers"),
        ({"llama.attention.head_count": 0}, "head_count 0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "norm_eps"),
        ({"llama.feed_forward_length": 97}, r"ffn|mlp.*shape \[96, 64\].*\[97, 64\]"),
        ({"llama.block_count": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"tokenizer.ggml.merges": ["he"]}, "merge 'he'"),
        ({"tokenizer.ggml.merges": ["xyz zyx"]}, "cannot be built"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type"),
        ({"tokenizer.ggml.tokens": [*_files.TOKENS[:-1], "a"]}, "twice"),
        ({"tokenizer.ggml.eos_token_id": 100000}, "eos_token_id 100000"),
    ],
)
def test_contradictions_name_file_and_key(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        open_gguf(_write(tmp_path, keys=keys), name="tiny")
    assert "tiny.gguf" in str(caught.value)


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)}
    with pytest.raises(WeightsError, match=r"self_attn\.q_proj\.bias"):
        open_gguf(_write(tmp_path, extra=extra), name="tiny")


def test_tensor_type_without_dequantiser_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight has type I32"):
        open_gguf(_write(tmp_path, extra={"rope_freqs.weight": np.ones(8, dtype=np.int32)}), name="tiny")


def test_not_a_number_is_found_when_the_tensor_is_read(tmp_path: Path) -> None:
    shape = _files.config()
    tensors = _files.random_tensors(shape)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    checkpoint = open_gguf(_write(tmp_path, shape=shape, tensors=tensors), name="tiny")
    with pytest.raises(WeightsError, match=r"tiny.gguf: tensor model.layers.0.mlp.up_proj.weight holds 1 values"):
        checkpoint.tensor("model.layers.0.mlp.up_proj.weight")


def test_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    whole = _write(tmp_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 7, 20, 23, 24, 100, 1000, len(whole) // 2, len(whole) - 4096]:
        cut.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            open_gguf(cut, name="cut")


def test_big_endian_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(UnsupportedModel, match="big-endian"):
        open_gguf(path, name="big")


def test_bos_is_added_to_raw_prompts_only_if_the_file_says_so(tmp_path: Path) -> None:
    plain = open_gguf(_write(tmp_path), name="tiny").tokenizer
    assert plain is not None
    assert plain.encode_prompt("hello") == plain.encode("hello")
    keys = {"tokenizer.ggml.add_bos_token": True}
    adding = open_gguf(_write(tmp_path, keys=keys), name="tiny").tokenizer
    assert adding is not None
    assert adding.encode_prompt("hello") == [1, *plain.encode("hello")]
    assert adding.encode("hello") == plain.encode("hello")


def test_user_defined_tokens_are_kept_whole_and_are_not_special(tmp_path: Path) -> None:
    kinds = [3, 3, 3, *([1] * (len(_files.TOKENS) - 3))]
    kinds[1] = 4
    tokenizer = open_gguf(_write(tmp_path, keys={"tokenizer.ggml.token_type": kinds}), name="tiny").tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("a<|im_start|><|im_end|>")[1:] == [1, 2]
    assert tokenizer.special_token_ids == {0, 2}
    assert tokenizer.decode([1, 2]) == "<|im_start|>"


def test_tokenizer_equals_the_one_built_by_hand(tmp_path: Path) -> None:
    tokenizer = open_gguf(_write(tmp_path), name="tiny").tokenizer
    assert tokenizer is not None
    by_hand = _files.tokenizer()
    for text in ("hello world 1234", "<|im_start|>user\nhé<|im_end|>", "  \n\t12.5 ½ 日本 😀", "don't", ""):
        assert tokenizer.encode(text) == by_hand.encode(text)
    assert tokenizer.vocabulary_hash() == by_hand.vocabulary_hash()


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "ab 1234", ["ab", " ", "1", "2", "3", "4"]),
        ("gpt-2", "ab 1234", ["ab", " 1234"]),
        ("llama-bpe", "ab 12345 it's\n\n x", ["ab", " ", "123", "45", " it", "'s", "\n\n", " x"]),
        ("qwen2", "ab 123.x", ["ab", " ", "1", "2", "3", ".x"]),
    ],
)
def test_text_is_cut_by_the_models_own_rule(pre: str, text: str, pieces: list[str]) -> None:
    from outrider.models.gguf_vocab import PRE_TOKENIZERS

    cut = PRE_TOKENIZERS[pre]().pre_tokenize_str(text)
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == pieces
