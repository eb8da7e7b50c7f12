"""SIGTERM to a loaded server: nothing accepted is lost, whoever comes is told so, and the command ends with status 0.

    python -m benchmarks.serve_drain --streams 8 --tokens 64

The server is started with a batch of ``--streams``. As many requests run and as many wait when the signal comes. All of them must
be answered to the end; from then on a new request gets 503 with ``Retry-After``, and ``/health`` says ``draining``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.load.client import Answer
from benchmarks.load.process import ServerProcess, serving
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, write_json
from benchmarks.wire.replies import Reply, read_reply

__all__ = ["drain"]

PATH = "/v1/completions"


async def drain(server: ServerProcess, *, num_streams: int, tokens: int, patience_s: float = 600.0) -> dict[str, Any]:
    """Load a server, end it by SIGTERM, and see what becomes of everybody.

    Args:
        server: of a batch of ``num_streams``, with nothing to do.
        num_streams: how many run and how many wait; every other one is streamed.
        tokens: of each answer.
        patience_s: for the whole.

    Returns:
        Counts.

    Raises:
        AssertionError: an accepted request was lost, or a new one was not told so, or the status is not 0.
    """
    async with asyncio.timeout(patience_s):
        accepted = [asyncio.create_task(_ask(server, number, tokens)) for number in range(2 * num_streams)]
        while (load := (await server.client.get("/outrider/status")).body["load"])["running"] < num_streams:
            assert load["running"] + load["waiting"] > 0 or not any(task.done() for task in accepted), "too short"
            await asyncio.sleep(0.02)
        while load["running"] + load["waiting"] < 2 * num_streams:
            assert not any(task.done() for task in accepted), (
                "an answer was there before all requests were: more tokens"
            )
            await asyncio.sleep(0.02)
            load = (await server.client.get("/outrider/status")).body["load"]
        server.process.send_signal(signal.SIGTERM)
        told = await _knock(server)
        replies = await asyncio.gather(*accepted)
        status = await asyncio.to_thread(server.process.wait)
    first = replies[0].choices[0]
    for reply in replies:
        assert reply.usage["completion_tokens"] == tokens and reply.choices[0].finish_reason == "length", reply
        assert reply.choices[0].token_ids == first.token_ids, "two answers to one request"
    assert status == 0, f"the server ended with status {status}"
    return {"running": load["running"], "waiting": load["waiting"], "finished": len(replies), "later": told}


async def _ask(server: ServerProcess, number: int, tokens: int) -> Reply:
    body: dict[str, Any] = {"prompt": "The sea is", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body["return_token_ids"] = True
    if number % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await server.client.post(PATH, body)
    assert answer.status == 200, f"request {number} was lost: {answer.status} {answer.text[:200]}"
    return read_reply(answer)


async def _knock(server: ServerProcess) -> dict[str, int]:
    """Come late, again and again, until the door is closed; returns how often each status came."""
    seen: Counter[str] = Counter()
    while True:
        health = await server.client.get("/health")
        late = await server.client.post(PATH, {"prompt": "too late", "max_tokens": 1})
        seen[str(late.status)] += 1
        if late.status == 0:
            break
        if late.status == 503:
            _check_told(late)
            assert health.status in (0, 200, 503), health
        assert late.status == 503 or seen["503"] == 0, "a request was taken after others had been refused"
        await asyncio.sleep(0.05)
    assert seen["503"] > 0, f"nobody was told that the server is ending: {dict(seen)}; more tokens"
    return dict(seen)


def _check_told(late: Answer) -> None:
    assert int(late.headers["retry-after"]) >= 1 and late.body["error"]["code"] == "draining", late


def main(arguments: list[str] | None = None) -> int:
    """Start a server, load it, end it; 1 if something was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve_drain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--streams", type=int, default=8, help="how many run, and how many wait")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--drain-timeout", type=float, default=300.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "serve_drain.json")
    given = parser.parse_args(arguments)
    head = describe_run("benchmarks.serve_drain", list(arguments if arguments is not None else sys.argv[1:]))
    flags = ["--target", given.target, "--dtype", given.dtype, "--draft", given.draft]
    flags += ["--max-batch-size", str(given.streams), "--drain-timeout", str(given.drain_timeout)]
    with serving(flags, log=given.output.with_suffix(".server.log")) as server:
        try:
            found = asyncio.run(drain(server, num_streams=given.streams, tokens=given.tokens))
            verdict = "passed"
        except AssertionError as error:
            found, verdict = {"error": str(error)}, "failed"
    write_json(given.output, {"run": head, "verdict": verdict, **found})
    print(verdict, json.dumps(found))
    return int(verdict != "passed")


if __name__ == "__main__":
    raise SystemExit(main())
