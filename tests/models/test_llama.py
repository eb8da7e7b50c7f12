"""The Llama runtime against transformers and against itself: cached, batched, ragged, as trees."""

from __future__ import annotations

import pytest
import torch

from outrider.errors import ConfigError, PromptError
from outrider.models.config import LlamaConfig, RopeConfig

from ._tiny import logits_alone, run, tiny_config, tiny_target, token_ids, transformers_pair

CONFIGS = {
    "grouped": tiny_config(),
    "one kv head": tiny_config(num_kv_heads=1),
    "all kv heads": tiny_config(num_kv_heads=6),
    "wide heads": tiny_config(head_width=16),
    "tied": tiny_config(tie_word_embeddings=True),
    "theta": tiny_config(rope=RopeConfig(theta=100000.0)),
    "linear": tiny_config(rope=RopeConfig(kind="linear", factor=4.0)),
    "llama3": tiny_config(
        rope=RopeConfig(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_float32_logits_are_those_of_transformers(config: LlamaConfig) -> None:
    theirs, ours = transformers_pair(config)
    tokens = token_ids(150)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert (logits_alone(ours, tokens) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_taps_are_the_hidden_states_of_transformers() -> None:
    theirs, ours = transformers_pair(tiny_config())
    tokens = token_ids(13)
    with torch.no_grad():
        states = theirs.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    cache = ours.new_cache()
    result = run(ours, cache, [tokens], [cache.allocate(13)], taps=(0, 2, 3))
    assert sorted(result.taps) == [0, 2, 3]
    torch.testing.assert_close(result.taps[0], states[0][0])
    torch.testing.assert_close(result.taps[2], states[2][0], rtol=1e-5, atol=1e-5)
    # transformers' last hidden state is behind the final norm; ours is before it.
    theirs_normed = theirs.model.norm(result.taps[3])
    torch.testing.assert_close(theirs_normed, states[3][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 8, 40])
def test_cached_equals_uncached(chunk: int) -> None:
    target, tokens = tiny_target(), token_ids(90)
    whole = logits_alone(target, tokens)
    cache = target.new_cache()
    slot = cache.allocate(90)
    parts = [run(target, cache, [tokens[i : i + chunk]], [slot]).logits_RV for i in range(0, 90, chunk)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_ragged_batch_equals_each_sequence_alone() -> None:
    target = tiny_target()
    cache = target.new_cache()
    prompts = [token_ids(count, seed=count) for count in (5, 60, 17, 300, 33)]
    slots = [cache.allocate(len(prompt)) for prompt in prompts]
    run(target, cache, prompts, slots)
    more = [token_ids(count, seed=100 + count) for count in (3, 1, 9, 2, 4)]
    # Packed in another order than the cache's rows, one sequence left out.
    order = [4, 0, 3, 1]
    got = run(target, cache, [more[i] for i in order], [slots[i] for i in order]).logits_RV
    expected = torch.cat([logits_alone(target, prompts[i] + more[i])[-len(more[i]) :] for i in order])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_equal_rows_take_the_path_without_gathering() -> None:
    target = tiny_target()
    cache = target.new_cache()
    prompts = [token_ids(count, seed=count) for count in (5, 60, 17)]
    slots = [cache.allocate(64) for _ in prompts]
    run(target, cache, prompts, slots)
    for step in range(3):
        more = [token_ids(2, seed=10 * step + i) for i in range(3)]
        got = run(target, cache, more, slots).logits_RV.view(3, 2, -1)
        prompts = [prompt + rows for prompt, rows in zip(prompts, more, strict=True)]
        expected = torch.stack([logits_alone(target, prompt)[-2:] for prompt in prompts])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


TREE = (-1, 0, 0, 1, 1, 2, 5, 3)


@pytest.mark.parametrize("num_companions", [0, 2])
def test_rows_of_a_tree_equal_their_chains(num_companions: int) -> None:
    target = tiny_target()
    cache = target.new_cache()
    prompt, rows = token_ids(21), token_ids(len(TREE), seed=1)
    slots = [cache.allocate(40) for _ in range(1 + num_companions)]
    run(target, cache, [prompt] * len(slots), slots)
    tokens = [rows] + [[1, 2, 3]] * num_companions
    got = run(target, cache, tokens, slots, parents=[TREE] + [None] * num_companions).logits_RV
    for row in range(len(TREE)):
        path = [row]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        chain = logits_alone(target, prompt + [rows[i] for i in path])
        torch.testing.assert_close(got[row], chain[-1], rtol=1e-5, atol=1e-5)


def test_a_kept_tree_path_continues_like_its_chain() -> None:
    target = tiny_target()
    cache = target.new_cache()
    prompt, rows = token_ids(21), token_ids(len(TREE), seed=1)
    slot = cache.allocate(40)
    run(target, cache, [prompt], [slot])
    run(target, cache, [rows], [slot], parents=[TREE])
    cache.keep(slot, base=21, path=(0, 2, 5, 6))
    got = run(target, cache, [[7, 8]], [slot]).logits_RV
    expected = logits_alone(target, [*prompt, rows[0], rows[2], rows[5], rows[6], 7, 8])[-2:]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_logit_rows_choose_rows() -> None:
    target, tokens = tiny_target(), token_ids(20)
    cache = target.new_cache()
    some = run(target, cache, [tokens], [cache.allocate(20)], logit_rows=(19, 3)).logits_RV
    torch.testing.assert_close(some, logits_alone(target, tokens)[[19, 3]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_logits_are_float32_and_deterministic(precision: str) -> None:
    target, tokens = tiny_target(precision), token_ids(30)  # type: ignore[arg-type]
    first = logits_alone(target, tokens)
    assert first.dtype == torch.float32 and first.shape == (30, 97)
    assert torch.equal(first, logits_alone(target, tokens))


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.05), ("int8", 0.1)])
def test_lower_precisions_stay_near_float32(precision: str, tolerance: float) -> None:
    exact, tokens = logits_alone(tiny_target(), token_ids(60)), token_ids(60)
    got = logits_alone(tiny_target(precision), tokens)  # type: ignore[arg-type]
    assert (got - exact).norm() / exact.norm() < tolerance


def test_slices_share_weights_and_name_themselves() -> None:
    target, tokens = tiny_target(), token_ids(12)
    whole, part = target.slice_layers(3), target.slice_layers(2)
    assert torch.equal(logits_alone(whole, tokens), logits_alone(target, tokens))
    assert part.spec.num_layers == 2 and part.spec.name.endswith("[:2]")
    assert part.num_weight_bytes() < target.num_weight_bytes()
    cache = target.new_cache()
    tapped = run(target, cache, [tokens], [cache.allocate(12)], taps=(2,)).taps[2]
    part_cache = part.new_cache()
    assert torch.equal(run(part, part_cache, [tokens], [part_cache.allocate(12)], taps=(2,)).taps[2], tapped)
    with pytest.raises(ConfigError, match="slice:4"):
        target.slice_layers(4)


def test_requantized_is_the_same_checkpoint() -> None:
    target = tiny_target("int8").requantized("float32")
    assert target.spec.precision == "float32"
    assert torch.equal(logits_alone(target, token_ids(9)), logits_alone(tiny_target(), token_ids(9)))


def test_random_is_a_function_of_its_seed() -> None:
    tokens = token_ids(9)
    assert torch.equal(logits_alone(tiny_target(seed=3), tokens), logits_alone(tiny_target(seed=3), tokens))
    assert not torch.equal(logits_alone(tiny_target(seed=3), tokens), logits_alone(tiny_target(seed=4), tokens))


def test_rows_past_the_window_are_refused_by_name() -> None:
    target = tiny_target(max_positions=16)
    cache = target.new_cache()
    slot = cache.allocate(16)
    run(target, cache, [token_ids(15)], [slot])
    run(target, cache, [[1, 2, 3]], [slot], parents=[(-1, -1, -1)])
    cache.keep(slot, base=15, path=())
    with pytest.raises(PromptError, match="17 tokens do not fit into the model's window of 16"):
        run(target, cache, [[1, 2]], [slot])
    assert cache.length(slot) == 15
