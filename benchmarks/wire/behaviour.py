"""S8 to S11 over HTTP, and what a server alone can get wrong: company, leaving, limits, shared prefixes, wishes, refusals."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.scenario_parts import COPY_CHAT, HELLO_CHAT, ODD_PROMPTS, OPEN_CHAT, ROBOT
from benchmarks.wire.asking import Ask, ask, compare
from benchmarks.wire.setup import Wire
from benchmarks.wire.tool_chat import PLACES, TOOLS, tool_chat
from outrider import SamplingParams
from outrider.errors import OutriderError
from outrider.sampling.constraint import StructuredOutputs

__all__ = [
    "batch_mates",
    "json_under_load",
    "leaving",
    "limits",
    "odd_prompts",
    "prefixes",
    "refusals",
    "streaming",
    "tool_calls",
    "wishes",
]

OK_SCHEMA = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
SAY_HELLO = [{"role": "user", "content": "Say hello world 500 times"}]
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"


async def streaming(wire: Wire) -> dict[str, Any]:
    """S8: deltas join to the whole text byte for byte, a short answer is not empty, no half characters."""
    most = wire.sizes.story_tokens
    texts = ("Reply with exactly: OK", "Repeat 5 times: 日本語テスト 👩‍👩‍👧 é ﷽", "Tell a long story.")
    asks = [Ask(prompt=[{"role": "user", "content": text}], params=SamplingParams(max_tokens=most)) for text in texts]
    drawn = [replace(each, params=replace(each.params, temperature=1.0, seed=3)) for each in asks]
    counts = await wire.same([*asks, *drawn])
    for [result] in wire.library.results(asks):  # what is drawn may be no text
        assert result.text and "\ufffd" not in result.text[:-1]  # a limit may cut the last character
    return counts


async def tool_calls(wire: Wire) -> dict[str, Any]:
    """S9: prompts with tools: tokens are the library's, a stream holds the calls of the whole answer; free and forced."""
    rows = [row for row in wire.rows if row.get("tools")][: wire.sizes.num_tool_prompts]
    assert rows, "no prompts with tools; give --traffic"
    params = SamplingParams(max_tokens=wire.sizes.num_tokens)
    asks = [Ask(prompt=row["messages"], tools=row["tools"], params=params) for row in rows]
    shown = [f"{tool} in {place}?" for place in PLACES for tool in ("weather", "clock")][: len(rows)]
    if wire.library.target.spec.max_positions > 2048:  # a chat with examples is long
        asks += [Ask(prompt=tool_chat(question), tools=TOOLS, params=params) for question in shown]
    counts: dict[str, Any] = await wire.same(asks)
    replies = await asyncio.gather(*(ask(wire.client, each) for each in asks))
    calls = [call for reply in replies for call in reply.choices[0].calls.values()]
    # An answer that the limit cuts may end inside the arguments.
    whole = [r.choices[0] for r in replies if r.choices[0].finish_reason == "tool_calls"]
    assert all(isinstance(json.loads(arguments), dict) for choice in whole for _, arguments in choice.calls.values())
    forced = await _forced_calls(wire, asks[: max(1, len(asks) // 5)])
    return {**counts, "calls": len(calls), "answers that end with calls": len(whole), **forced}


async def _forced_calls(wire: Wire, asks: Sequence[Ask]) -> dict[str, int]:
    """``tool_choice`` required, and the first tool by name."""
    forced = [replace(each, choice="required") for each in asks]
    for each in asks:
        assert each.tools
        first = each.tools[0]["function"]["name"]
        forced.append(replace(each, choice={"type": "function", "function": {"name": first}}))
    counts = await wire.same(forced)
    ended = 0
    for each in forced:
        choice = (await ask(wire.client, each)).choices[0]
        names = {tool["function"]["name"] for tool in each.tools or ()}
        assert {name for name, _ in choice.calls.values()} <= names, choice
        if choice.finish_reason == "tool_calls":  # else the limit may have cut it before its name was known
            assert choice.text == "", choice
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in choice.calls.values()), choice
            ended += 1
    return {"forced": counts["requests"], "forced that end with calls": ended}


async def json_under_load(wire: Wire) -> dict[str, Any]:
    """S10: many constrained answers beside plain ones, all at once: each is the library's own, and fits."""
    some, few = wire.sizes.num_json, max(1, wire.sizes.num_json // 3)
    base = SamplingParams(max_tokens=wire.sizes.max_tokens)
    anything = _seeds(replace(base, structured_outputs=StructuredOutputs(json_object=True)), some)
    fitting = _seeds(replace(base, structured_outputs=StructuredOutputs(json=OK_SCHEMA)), few)
    plain = _seeds(base, few)
    asks = [Ask(prompt=SAY_HELLO, params=params) for params in (*anything, *fitting, *plain)]
    random.Random(0).shuffle(asks)
    counts: dict[str, Any] = await wire.same(asks, at_once=len(asks))
    ended: Counter[str] = Counter()
    for each, [result] in zip(asks, wire.library.results(asks), strict=True):
        constraint = each.params.structured_outputs
        if constraint is not None and result.finish_reason == "stop":
            value = json.loads(result.text)
            assert isinstance(value, dict) and (constraint.json_object or value["ok"] is True), result.text
        ended[f"{'plain' if constraint is None else constraint.kind} {result.finish_reason}"] += 1
    await _refused_constraints(wire)
    return {**counts, "ended": dict(ended)}


def _seeds(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Greedy, then with seeds."""
    return [params, *(replace(params, temperature=0.8, seed=seed) for seed in range(count - 1))]


async def _refused_constraints(wire: Wire) -> None:
    body = {"messages": SAY_HELLO, "max_tokens": 4}
    broken = {"type": "string", "pattern": "(["}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": broken}}
    await wire.refuses({**body, "response_format": schema}, "response_format")
    await wire.refuses({**body, "structured_outputs": {"regex": "(["}}, "structured_outputs.regex")
    await wire.refuses({**body, "structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar")
    await wire.refuses({**body, "structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice")


async def odd_prompts(wire: Wire) -> dict[str, Any]:
    """S11: odd prompts are answered as by the library, or refused as by the library; the server lives on."""
    seen: Counter[str] = Counter()
    for prompt in ODD_PROMPTS:
        chat = prompt == [] or (isinstance(prompt, list) and isinstance(prompt[0], dict))
        if prompt == []:
            await wire.refuses({"messages": []}, "no messages")
        each = Ask(prompt=prompt, params=SamplingParams(max_tokens=min(8, wire.sizes.num_tokens)))
        [expected] = wire.library.plain([each])
        for is_streamed in (False, True):
            reply = await ask(wire.client, each, is_streamed=is_streamed)
            if isinstance(expected, OutriderError):
                assert reply.status == 400, (prompt, reply)
                # Where an empty list stands for a prompt of no kind, the endpoint says it in its own words.
                assert chat or str(expected) in reply.error["message"], (prompt, reply.error, str(expected))
            else:
                compare(reply, expected)
            seen["refused" if reply.status == 400 else "answered"] += 1
        await wire.is_well()
    return dict(seen)


async def batch_mates(wire: Wire) -> dict[str, Any]:
    """Greedy, seeded, penalised, biased, constrained by two grammars, stopped, listed: all at once, each as if alone."""
    most = wire.sizes.num_tokens
    free = SamplingParams(max_tokens=most)
    each = [
        free,
        replace(free, temperature=1.2, seed=1),
        replace(free, temperature=0.7, top_p=0.8, top_k=20, min_p=0.01, seed=2, n=2),
        replace(free, frequency_penalty=1.5),
        replace(free, repetition_penalty=1.4, temperature=0.9, seed=3),
        replace(free, logit_bias={198: -100.0, 260: 5.0}),
        replace(free, bad_words=("the", "hello")),
        replace(free, logprobs=2),
        replace(free, stop=("ll", "\n")),
        replace(free, min_tokens=most - 2),
        replace(free, structured_outputs=StructuredOutputs(regex=DATE)),
        replace(free, structured_outputs=StructuredOutputs(choice=("yes, it is", "no, never", "maybe"))),
        replace(free, structured_outputs=StructuredOutputs(json=OK_SCHEMA), temperature=1.0, seed=4),
    ]
    asks = [Ask(prompt=prompt, params=params) for prompt in (HELLO_CHAT, ROBOT) for params in each]
    random.Random(1).shuffle(asks)
    return await wire.same(asks, at_once=len(asks) * 2)


async def leaving(wire: Wire) -> dict[str, Any]:
    """Clients leave in the middle, while others go on: those are answered as ever, and nothing stays behind."""
    rng = random.Random(2)
    most = min(1000, wire.library.target.spec.max_positions // 2)
    endless = Ask(prompt=OPEN_CHAT, params=SamplingParams(max_tokens=most, ignore_eos=True))
    before = (await wire.until_idle())["load"]["cancelled"]

    async def leave(number: int) -> int:
        body = {**endless.body(), "stream": number % 2 == 0, "temperature": 1.0, "n": 1 + number % 2}
        request = wire.client.request(endless.path, body)
        return (await wire.client.send(request, leave_after_s=rng.uniform(0.05, 1.5))).status

    stay = [Ask(prompt=COPY_CHAT, params=SamplingParams(max_tokens=wire.sizes.num_tokens, seed=5, temperature=0.5))]
    num_leavers = min(wire.sizes.num_leavers, wire.max_waiting)
    _, counts = await asyncio.gather(asyncio.gather(*(leave(n) for n in range(num_leavers))), wire.same(stay))
    status = await wire.until_idle()
    assert status["load"]["cancelled"] > before, "nobody was cancelled, so nothing was tested"
    return {**counts, "left": num_leavers, "cancelled": status["load"]["cancelled"] - before}


async def limits(wire: Wire) -> dict[str, Any]:
    """Too long, too large, too many at once: refused by status, and whoever was accepted is served."""
    window = wire.library.target.spec.max_positions
    long = {"prompt": [5] * window, "max_tokens": 1}
    await wire.refuses(long, "window", path="/v1/completions")
    await wire.refuses({"prompt": ROBOT, "max_tokens": window}, "max_tokens", path="/v1/completions")
    await wire.refuses(b'{"prompt": "' + b"x" * (5 << 20) + b'"}', "larger", status=413, path="/v1/completions")
    await wire.refuses({}, "nothing at", status=404, path="/v1/chat/completion")
    await wire.refuses({"messages": HELLO_CHAT, "model": "other"}, "other", status=404)
    each = Ask(prompt=ROBOT, params=SamplingParams(max_tokens=2))
    [expected] = wire.library.results([each])
    crowd = 3 * (wire.max_waiting + wire.max_batch_size)
    answers = await asyncio.gather(*(wire.client.post(each.path, each.body()) for _ in range(crowd)))
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) <= {200, 429} and statuses[200] >= min(crowd, wire.max_waiting), statuses
    for answer in answers:
        if answer.status == 200:
            assert answer.body["choices"][0]["token_ids"] == list(expected[0].token_ids)
        else:
            assert int(answer.headers["retry-after"]) >= 1 and answer.body["error"]["code"] == "queue_full"
    return {str(status): count for status, count in statuses.items()}


async def prefixes(wire: Wire) -> dict[str, Any]:
    """A prompt that was read before is not read again, whole or in its first part, and the answer stays the same."""
    story = "The sea was calm and the boat was small. " * 6
    asks = [
        Ask(prompt=[{"role": "user", "content": text}], params=SamplingParams(max_tokens=wire.sizes.num_tokens))
        for text in (story + "Who was small?", story + "Who was small?", story + "What was calm?")
    ]
    cached = []
    for each in asks:
        reply = await ask(wire.client, each)
        compare(reply, wire.library.results([each])[0])
        cached.append(reply.cached_tokens)
    assert cached[1] > 0 and cached[2] > 0, f"nothing was taken over: {cached}"
    again = await wire.same(asks, at_once=6)
    return {**again, "cached tokens": cached}


async def wishes(wire: Wire) -> dict[str, Any]:
    """The field ``speculation`` is honoured, changes no token, and is refused where it cannot be honoured."""
    body = Ask(prompt=COPY_CHAT, params=SamplingParams(max_tokens=wire.sizes.num_tokens))
    off = replace(body, more={"speculation": {"enabled": False}})
    counts: dict[str, Any] = await wire.same([off])
    assert counts["drafted"] == 0, "drafts were made for a request that wants none"
    refused: Sequence[tuple[dict[str, Any], str]] = [
        ({"drafter": "no such drafter"}, "speculation.drafter"),
        ({"num_draft_tokens": 99}, "speculation.num_draft_tokens"),
        ({"enabled": False, "num_draft_tokens": 3}, "enabled"),
        ({"num_draft_token": 3}, "num_draft_tokens"),
    ]
    for wish, word in refused:
        await wire.refuses({**body.body(), "speculation": wish}, word)
    predicted = {"type": "content", "content": "I will never miss any tokens. " * 5}
    asks = [replace(body, more={"speculation": {"num_draft_tokens": 0}})]
    if wire.has_drafter:
        asks += [replace(body, more=_limited(k)) for k in (1, 3)]
        asks += [replace(body, more={"prediction": predicted})]
    for each in asks:
        for name, count in (await wire.same([each])).items():
            counts[name] += count
    return counts


def _limited(k: int) -> dict[str, Any]:
    return {"speculation": {"enabled": True, "num_draft_tokens": k}}


async def refusals(wire: Wire) -> dict[str, Any]:
    """A bad body is refused with the field or the cause in the message, and nothing runs behind it."""
    chat = {"messages": HELLO_CHAT, "max_tokens": 4}
    cases: Sequence[tuple[Any, str]] = [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff", "UTF-8"),
        (b"[]", "JSON object"),
        (b'{"messages": [], "messages": []}', "twice"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "NaN"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
        (b"[" * 100_000, "nested"),
        ({}, "messages"),
        ({**chat, "temprature": 1}, "temperature"),
        ({**chat, "temperature": "hot"}, "temperature"),
        ({**chat, "temperature": -1}, "temperature"),
        ({**chat, "top_p": 0}, "top_p"),
        ({**chat, "top_k": 1.5}, "top_k"),
        ({**chat, "seed": 2**70}, "seed"),
        ({**chat, "n": 2, "temperature": 0}, "'param': 'n'"),
        ({**chat, "logit_bias": {"x": 1}}, "logit_bias"),
        ({**chat, "logit_bias": {"99999999": 1}}, "logit_bias"),
        ({**chat, "stop": [""]}, "stop"),
        ({**chat, "stop": ["x"] * 1000}, "stop"),
        ({**chat, "top_logprobs": 3}, "top_logprobs"),
        ({**chat, "stream_options": {}}, "stream_options"),
        ({**chat, "echo": True}, "echo"),
        ({**chat, "messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({**chat, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({**chat, "tool_choice": "required"}, "tool_choice"),
    ]
    for body, word in cases:
        await wire.refuses(body, word)
    return {"refused": len(cases)}
