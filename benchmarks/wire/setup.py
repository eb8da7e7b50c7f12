"""What a scenario over HTTP works with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.client import Client
from benchmarks.wire.asking import Ask, Library, ask, same
from outrider import SamplingParams

__all__ = ["SMALL", "Sizes", "Wire"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the scenarios are.

    Attributes:
        prompts_per_category, max_tokens, ks: of S1.
        num_calls, num_seeded_calls, laws: of S2, as in :mod:`benchmarks.scenarios`.
        few_ks, num_tokens, num_repeats, num_stops: of S3 to S7.
        num_tool_prompts: of S9. num_json: requests of S10 with any object; a third of it with a schema, as many plain.
        num_leavers: clients that leave. story_tokens: of S8's long answer.
    """

    prompts_per_category: int = 10
    max_tokens: int = 96
    ks: Sequence[int] = (1, 2, 4, 8)
    num_calls: int = 4000
    num_seeded_calls: int = 400
    laws: Sequence[str] = ("top_k 2", "top_p 0.9", "no cut")
    few_ks: Sequence[int] = (1, 4, 8)
    num_tokens: int = 80
    num_repeats: int = 5
    num_stops: int = 18
    num_tool_prompts: int = 50
    num_json: int = 30
    num_leavers: int = 40
    story_tokens: int = 300


SMALL = Sizes(
    prompts_per_category=1,
    max_tokens=12,
    ks=(4,),
    num_calls=100,
    num_seeded_calls=6,
    laws=("top_k 2",),
    few_ks=(4,),
    num_tokens=20,
    num_repeats=2,
    num_stops=4,
    num_tool_prompts=2,
    num_json=3,
    num_leavers=6,
    story_tokens=24,
)
"""Sizes of ``--small``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A server, the library's own answers, and sizes.

    Attributes:
        client: of the server.
        library: the same model, decoding plainly.
        sizes: how much is asked.
        drafter: name in the server's command line, ``none`` for a server without one.
        rows: prompts with tools.
        max_waiting, max_batch_size: limits that the server was started with.
    """

    client: Client
    library: Library
    sizes: Sizes
    drafter: str
    rows: Sequence[dict[str, Any]] = ()
    max_waiting: int = 64
    max_batch_size: int = 16

    @property
    def has_drafter(self) -> bool:
        """False for plain decoding."""
        return self.drafter != "none"

    async def same(self, asks: Sequence[Ask], *, at_once: int = 8) -> dict[str, int]:
        """See :func:`benchmarks.wire.asking.same`."""
        return await same(self.client, self.library, asks, at_once=at_once)

    async def refuses(self, body: Any, *words: str, status: int = 400, path: str = "/v1/chat/completions") -> None:
        """Make sure that a body is refused, with a message or a parameter that holds each of these words."""
        answer = await self.client.post(path, body)
        assert answer.status == status, f"{answer.status} {answer.text[:300]}, for {str(body)[:300]}"
        told = str(answer.body["error"])
        assert all(word in told for word in words), f"{words} are not in {told[:300]}"

    async def is_well(self) -> None:
        """A plain request is answered as ever, nothing runs, and nobody's memory is left behind."""
        each = Ask(prompt="Two and two are", params=SamplingParams(max_tokens=3))
        reply = await ask(self.client, each)
        [[expected]] = self.library.results([each])
        assert reply.status == 200 and reply.choices[0].token_ids == list(expected.token_ids), reply
        await self.until_idle()

    async def until_idle(self, patience_s: float = 60.0) -> dict[str, Any]:
        """Wait until nothing runs; returns the status.

        Raises:
            AssertionError: something still runs, or holds memory, after the patience has gone.
        """
        status: dict[str, Any] = {}
        for _ in range(round(patience_s / 0.1)):
            status = (await self.client.get("/outrider/status")).body
            load, engine = status["load"], status["engine"]
            held = engine.get("cache_bytes_in_use", 1) - engine.get("prefix_bytes", 0)
            if load["running"] == load["waiting"] == held == 0:
                return status
            await asyncio.sleep(0.1)
        raise AssertionError(f"not idle after {patience_s:g} s: {status['load']}, {status['engine']}")
