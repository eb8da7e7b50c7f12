"""Reused caches hold exactly what the new prompt begins with."""

from __future__ import annotations

import random

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.memory import CacheMemory
from outrider.engine.prefixes import MIN_SHARED, Prefix, PrefixPool
from outrider.models.table import TableCache
from outrider.sampling.params import SamplingParams
from tests.engine.support import VOCAB, table_model


def pool_of(capacity: int, budget_bytes: int = 1 << 40) -> tuple[PrefixPool, TableCache]:
    cache = TableCache()
    return PrefixPool(CacheMemory(cache, budget_bytes=budget_bytes), capacity), cache


def filled(pool: PrefixPool, tokens: list[int]) -> int:
    slot = pool._memory.take(len(tokens))
    pool._memory.cache.tokens(slot).extend(tokens)  # type: ignore[attr-defined]
    return slot


def take(pool: PrefixPool, tokens: list[int], room: int, scope: str | None = None) -> tuple[int, int]:
    taken = pool.take(tokens, room=room, scope=scope)
    assert taken is not None
    return taken


@pytest.mark.parametrize("shared", [MIN_SHARED, 20, 39, 40])
@pytest.mark.parametrize("rest", [1, 2, 9])
def test_a_slot_holds_the_beginning_of_its_prompt(shared: int, rest: int) -> None:
    pool, cache = pool_of(4)
    old = [token % VOCAB for token in range(40)]
    pool.give(old, filled(pool, old))
    prompt = [*old[:shared], *[(token + 3) % VOCAB for token in range(shared, shared + rest)]]
    slot, held = take(pool, prompt, 100)
    assert held == shared
    assert cache.tokens(slot) == prompt[:held]


def test_the_same_prompt_again_leaves_one_token_to_read() -> None:
    pool, cache = pool_of(4)
    prompt = [token % VOCAB for token in range(30)]
    pool.give(prompt, filled(pool, prompt))
    slot, held = take(pool, prompt, 100)
    assert (held, cache.tokens(slot)) == (29, prompt[:29])


def test_too_little_in_common_is_not_worth_it() -> None:
    pool, cache = pool_of(4)
    old = [1] * 40
    pool.give(old, filled(pool, old))
    slot, held = take(pool, [*old[: MIN_SHARED - 1], 2, 2], 100)
    assert (held, cache.tokens(slot), len(pool)) == (0, [], 1)


def test_random_histories_never_hand_out_a_wrong_token() -> None:
    noise = random.Random(6)
    pool, cache = pool_of(3)
    texts = [[1] * 20]
    for _ in range(300):
        base = noise.choice(texts[-6:])
        prompt = [*base[: noise.randint(1, len(base))], *noise.choices(range(2), k=noise.randint(1, 12))]
        slot, held = take(pool, prompt, 200)
        assert held < len(prompt)
        assert cache.tokens(slot) == prompt[:held]
        cache.tokens(slot).extend(prompt[held:])
        pool.give(prompt, slot)
        texts.append(prompt)
    pool.clear()
    assert not cache._tokens, "every slot must be given back"


def test_the_least_recently_finished_goes_first() -> None:
    pool, _ = pool_of(2)
    for token in (1, 2, 3):
        pool.give([token] * 20, filled(pool, [token] * 20))
    assert len(pool) == 2
    assert [take(pool, [token] * 19, 30)[1] for token in (1, 2, 3)] == [0, 18, 18]


def test_scopes_share_nothing() -> None:
    pool, _ = pool_of(4)
    text = [token % VOCAB for token in range(30)]
    pool.give(text, filled(pool, text), "alice")
    assert take(pool, text, 40, "bob")[1] == 0
    assert take(pool, text, 40)[1] == 0, "no scope is a scope of its own"
    assert take(pool, text, 40, "alice")[1] == 29


def test_a_running_sequence_is_copied_from_and_stays_as_it_is() -> None:
    pool, cache = pool_of(4)
    text = [token % VOCAB for token in range(30)]
    running = filled(pool, text[:-1])
    slot, held = pool.take([*text, 1], room=40, live=[Prefix(text, running)]) or (0, 0)
    assert slot != running and held == 29, "the last committed token is not cached yet"
    assert cache.tokens(slot) == cache.tokens(running) == text[:-1]


def test_what_is_a_beginning_of_a_newer_entry_is_dropped() -> None:
    pool, _ = pool_of(4)
    text = [token % VOCAB for token in range(60)]
    for length in (20, 40, 60):
        pool.give(text[:length], filled(pool, text[:length]))
    pool.give(text[:40], filled(pool, text[:40]), "alice")
    assert len(pool) == 2


def test_entries_make_room_oldest_first_and_only_if_that_helps() -> None:
    pool, cache = pool_of(4, budget_bytes=8 * 100)
    for token in (1, 2, 3):
        pool.give([token] * 30, filled(pool, [token] * 30))
    assert not pool.make_room(8 * 101) and len(pool) == 3, "nothing is dropped in vain"
    assert pool.make_room(8 * 30)
    assert [entry.tokens[0] for entry in pool._entries] == [2, 3]
    assert pool.take([5] * 90, room=101) is None
    assert pool.take([3] * 30, room=75) is not None, "a shared entry that stands in the way is taken over or dropped"
    assert cache.num_bytes() == pool._memory.in_use <= 8 * 100


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
