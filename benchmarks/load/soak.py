"""Thousands of requests, good and bad, with clients that leave: memory stays flat, nothing stays behind, nothing is 5xx.

What a request is depends on the seed and its number alone, so a soak that was interrupted goes on where it was.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load.client import Client
from benchmarks.wire.bodies import make_request, request_bytes
from benchmarks.wire.replies import Reply, read_reply

__all__ = ["CHECKED", "SoakPlan", "SoakState", "check_alone", "resident_bytes", "soak"]

KINDS = {"plain": 52, "streamed": 18, "leaves": 10, "bad_body": 5, "refused": 4, "killed": 4, "bent": 7}
"""Of a hundred requests so many are answered whole, streamed, left in the middle, no JSON, over a limit, cut while they are
sent, and made by the fuzzer."""
CHECKED = 200
"""Replies that are compared with their solo runs."""
WARM_UP = 0.2
"""Part of a server's requests that its memory is not judged by: caches and indexes fill up to their limits."""
JUDGED = 500
"""Fewer requests of one server process say nothing about leaks."""
FLAT = 0.03
"""Most growth of memory behind the warm-up."""
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """What is sent.

    Attributes:
        requests, concurrency: how many, how many at once.
        rows: prompts.
        tokens: most output tokens of one.
        seed: of everything.
    """

    requests: int
    concurrency: int
    rows: Sequence[Mapping[str, Any]]
    tokens: int = 40
    seed: int = 0

    @property
    def keep_share(self) -> float:
        """Part of the whole answers that is kept for comparison: twice as many as needed, lest some be missing."""
        return 2 * CHECKED / self.requests + 0.02


