"""The head's arithmetic: against a naive one, and its training-time unroll against drafting one entry at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead, UnrolledAttention
from outrider.errors import WeightsError

from .heads import DRAFT_IDS, VOCAB, head_config, tiny_head

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "fc_bias": {"fc_bias": True},
    "two layers": {"num_layers": 2},
    "five taps": {"tap_layers": (0, 1, 2, 3, 4)},
}


def naive_outputs(head: EagleHead, hidden: Tensor, tokens: list[int], positions: list[int]) -> Tensor:
    """Outputs of a run of entries, each seeing those before it, one query and one attention head at a time."""
    c, weights = head.config, head.state_dict()
    assert head.embedding is not None
    embedded = head.embedding[tokens]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        half = c.head_width // 2
        result = x.clone()
        for i in range(half):
            angle = torch.tensor(position * c.rope.theta ** (-2 * i / c.head_width))
            result[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            result[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return result

    for layer in range(c.num_layers):
        name = "midlayer" if layer == 0 else f"layers.{layer}"
        if layer == 0:
            normed = norm(hidden, f"{name}.hidden_norm")
            inputs = torch.cat((norm(embedded, f"{name}.input_layernorm"), normed), -1)
            residual = normed if c.norm_before_residual else hidden
        else:
            inputs, residual = norm(hidden, f"{name}.input_layernorm"), hidden
        q, k, v = (
            (inputs @ weights[f"{name}.self_attn.{x}_proj.weight"].T).view(len(tokens), -1, c.head_width) for x in "qkv"
        )
        mixed = torch.zeros(len(tokens), c.num_heads, c.head_width)
        for row in range(len(tokens)):
            for head_index in range(c.num_heads):
                group = head_index // (c.num_heads // c.num_kv_heads)
                query = turned(q[row, head_index], positions[row])
                keys = torch.stack([turned(k[past, group], positions[past]) for past in range(row + 1)])
                shares = (keys @ query / c.head_width**0.5).softmax(0)
                mixed[row, head_index] = shares @ v[: row + 1, group]
        x = residual + mixed.flatten(1) @ weights[f"{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate = F.silu(y @ weights[f"{name}.mlp.gate_proj.weight"].T)
        hidden = x + (gate * (y @ weights[f"{name}.mlp.up_proj.weight"].T)) @ weights[f"{name}.mlp.down_proj.weight"].T
    return hidden


def naive_features(head: EagleHead, taps: Tensor) -> Tensor:
    """Fused taps ``[.., A * D]``, by the definition of each option."""
    c, weights = head.config, head.state_dict()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weights[f"{name}.weight"]

    if c.norm_before_fc:
        taps = norm(taps, "input_norm")
    if c.fc_norm:
        pieces = taps.split(c.target_hidden_size, -1)
        taps = torch.cat([norm(piece, f"fc_norm.{i}") for i, piece in enumerate(pieces)], -1)
    bias = weights["fc.bias"] if c.fc_bias else 0.0
    return taps @ weights["fc.weight"].T + bias


def drawn(head: EagleHead, size: int) -> tuple[Tensor, list[int]]:
    """Random taps of ``size`` positions, and the tokens of ``size + 4``."""
    taps = torch.randn(size, head.config.num_taps * head.config.target_hidden_size)
    return taps, torch.randint(VOCAB, (size + 4,)).tolist()


@pytest.mark.parametrize("name", OPTIONS)
def test_one_pass_equals_naive_arithmetic(name: str) -> None:
    head = tiny_head(**OPTIONS[name])
    taps, tokens = drawn(head, 6)
    features = head.fuse(taps)
    torch.testing.assert_close(features, naive_features(head, taps), atol=1e-4, rtol=1e-4)
    attend = UnrolledAttention(torch.ones(1, 6, 6).tril().bool())
    got = head(features[None], torch.tensor([tokens[1:7]]), torch.arange(6)[None], attend)[0]
    expected = naive_outputs(head, features, tokens[1:7], list(range(6)))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_unrolling_equals_drafting_from_every_index(name: str) -> None:
    """Unroll step s at index i is draft step s behind i: features up to i, then the head's own outputs."""
    head = tiny_head(**OPTIONS[name])
    size, steps = 5, 3
    taps, tokens = drawn(head, size)
    attend = UnrolledAttention(torch.ones(1, size, size).tril().bool())
    hidden, unrolled = head.fuse(taps)[None], []
    for step in range(steps):
        ahead = torch.tensor([tokens[1 + step : 1 + step + size]])
        output = head(hidden, ahead, torch.arange(size)[None] + step, attend)
        unrolled.append(head.logits(output)[0])
        hidden = head.feedback(output)
    for index in range(size):
        entries = head.fuse(taps)[: index + 1]
        for step in range(steps):
            count = len(entries)
            output = naive_outputs(head, entries, tokens[1 : 1 + count], list(range(count)))[-1]
            torch.testing.assert_close(unrolled[step][index], head.logits(output), atol=2e-4, rtol=2e-4)
            entries = torch.cat((entries, head.feedback(output)[None]))


