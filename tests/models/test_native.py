"""The native target against the PyTorch one, and its promise: a row's bits depend on its own path alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.cache.native import NativeCache
from outrider.device import Placement, Precision
from outrider.errors import ConfigError, PromptError
from outrider.models.base import PackedRows
from outrider.models.config import LlamaConfig, RopeConfig
from outrider.models.llama import LlamaTarget
from outrider.models.llama_weights import RandomWeights
from outrider.models.native import NativeTarget
from outrider.native.library import KERNELS, is_available

CPU = torch.device("cpu")
PRECISIONS: tuple[Precision, ...] = ("bfloat16", "int8", "int4", "int4-g128")

PLAIN = LlamaConfig(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=32,
    norm_eps=1e-5,
    max_positions=2048,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)
ODD = replace(
    PLAIN,
    vocab_size=101,
    hidden_size=88,
    intermediate_size=72,
    num_heads=6,
    num_kv_heads=2,
    head_width=22,
    tie_word_embeddings=False,
    rope=RopeConfig(theta=500.0, kind="linear", factor=2.0),
)
WIDE = replace(PLAIN, num_heads=3, num_kv_heads=1, head_width=80, num_layers=1)
MANY = replace(PLAIN, num_heads=10, num_kv_heads=5, head_width=64, num_layers=1)
SHAPES = {"plain": PLAIN, "odd": ODD, "wide": WIDE, "many": MANY}


@dataclass(frozen=True)
class Rounded:
    """Random weights that bfloat16 holds exactly, so that precisions differ in arithmetic only."""

    config: LlamaConfig
    name: str = "rounded"
    fingerprint: str = "rounded"

    def tensor(self, name: str) -> Tensor:
        return RandomWeights(config=self.config, seed=3).tensor(name).bfloat16().float()


def placement(precision: Precision) -> Placement:
    return Placement(device=CPU, precision=precision)


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not is_available(name):
        pytest.skip(f"this processor cannot run the {name} kernels")
    return name


def native(
    config: LlamaConfig, precision: Precision = "bfloat16", kernels: str | None = None, num_threads: int | None = None
) -> NativeTarget:
    return NativeTarget(Rounded(config), placement(precision), kernels=kernels, num_threads=num_threads)


def tokens_of(config: LlamaConfig, count: int, seed: int = 0) -> list[int]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (count,), generator=noise).tolist()


def feed(
    target: Any, cache: Any, slots: Sequence[int], tokens: Sequence[Sequence[int]], parents: Any = None, **more: Any
) -> Any:
    starts = [cache.length(slot) for slot in slots]
    return target.forward(
        PackedRows.pack(tokens, slots=slots, starts=starts, parents=parents, device=CPU), cache, **more
    )


def read_all(target: Any, tokens: Sequence[int], chunk: int = 10**6) -> tuple[Tensor, Any, int]:
    """Logits of every row of a prompt read in chunks, its cache and slot."""
    cache = target.new_cache()
    slot = cache.allocate(1)
    parts = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
    return torch.cat([feed(target, cache, [slot], [part]).logits_RV for part in parts]), cache, slot


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_is_close_to_float32(kernels: str, shape: str) -> None:
    config = SHAPES[shape]
    tokens = tokens_of(config, 150)
    exact, exact_cache, exact_slot = read_all(LlamaTarget(Rounded(config), placement("float32")), tokens)
    got, cache, slot = read_all(native(config, kernels=kernels), tokens)
    assert relative_error(got, exact) < 0.02
    assert relative_error(cache.read(slot).float(), exact_cache.read(exact_slot)) < 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_as_close_to_float32_as_the_pytorch_path(kernels: str, shape: str) -> None:
    config = SHAPES[shape]
    tokens = tokens_of(config, 150)
    exact, _, _ = read_all(LlamaTarget(Rounded(config), placement("float32")), tokens)
    other, _, _ = read_all(LlamaTarget(Rounded(config), placement("int8")), tokens)
    got, _, _ = read_all(native(config, "int8", kernels), tokens)
    assert relative_error(got, exact) < 1.2 * relative_error(other, exact) + 0.003
    assert relative_error(got, other) < 0.05


@pytest.mark.parametrize("precision", ["int4", "int4-g128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_four_bits_are_as_close_to_float32_as_the_pytorch_path(kernels: str, shape: str, precision: Precision) -> None:
    """Both have the same grids and levels, unless heads are no whole blocks, which moves the groups of one matrix."""
    config = SHAPES[shape]
    tokens = tokens_of(config, 150)
    exact, _, _ = read_all(LlamaTarget(Rounded(config), placement("float32")), tokens)
    other, _, _ = read_all(LlamaTarget(Rounded(config), placement(precision)), tokens)
    got, _, _ = read_all(native(config, precision, kernels), tokens)
    assert relative_error(got, exact) < 1.2 * relative_error(other, exact) + 0.003
    if config.head_width % 32 == 0:
        assert relative_error(got, other) < 0.04


def test_trees_and_batches_match_the_pytorch_path(kernels: str) -> None:
    outputs = []
    for target in (LlamaTarget(Rounded(ODD), placement("float32")), native(ODD, kernels=kernels)):
        cache = target.new_cache()
        slots = [cache.allocate(1) for _ in range(3)]
        feed(target, cache, slots, [tokens_of(ODD, 40, 1), tokens_of(ODD, 3, 2), tokens_of(ODD, 131, 3)])
        tree = (-1, 0, 0, 1, 1, 2, 5)
        rows = [tokens_of(ODD, 7, 4), [9], tokens_of(ODD, 4, 5)]
        outputs.append(feed(target, cache, slots, rows, [tree, None, (-1, 0, 0, 0)]).logits_RV)
        cache.keep(slots[0], base=40, path=(0, 2, 5))
        outputs.append(feed(target, cache, slots[:1], [[7, 8]]).logits_RV)
    assert relative_error(outputs[2], outputs[0]) < 0.02
    assert relative_error(outputs[3], outputs[1]) < 0.02


@pytest.mark.parametrize("precision", PRECISIONS)
def test_chunks_of_a_prompt_do_not_change_a_bit(kernels: str, precision: Precision) -> None:
    target = native(ODD, precision, kernels)
    tokens = tokens_of(ODD, 150)
    whole, cache, slot = read_all(target, tokens)
    for chunk in (1, 7, 32, 100):
        got, other, other_slot = read_all(target, tokens, chunk)
        assert torch.equal(got, whole), chunk
        assert torch.equal(other.read(other_slot), cache.read(slot)), chunk


@pytest.mark.parametrize("precision", PRECISIONS)
def test_threads_do_not_change_a_bit(precision: Precision) -> None:
    tokens = tokens_of(ODD, 150)
    results = []
    for num_threads in (1, 2, 5):
        results.append(read_all(native(ODD, precision, num_threads=num_threads), tokens, chunk=40)[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16, 17, 31, 33, 40])
def test_company_does_not_change_a_bit(precision: Precision, num_rows: int) -> None:
    """A row alone, and as row ``num_rows - 1`` of a pass with other sequences before and behind it."""
    target = native(PLAIN, precision)
    prompt = tokens_of(PLAIN, 140)
    _, cache, slot = read_all(target, prompt)
    alone = feed(target, cache, [slot], [[5]]).logits_RV[0]
    cache.keep(slot, base=140, path=())
    others = [cache.allocate(1) for _ in range(num_rows + 2)]
    feed(target, cache, others, [tokens_of(PLAIN, 1 + 5 * i, i) for i in range(len(others))])
    slots = [*others[: num_rows - 1], slot, *others[num_rows - 1 :]]
    together = feed(target, cache, slots, [[5] for _ in slots]).logits_RV[num_rows - 1]
    assert torch.equal(alone, together)


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    count = draw(st.integers(2, 20))
    return (-1, *(draw(st.integers(0, row - 1)) for row in range(1, count)))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=25, deadline=None)
@given(base=st.integers(1, 300), parents=trees(), data=st.data())
def test_a_path_of_a_tree_is_the_chain_bit_for_bit(
    precision: Precision, base: int, parents: tuple[int, ...], data: st.DataObject
) -> None:
    """In the tree, as a chain of its own, and for the token that follows once the path is kept."""
    target = TARGETS[precision]
    prompt, rows = tokens_of(MANY, base, base), tokens_of(MANY, len(parents), base + 1)
    path = path_to(parents, data.draw(st.integers(0, len(parents) - 1)))
    _, cache, slot = read_all(target, prompt)
    other = cache.allocate(1)
    cache.copy_prefix(slot, other, base)
    in_tree = feed(target, cache, [slot], [rows], [parents]).logits_RV[path]
    in_chain = feed(target, cache, [other], [[rows[node] for node in path]]).logits_RV
    assert torch.equal(in_tree, in_chain)
    cache.keep(slot, base=base, path=path)
    assert torch.equal(cache.read(slot), cache.read(other))
    assert torch.equal(feed(target, cache, [slot], [[3]]).logits_RV, feed(target, cache, [other], [[3]]).logits_RV)


TARGETS: dict[Precision, NativeTarget] = {}


@pytest.fixture(scope="module", autouse=True)
def _targets() -> None:
    """Hypothesis calls a test many times; its targets are built once."""
    for precision in PRECISIONS:
        TARGETS[precision] = native(MANY, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_greedy_is_argmax_of_the_logits(kernels: str, precision: Precision) -> None:
    target = native(ODD, precision, kernels)
    logits, cache, slot = read_all(target, tokens_of(ODD, 60))
    cache.keep(slot, base=0, path=())
    rows = PackedRows.pack([tokens_of(ODD, 60)], slots=[slot], starts=[0], device=CPU)
    assert torch.equal(target.forward_greedy(rows, cache).tokens_R, logits.argmax(dim=1))


def test_greedy_ties_go_to_the_lowest_id(kernels: str) -> None:
    """Every logit is the same, and blocks come from three threads."""

    class Same(Rounded):
        def tensor(self, name: str) -> Tensor:
            tensor = super().tensor(name)
            return tensor[:1].expand(tensor.shape) if name == "lm_head.weight" else tensor

    source = Same(replace(PLAIN, tie_word_embeddings=False))
    target = NativeTarget(source, placement("bfloat16"), kernels=kernels, num_threads=3)
    cache = target.new_cache()
    rows = PackedRows.pack([[1, 2, 3]], slots=[cache.allocate(1)], starts=[0], device=CPU)
    assert target.forward_greedy(rows, cache).tokens_R.tolist() == [0, 0, 0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_taps_and_chosen_logit_rows(precision: Precision) -> None:
    reference, target = LlamaTarget(Rounded(PLAIN), placement("float32")), native(PLAIN, precision)
    results = []
    loosest = 0.05 if precision in ("bfloat16", "int8") else 0.5
    for model in (reference, target):
        cache = model.new_cache()
        rows = PackedRows.pack([[1, 2, 3, 4]], slots=[cache.allocate(1)], starts=[0], device=CPU, logit_rows=(1, 3))
        results.append(model.forward(rows, cache, taps=(0, 2)))
    assert results[1].logits_RV.shape == (2, PLAIN.vocab_size)
    assert relative_error(results[1].logits_RV, results[0].logits_RV) < loosest
    for layer in (0, 2):
        assert relative_error(results[1].taps[layer].float(), results[0].taps[layer].float()) < 0.6 * loosest


@pytest.mark.parametrize("hidden", [128, 88, 96, 576, 7])
def test_taps_of_a_rotated_stream_are_turned_back(hidden: int, kernels: str) -> None:
    """Behind no layer at all the stream is the token's embedding, which int8 targets keep rotated and in bfloat16."""
    config = replace(PLAIN, hidden_size=hidden, num_layers=1)
    source = Rounded(config)
    target = NativeTarget(source, placement("int8"), kernels=kernels, num_threads=2)
    cache = target.new_cache()
    rows = PackedRows.pack([[5, 9, 200]], slots=[cache.allocate(1)], starts=[0], device=CPU)
    found = target.forward_greedy(rows, cache, taps=(0,)).taps[0].float()
    expected = source.tensor("model.embed_tokens.weight")[[5, 9, 200]]
    assert relative_error(found, expected) < 0.01


