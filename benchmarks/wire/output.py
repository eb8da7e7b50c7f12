"""S1 to S7 over HTTP: what is said is the library's plain output, streamed and whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.scenario_parts import (
    COPY_CHAT,
    HELLO_CHAT,
    LAW_PARAMS,
    OPEN_CHAT,
    PENALTIES,
    REPEATING,
    ROBOT,
    STOP_STRINGS,
    WEATHER,
    cells_of,
    permutation_test,
    prompt_rows,
)
from benchmarks.wire.asking import Ask, ask
from benchmarks.wire.setup import Wire
from outrider import SamplingParams

__all__ = [
    "greedy_identity",
    "limits_and_choices",
    "logprobs",
    "penalties",
    "sampled_law",
    "seeds",
    "stops",
]


def _drafting(wire: Wire, k: int) -> Mapping[str, Any]:
    return {"speculation": {"num_draft_tokens": k}} if wire.has_drafter else {}


async def greedy_identity(wire: Wire) -> dict[str, Any]:
    """S1: greedy answers are the library's plain ones, for every number of draft tokens."""
    params = SamplingParams(max_tokens=wire.sizes.max_tokens)
    rows = prompt_rows(wire.sizes.prompts_per_category)
    asks = [Ask(prompt=row["messages"], params=params, more=_drafting(wire, k)) for k in wire.sizes.ks for row in rows]
    counts = await wire.same(asks)
    assert counts["drafted"] > 0 or not wire.has_drafter, "nothing was drafted, so nothing was tested"
    return counts