def test_packed_texts_do_not_see_each_other() -> None:
    head = tiny_head()
    taps, tokens = drawn(head, 6)
    features, ahead = head.fuse(taps), torch.tensor(tokens[1:7])
    visible = torch.block_diag(torch.ones(4, 4), torch.ones(2, 2)).tril().bool()[None]
    positions = torch.tensor([0, 1, 2, 3, 0, 1])
    together = head(features[None], ahead[None], positions[None], UnrolledAttention(visible))[0]
    second = naive_outputs(head, features[4:], tokens[5:7], [0, 1])
    torch.testing.assert_close(together[4:], second, atol=1e-4, rtol=1e-4)


def test_nothing_is_usable_before_it_is_loaded() -> None:
    head = EagleHead(head_config())
    assert all(bool(parameter.isnan().all()) for parameter in head.parameters())
    assert int(head.target_ids().max()) < 0


def test_the_vocabulary_is_offsets_and_marks() -> None:
    head = tiny_head()
    assert head.target_ids().tolist() == DRAFT_IDS
    assert head.t2d.nonzero().flatten().tolist() == DRAFT_IDS
    half = head.to(torch.bfloat16)
    assert half.d2t.dtype == torch.int64 and half.t2d.dtype == torch.bool and half.target_ids().tolist() == DRAFT_IDS


def test_start_values_are_a_function_of_the_seed() -> None:
    first, again, other = tiny_head(seed=1), tiny_head(seed=1), tiny_head(seed=2)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_configs_survive_json() -> None:
    config = head_config(fc_norm=True, num_layers=2, norm_output=True)
    assert EagleConfig.from_json(config.to_json(), "x") == config


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"norm_befor_fc": True}, "key 'norm_befor_fc' is unknown; did you mean 'norm_before_fc'"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_heads": 7}, "num_heads is 7; allowed: a multiple of num_kv_heads"),
        ({"tap_layers": [2, 2, 4]}, r"tap_layers is \[2, 2, 4\]"),
        ({"tap_layers": [-1, 2]}, r"tap_layers is \[-1, 2\]"),
        ({"tap_layers": 3}, "tap_layers is 3; allowed: a list"),
        ({"fc_norm": True, "norm_before_fc": True}, "one of fc_norm and norm_before_fc"),
        ({"draft_vocab_size": 41}, "draft_vocab_size is 41; allowed: at most target_vocab_size, 40"),
        ({"norm_output": 1}, "norm_output is 1; allowed: true or false"),
        ({"rope": {"theta": 1e4, "kind": "yarn"}}, "rope kind is 'yarn'"),
    ],
)
def test_impossible_configs_are_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError, match=text):
        EagleConfig.from_json({**head_config().to_json(), **change}, "config.json")


def test_a_missing_key_is_named() -> None:
    values = head_config().to_json()
    del values["tap_layers"]
    with pytest.raises(WeightsError, match=r"config.json: tap_layers is missing"):
        EagleConfig.from_json(values, "config.json")
