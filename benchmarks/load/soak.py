"""Thousands of requests, good and bad, with clients that leave: memory stays flat, nothing stays behind, nothing is 5xx."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load.client import Client

__all__ = ["SoakResult", "resident_bytes", "soak"]

KINDS = {"plain": 60, "streamed": 15, "leaves": 10, "bad_body": 7, "refused": 5, "killed": 3}
"""Of a hundred requests so many are answered whole, streamed, left in the middle, no JSON, over a limit, cut while sent."""
CHECKED = 200
"""Replies that are compared with their solo runs."""


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """What a soak found.

    Attributes:
        statuses: by kind and status.
        memory_bytes: resident memory of the server, sampled over the run, the first tenth left out.
        differing: ids of checked replies that are not their solo runs.
        left_running, left_waiting: requests that the server still had when all clients had gone.
        engine: the engine's own figures at the end.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    memory_bytes: list[int] = field(default_factory=list)
    checked: int = 0
    differing: list[str] = field(default_factory=list)
    left_running: int = 0
    left_waiting: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def num_faults(self) -> int:
        """Answers of 5xx."""
        return sum(count for name, count in self.statuses.items() if name.rsplit(" ", 1)[1].startswith("5"))

    @property
    def memory_growth(self) -> float | None:
        """Median of the last fifth of the samples by that of the first fifth, less one."""
        size = len(self.memory_bytes) // 5
        if size == 0:
            return None
        first, last = sorted(self.memory_bytes[:size]), sorted(self.memory_bytes[-size:])
        return last[size // 2] / first[size // 2] - 1

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "statuses": dict(sorted(self.statuses.items())),
            "num_faults": self.num_faults,
            "memory_growth": self.memory_growth,
            "memory_bytes": self.memory_bytes,
            "checked": self.checked,
            "differing": self.differing,
            "left_running": self.left_running,
            "left_waiting": self.left_waiting,
            "engine": self.engine,
            "seconds": round(self.seconds, 1),
        }


async def soak(
    client: Client, rows: Sequence[dict[str, Any]], *, requests: int, concurrency: int, pid: int | None, seed: int = 0
) -> SoakResult:
    """Send ``requests`` of all kinds, ``concurrency`` at once.

    Args:
        client: of the server.
        rows: prompts.
        requests, concurrency: how many, how many at once.
        pid: the server's process, for its memory; ``None`` leaves that out.
        seed: of what is sent.
    """
    found, rng, begun = SoakResult(), random.Random(seed), time.perf_counter()
    kept: list[tuple[str, dict[str, Any], str]] = []
    numbers = iter(range(requests))

    async def work() -> None:
        for number in numbers:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            body = _body(rng.choice(rows), rng, number)
            status, text = await _send(client, kind, body, rng)
            found.statuses[f"{kind} {status}"] += 1
            if text is not None and len(kept) < CHECKED and rng.random() < 2 * CHECKED / requests + 0.02:
                kept.append((str(number), body, text))
            if pid is not None and number % max(1, requests // 200) == 0 and number > requests // 10:
                found.memory_bytes.append(resident_bytes(pid))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    await asyncio.sleep(1.0)
    status = (await client.get("/outrider/status")).body
    found.left_running, found.left_waiting = status["load"]["running"], status["load"]["waiting"]
    found.engine, found.checked = status["engine"], len(kept)
    for name, body, text in kept:
        alone = await client.post("/v1/chat/completions", body)
        if alone.body["choices"][0]["message"]["content"] != text:
            found.differing.append(name)
    found.seconds = time.perf_counter() - begun
    return found


def _body(row: dict[str, Any], rng: random.Random, number: int) -> dict[str, Any]:
    """A request whose answer depends on nothing but itself: greedy, or with a seed."""
    body: dict[str, Any] = {"messages": row["messages"], "max_tokens": rng.choice([4, 16, 40])}
    if rng.random() < 0.5:
        return {**body, "temperature": 0}
    return {**body, "temperature": rng.choice([0.7, 1.0]), "seed": number, "top_p": rng.choice([0.9, 1.0])}


async def _send(client: Client, kind: str, body: dict[str, Any], rng: random.Random) -> tuple[int, str | None]:
    """Send one request of a kind; returns its status, and the text of a whole answer."""
    path = "/v1/chat/completions"
    if kind == "plain":
        answer = await client.post(path, body)
        is_whole = answer.status == 200
        return answer.status, answer.body["choices"][0]["message"]["content"] if is_whole else None
    if kind == "streamed":
        return (await client.post(path, {**body, "stream": True})).status, None
    if kind == "leaves":
        request = client.request(path, {**body, "max_tokens": 400, "stream": rng.random() < 0.5})
        return (await client.send(request, leave_after_s=rng.uniform(0.05, 1.0))).status, None
    if kind == "bad_body":
        bad = rng.choice([b"{", b"[]", b"\xff", b'{"messages": 1}', b'{"messages": [], "temprature": 1}'])
        return (await client.post(path, bad)).status, None
    if kind == "refused":
        over = rng.choice(
            [{"max_tokens": 10**6}, {"top_p": 5}, {"messages": [{"role": "user", "content": "x " * 60_000}]}]
        )
        return (await client.post(path, {**body, **over})).status, None
    whole = client.request(path, body)
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