@dataclass(slots=True, kw_only=True)
class SoakState:
    """What a soak has found so far; saved, and gone on from.

    Attributes:
        done: numbers of requests that were answered, as one count: all below it were.
        statuses: by kind and status.
        faults: numbers of requests with an answer of 5xx, or one that was no answer.
        memory: of each server process: pairs of requests that it has had and resident bytes.
        kept: number and text of answers to compare.
        checked, differing: of those, how many were, and which are not their solo runs.
        left_running, left_waiting, left_bytes: what the server still had when all clients had gone, cached prefixes left out.
        engine: the engine's own figures at the end.
    """

    done: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[list[tuple[int, int]]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    left_running: int = 0
    left_waiting: int = 0
    left_bytes: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def memory_growth(self) -> float | None:
        """The largest growth of a server process behind its warm-up: median of its last fifth by its first, less one."""
        found = [growth for samples in self.memory if (growth := _growth(samples)) is not None]
        return max(found, default=None)

    @property
    def problems(self) -> list[str]:
        """What must not be, in words."""
        growth = self.memory_growth
        found = [f"{len(self.faults)} faults: {', '.join(self.faults[:5])}"] if self.faults else []
        found += [f"answers that are not their solo runs: {', '.join(self.differing[:9])}"] if self.differing else []
        left = (self.left_running, self.left_waiting, self.left_bytes)
        found += [f"left behind: {left[0]} running, {left[1]} waiting, {left[2]} bytes"] if any(left) else []
        found += [f"memory grew by {growth:.1%}"] if growth is not None and growth > FLAT else []
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` makes the state again."""
        names = ("done", "faults", "memory", "kept", "checked", "differing")
        names += ("left_running", "left_waiting", "left_bytes", "engine")
        out = {name: getattr(self, name) for name in names}
        growth = {"memory_growth": self.memory_growth, "problems": self.problems}
        return {**growth, **out, "statuses": dict(sorted(self.statuses.items())), "seconds": round(self.seconds, 1)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> SoakState:
        """A state that was saved."""
        given = {name: value for name, value in values.items() if name not in ("memory_growth", "problems")}
        memory = [[(count, size) for count, size in samples] for samples in given["memory"]]
        return SoakState(**{**given, "statuses": Counter(given["statuses"]), "memory": memory})


def _growth(samples: Sequence[tuple[int, int]]) -> float | None:
    if not samples or samples[-1][0] < JUDGED:
        return None
    warm = WARM_UP * samples[-1][0]
    sizes = [size for count, size in samples if count >= warm]
    part = len(sizes) // 5
    if part < 3:
        return None
    first, last = sorted(sizes[:part]), sorted(sizes[-part:])
    return last[part // 2] / first[part // 2] - 1


async def soak(
    client: Client,
    plan: SoakPlan,
    state: SoakState,
    *,
    pid: int | None,
    until: float | None = None,
    on_progress: Callable[[SoakState], None] | None = None,
) -> bool:
    """Send the requests that are still missing; what is found goes into ``state``.

    Args:
        client: of the server.
        plan, state: what to do, and what was done.
        pid: the server's process, for its memory; ``None`` leaves that out.
        until: when to stop, by :func:`time.monotonic`.
        on_progress: called now and then.

    Returns:
        True if all were sent.
    """
    begun, first = time.perf_counter(), state.done
    state.memory.append([])
    every = max(1, plan.requests // 400)
    running: set[int] = set()
    begun_next = first
    numbers = _numbers(range(first, plan.requests), until)

    async def work() -> None:
        nonlocal begun_next
        for number in numbers:
            running.add(number)
            begun_next = number + 1
            await _one(client, plan, state, number)
            running.remove(number)
            state.done = min(running, default=begun_next)
            if number % every == 0:
                if pid is not None:
                    state.memory[-1].append((number - first, resident_bytes(pid)))
                if on_progress is not None:
                    on_progress(state)

    await asyncio.gather(*(work() for _ in range(plan.concurrency)))
    state.seconds += time.perf_counter() - begun
    await _look(client, state)
    return state.done == plan.requests


def _numbers(all_numbers: Sequence[int], until: float | None) -> Iterator[int]:
    for number in all_numbers:
        if until is not None and time.monotonic() >= until:
            return
        yield number


async def _look(client: Client, state: SoakState, patience_s: float = 30.0) -> None:
    """Wait until the server has let go of everything, and remember what it has not."""
    ends = time.monotonic() + patience_s
    while True:
        status = (await client.get("/outrider/status")).body
        load, state.engine = status["load"], status["engine"]
        state.left_running, state.left_waiting = load["running"], load["waiting"]
        state.left_bytes = state.engine.get("cache_bytes_in_use", 1) - state.engine.get("prefix_bytes", 0)
        is_idle = state.left_running == state.left_waiting == state.left_bytes == 0
        if is_idle or time.monotonic() >= ends:
            return
        await asyncio.sleep(0.2)


async def check_alone(client: Client, plan: SoakPlan, state: SoakState) -> None:
    """Ask each kept request again, alone and without speculation, and compare."""
    for name, text in list(state.kept.items())[:CHECKED]:
        if name in state.checked:
            continue
        body = {**_body(plan, int(name)), "speculation": {"enabled": False}}
        reply = read_reply(await client.post(CHAT, body))
        if reply.status != 200 or reply.choices[0].text != text:
            state.differing.append(name)
        state.checked.append(name)
    await _look(client, state)


async def _one(client: Client, plan: SoakPlan, state: SoakState, number: int) -> None:
    rng = random.Random(f"{plan.seed}:{number}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    status, text = await _send(client, kind, plan, number, rng)
    state.statuses[f"{kind} {status}"] += 1
    if status >= 500 or (status == 0 and kind in ("plain", "streamed", "refused")):
        state.faults.append(f"number {number} ({kind}): {status}")
    if text is not None and rng.random() < plan.keep_share and len(state.kept) < 2 * CHECKED:
        state.kept[str(number)] = text


def _body(plan: SoakPlan, number: int) -> dict[str, Any]:
    """A request whose answer depends on nothing but itself: greedy, or with a seed."""
    rng = random.Random(f"{plan.seed}:{number}:body")
    row = rng.choice(plan.rows)
    body: dict[str, Any] = {"messages": row["messages"], "max_tokens": rng.choice([1, plan.tokens // 2, plan.tokens])}
    body |= rng.choice([{}, {}, {}, {"stop": ["\n\n", " the"]}, {"frequency_penalty": 0.8}, {"logprobs": True}])
    body |= rng.choice([{}, {}, {}, {}, {"structured_outputs": {"regex": "[a-z ]{1,60}"}}, {"min_tokens": 1, "n": 1}])
    if "structured_outputs" in body:
        body.pop("min_tokens", None)
    if rng.random() < 0.5:
        return {**body, "temperature": 0}
    return {**body, "temperature": rng.choice([0.7, 1.0]), "seed": number, "top_p": rng.choice([0.9, 1.0])}


async def _send(client: Client, kind: str, plan: SoakPlan, number: int, rng: random.Random) -> tuple[int, str | None]:
    """Send one request of a kind; returns its status, and the text of a whole answer."""
    body = _body(plan, number)
    if kind in ("plain", "streamed"):
        more = {"stream": True, "stream_options": {"include_usage": True}} if kind == "streamed" else {}
        answer = await client.post(CHAT, {**body, **more})
        reply = read_reply(answer) if answer.status else Reply(status=0)
        return reply.status, reply.choices[0].text if reply.status == 200 else None
    if kind == "leaves":
        request = client.request(CHAT, {**body, "max_tokens": 10 * plan.tokens, "stream": rng.random() < 0.5})
        return (await client.send(request, leave_after_s=rng.uniform(0.05, 1.0))).status, None
    if kind == "bad_body":
        bad = rng.choice([b"{", b"[]", b"\xff", b'{"messages": 1}', b'{"messages": [], "temprature": 1}'])
        return (await client.post(CHAT, bad)).status, None
    if kind == "refused":
        long = {"messages": [{"role": "user", "content": "x " * 60_000}]}
        return (
            await client.post(CHAT, {**body, **rng.choice([{"max_tokens": 10**6}, {"top_p": 5}, long])})
        ).status, None
    if kind == "bent":
        sent = make_request(number, seed=plan.seed)
        data = request_bytes(sent, f"{client.host}:{client.port}")
        return (await client.send(data, leave_after_s=60.0 if sent.is_http else 1.0)).status, None
    whole = client.request(CHAT, body)
    return (await client.send(whole[: rng.randrange(1, len(whole))], leave_after_s=rng.uniform(0.01, 0.2))).status, None


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, 0 where the system does not say."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