async def sampled_law(wire: Wire) -> dict[str, Any]:
    """S2: with a seed call by call the library's plain output, without one its law."""
    seeded = replace(LAW_PARAMS["top_k 2"], ignore_eos=False)
    calls = [Ask(prompt=WEATHER, params=replace(seeded, seed=seed)) for seed in range(wire.sizes.num_seeded_calls)]
    out: dict[str, Any] = {"seeded": await wire.same(calls)}
    prompt = REPEATING if wire.drafter in ("ngram", "suffix") else WEATHER
    for law in wire.sizes.laws:
        params = replace(LAW_PARAMS[law], n=50)
        drawn, drafted = await _draw(wire, Ask(prompt=prompt, params=params))
        plain = wire.library.draw(Ask(prompt=prompt, params=params), wire.sizes.num_calls // params.n)
        p = permutation_test(*cells_of(params, plain, drawn))
        out[law] = {"p": p, "calls": len(drawn), "drafted": drafted}
        assert p > 0.001, f"{law}: another law (p = {p})"
        assert drafted > 0 or not wire.has_drafter, f"{law}: no drafts, the test is void"
    return out


async def _draw(wire: Wire, each: Ask) -> tuple[list[tuple[int, ...]], int]:
    outputs: list[tuple[int, ...]] = []
    drafted = 0
    for _ in range(wire.sizes.num_calls // each.params.n):
        reply = await ask(wire.client, each)
        assert reply.status == 200, reply.error
        outputs += [tuple(choice.token_ids) for choice in reply.choices]
        drafted += reply.speculation["drafted"]
    return outputs, drafted


async def seeds(wire: Wire) -> dict[str, Any]:
    """S3: a seed fixes the answer, alone and in company; other seeds and no seed vary."""
    params = SamplingParams(temperature=2.0, max_tokens=10, seed=42)
    one = [Ask(prompt=ROBOT, params=params, more=_drafting(wire, k)) for k in wire.sizes.few_ks]
    alone = await wire.same(one * wire.sizes.num_repeats, at_once=1)
    crowd = [Ask(prompt=ROBOT, params=replace(params, seed=seed)) for seed in range(1, 9)]
    company = await wire.same([*crowd[:4], *one, *crowd[4:]], at_once=32)
    others = [Ask(prompt=ROBOT, params=replace(params, seed=seed)) for seed in range(43, 53)]
    await wire.same(others)
    texts = {results[0].text for results in wire.library.results(others)}
    unseeded = [await ask(wire.client, Ask(prompt=ROBOT, params=replace(params, seed=None))) for _ in range(5)]
    assert len(texts) > 1 and len({tuple(reply.choices[0].token_ids) for reply in unseeded}) > 1
    return {"alone": alone, "in company": company, "different seeds": len(texts)}


async def penalties(wire: Wire) -> dict[str, Any]:
    """S4: penalties count draft tokens exactly, and hurt nobody but the request that asked for them."""
    base = SamplingParams(max_tokens=min(48, wire.sizes.num_tokens))
    asks = [
        Ask(prompt=HELLO_CHAT, params=replace(base, **{name: value}), more=_drafting(wire, k))
        for name, values in PENALTIES.items()
        for value, k in itertools.product(values, wire.sizes.few_ks)
    ]
    return await wire.same(asks, at_once=len(asks))


async def logprobs(wire: Wire) -> dict[str, Any]:
    """S5: one entry a token, equal to the library's within 1e-3; the chosen token is listed; streamed entries join."""
    tokens = wire.sizes.num_tokens
    each = [
        SamplingParams(max_tokens=tokens, logprobs=3),
        SamplingParams(max_tokens=tokens, logprobs=0),
        SamplingParams(max_tokens=tokens, logprobs=3, temperature=0.8, seed=9),
        SamplingParams(
            max_tokens=tokens // 2, logprobs=3, temperature=0.8, seed=9, logprobs_mode="processed", top_p=0.9
        ),
    ]
    asks = [Ask(prompt=prompt, params=params) for prompt in (COPY_CHAT, ROBOT) for params in each]
    counts = await wire.same(asks)
    reply = await ask(wire.client, asks[0])
    entries = reply.choices[0].logprobs
    assert len(entries) == reply.usage["completion_tokens"] and any(value != 0.0 for _, value, _ in entries)
    assert all(token in listed and len(listed) >= 3 for token, _, listed in entries)
    return counts


async def limits_and_choices(wire: Wire) -> dict[str, Any]:
    """S6: max_tokens is exact for every value, n gives different choices, and what cannot be is refused by name."""
    most = min(20, wire.sizes.num_tokens)
    asks = [
        Ask(prompt=COPY_CHAT, params=SamplingParams(max_tokens=limit, ignore_eos=True)) for limit in range(1, most + 1)
    ]
    counts = await wire.same(asks)
    for each, [result] in zip(asks, wire.library.results(asks), strict=True):
        assert result.usage.completion_tokens == each.params.max_tokens
    several = Ask(prompt=OPEN_CHAT, params=SamplingParams(max_tokens=most, temperature=0.8, n=3, seed=7))
    counts["choices"] = (await wire.same([several]))["requests"]
    [choices] = wire.library.results([several])
    assert len({result.token_ids for result in choices}) > 1
    plain = asks[0].body()
    for wrong in (0, -1):
        await wire.refuses({**plain, "max_tokens": wrong}, "max_tokens")
    await wire.refuses({**plain, "n": 3}, "'param': 'n'")
    await wire.refuses({**plain, "n": 0}, "'param': 'n'")
    return counts


async def stops(wire: Wire) -> dict[str, Any]:
    """S7: stop tokens at every position of a run of drafts, stop strings across chunks, min_tokens and ignore_eos."""
    free = SamplingParams(max_tokens=max(18, wire.sizes.num_tokens // 2), ignore_eos=True)
    [[whole]] = wire.library.results([Ask(prompt=COPY_CHAT, params=free)])
    tokens = whole.token_ids
    places = [j for j in range(1, 19) if tokens[j - 1] not in tokens[: j - 1]][: wire.sizes.num_stops]
    each = [replace(free, stop_token_ids=(tokens[j - 1],)) for j in places]
    each += [replace(each[0], min_tokens=free.max_tokens - 10)]
    each += [SamplingParams(max_tokens=free.max_tokens, stop=(stop,)) for stop in STOP_STRINGS[: wire.sizes.num_stops]]
    each += [SamplingParams(max_tokens=free.max_tokens, stop=("never here", *STOP_STRINGS[:2]))]
    asks = [Ask(prompt=COPY_CHAT, params=params) for params in each]
    counts = await wire.same(asks)
    for position, [result] in zip(places, wire.library.results(asks)[: len(places)], strict=True):
        assert len(result.token_ids) == position and result.finish_reason == "stop"
    replies = await asyncio.gather(*(ask(wire.client, one, is_streamed=True) for one in asks if one.params.stop))
    for one, reply in zip([one for one in asks if one.params.stop], replies, strict=True):
        assert not any(stop in reply.choices[0].text for stop in one.params.stop)
    return {**counts, "positions": places}
