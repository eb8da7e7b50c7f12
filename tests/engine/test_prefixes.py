"""Reused caches hold exactly what the new prompt begins with."""

from __future__ import annotations

import random

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.prefixes import MIN_SHARED, PrefixPool
from outrider.models.table import TableCache
from outrider.sampling.params import SamplingParams
from tests.engine.support import VOCAB, table_model


def filled(cache: TableCache, tokens: list[int]) -> int:
    slot = cache.allocate(len(tokens))
    cache.tokens(slot).extend(tokens)
    return slot


@pytest.mark.parametrize("shared", [MIN_SHARED, 20, 39, 40])
@pytest.mark.parametrize("rest", [1, 2, 9])
def test_a_slot_holds_the_beginning_of_its_prompt(shared: int, rest: int) -> None:
    cache = TableCache()
    pool = PrefixPool(cache, capacity=4)
    old = [token % VOCAB for token in range(40)]
    pool.give(old, filled(cache, old))
    prompt = [*old[:shared], *[(token + 3) % VOCAB for token in range(shared, shared + rest)]]
    slot, held = pool.take(prompt, 100)
    assert held == shared
    assert cache.tokens(slot) == prompt[:held]


def test_the_same_prompt_again_leaves_one_token_to_read() -> None:
    cache = TableCache()
    pool = PrefixPool(cache, capacity=4)
    prompt = [token % VOCAB for token in range(30)]
    pool.give(prompt, filled(cache, prompt))
    slot, held = pool.take(prompt, 100)
    assert (held, cache.tokens(slot)) == (29, prompt[:29])


def test_too_little_in_common_is_not_worth_it() -> None:
    cache = TableCache()
    pool = PrefixPool(cache, capacity=4)
    old = [1] * 40
    pool.give(old, filled(cache, old))
    slot, held = pool.take([*old[: MIN_SHARED - 1], 2, 2], 100)
    assert (held, cache.tokens(slot), len(pool)) == (0, [], 1)


def test_random_histories_never_hand_out_a_wrong_token() -> None:
    noise = random.Random(6)
    cache = TableCache()
    pool = PrefixPool(cache, capacity=3)
    texts = [[1] * 20]
    for _ in range(300):
        base = noise.choice(texts[-6:])
        prompt = [*base[: noise.randint(1, len(base))], *noise.choices(range(2), k=noise.randint(1, 12))]
        slot, held = pool.take(prompt, 200)
        assert held < len(prompt)
        assert cache.tokens(slot) == prompt[:held]
        cache.tokens(slot).extend(prompt[held:])
        pool.give(prompt, slot)
        texts.append(prompt)
    pool.clear()
    assert not cache._tokens, "every slot must be given back"


def test_the_least_recently_finished_goes_first() -> None:
    cache = TableCache()
    pool = PrefixPool(cache, capacity=2)
    for token in (1, 2, 3):
        pool.give([token] * 20, filled(cache, [token] * 20))
    assert len(pool) == 2
    assert [pool.take([token] * 19, 30)[1] for token in (1, 2, 3)] == [0, 18, 18]


@pytest.mark.parametrize("length", [17, 30, 45])
def test_output_behind_a_reused_prefix_is_that_of_a_fresh_engine(length: int) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = [1, 2, 3, 4, 5] * 10
    reusing = Engine(table_model())
    [done] = reusing.generate([first], params)
    for behind in ([0], [0, 6], [6, 6, 0]):
        prompt = [*[*first, *done.token_ids][:length], *behind]
        [got] = reusing.generate([prompt], params)
        [fresh] = Engine(table_model(), config=EngineConfig(num_cached_prefixes=0)).generate([prompt], params)
        assert got.steps[0].rows < fresh.steps[0].rows, "nothing was reused: the test is void"
        assert got.token_ids == fresh.token_ids