def test_a_slice_shares_weights_and_runs_the_first_layers() -> None:
    target = native(PLAIN)
    part = target.slice_layers(1)
    assert part.spec.num_layers == 1 and part.spec.fingerprint == "rounded[:1]"
    expected = LlamaTarget(Rounded(PLAIN), placement("float32")).slice_layers(1)
    tokens = tokens_of(PLAIN, 20)
    assert relative_error(read_all(part, tokens)[0], read_all(expected, tokens)[0]) < 0.02
    with pytest.raises(ConfigError, match="give 1 to 2"):
        target.slice_layers(3)


def test_the_spec_says_which_path_runs(kernels: str) -> None:
    spec = native(PLAIN, kernels=kernels).spec
    assert spec.path == f"native-{kernels}" and spec.precision == "bfloat16"


def test_float32_is_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16, int8, int4 and int4-g128 on cpu"):
        native(PLAIN, "float32")


def test_bad_tokens_and_full_windows_are_refused_before_anything_is_written() -> None:
    target = native(replace(PLAIN, max_positions=10))
    cache = target.new_cache()
    slot = cache.allocate(1)
    with pytest.raises(PromptError, match="token id 300"):
        feed(target, cache, [slot], [[1, 300]])
    with pytest.raises(PromptError, match="window of 10"):
        feed(target, cache, [slot], [[1] * 11])
    assert cache.length(slot) == 0
    assert isinstance(cache, NativeCache)


def test_positions_beyond_the_first_table(kernels: str) -> None:
    tokens = tokens_of(WIDE, 600)
    exact, _, _ = read_all(LlamaTarget(Rounded(WIDE), placement("float32")), tokens)
    assert relative_error(read_all(native(WIDE, kernels=kernels), tokens, chunk=256)[0], exact) < 0.02
