"""Random requests against a server: none may fault it, hang it, or change what it says to others.

    python -m benchmarks.http_fuzz --requests 5000 --output fuzz.json
    python -m benchmarks.http_fuzz --number 1234       # sends one of them again, and shows it

Requests are made from the server's own models and then bent: wrong types, huge numbers, unknown and contradictory fields,
long lists, expensive grammars, broken bytes and headers (:mod:`benchmarks.wire.bodies`). What must hold:

- no answer is 5xx, and none takes longer than ``--limit`` seconds;
- each 4xx says in OpenAI's form which field or what else is wrong;
- a 200 is whole: its usage adds up, a stream ends with its mark;
- every so often, and at the end, a plain request gets its exact answer, nothing runs, and no memory is held.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load.client import Answer, Client
from benchmarks.load.process import serving
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, write_json
from benchmarks.wire.bodies import NAMES, Sent, make_request, request_bytes

__all__ = ["Fuzzed", "fuzz", "judge"]

CAUSES = (
    "body",
    "content type",
    "prompt",
    "message",
    "tool",
    "model",
    "host",
    "there is nothing at",
    "not possible at",
)
"""Words of which a refusal must have one where it names no field."""
PLAIN = {"prompt": "Two and two are", "max_tokens": 4, "temperature": 0, "return_token_ids": True}


@dataclass(slots=True)
class Fuzzed:
    """What was found.

    Attributes:
        statuses: how often each came.
        bends: of the requests answered with 200, and of the others.
        slowest_s: of the ten slowest requests: seconds, number, bends.
        problems: what must not be, in words, with the request's number.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: list[tuple[float, int, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, sent: Sent, answer: Answer, problem: str | None) -> None:
        """Count one."""
        self.statuses[answer.status] += 1
        (self.taken if answer.status == 200 else self.refused).update(sent.bends or ("as it is",))
        self.slowest_s = sorted([*self.slowest_s, (round(answer.seconds, 2), sent.number, " ".join(sent.bends))])[-10:]
        if problem is not None:
            self.problems.append(f"number {sent.number} ({' '.join(sent.bends)}): {problem}")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "problems": self.problems,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "taken": dict(self.taken.most_common()),
            "refused": dict(self.refused.most_common()),
            "slowest": self.slowest_s[::-1],
        }


def judge(sent: Sent, answer: Answer, *, limit_s: float) -> str | None:
    """What is wrong with an answer, ``None`` if nothing is."""
    if answer.seconds >= limit_s:
        return f"no whole answer within {limit_s:g} s"
    if answer.status == 0:
        return "the connection ended without an answer" if sent.is_http else None
    if answer.status >= 500:
        return f"status {answer.status}: {answer.text[:300]}"
    if not sent.is_http or sent.method == "HEAD":
        return None  # the protocol's own library answers
    if answer.status >= 400:
        return _of_refusal(answer)
    return _of_success(answer) if answer.status == 200 and sent.method == "POST" else None


def _of_refusal(answer: Answer) -> str | None:
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    if not isinstance(error, dict) or not error.get("message") or set(error) != {"message", "type", "param", "code"}:
        return f"status {answer.status} without an error object: {answer.text[:200]}"
    message = error["message"]
    if error["param"] is None and not any(word in message for word in (*CAUSES, *NAMES)):
        return f"status {answer.status} names neither a field nor a cause: {message[:200]}"
    return f"a message of {len(message)} characters" if len(message) > 3000 else None


def _of_success(answer: Answer) -> str | None:
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        is_whole = answer.text.endswith("data: [DONE]\n\n") and '"error":' not in answer.text[-2000:]
        return None if is_whole else f"a stream that is not whole: {answer.text[-300:]}"
    usage = answer.body["usage"]
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        return f"usage does not add up: {usage}"
    return None


async def fuzz(
    client: Client, numbers: Sequence[int], *, seed: int = 0, limit_s: float = 30.0, at_once: int = 4, every: int = 250
) -> Fuzzed:
    """Send the requests of these numbers, and look at the server's health on the way.

    Args:
        client: of the server.
        numbers, seed: which requests.
        limit_s: longest time of an answer.
        at_once: how many beside each other.
        every: after so many requests the health is looked at.
    """
    found = Fuzzed()
    expected = (await client.post("/v1/completions", PLAIN)).body["choices"]
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            sent = make_request(number, seed=seed)
            data = request_bytes(sent, f"{client.host}:{client.port}")
            # A body that announces more than comes would be waited for until the server's own limit.
            answer = await client.send(data, leave_after_s=limit_s if sent.is_http else 1.0)
        if answer.status == 0 and sent.is_http and answer.seconds < limit_s:
            answer = await client.send(data, leave_after_s=limit_s)  # refused in the middle of a large body: once more
        found.add(sent, answer, judge(sent, answer, limit_s=limit_s))

    for begin in range(0, len(numbers), every):
        await asyncio.gather(*(one(number) for number in numbers[begin : begin + every]))
        problem = await _health(client, expected)
        if problem is not None:
            found.problems.append(f"after number {numbers[min(begin + every, len(numbers)) - 1]}: {problem}")
        print(f"{begin + every} requests: {dict(found.statuses)}, {len(found.problems)} problems", file=sys.stderr)
    return found


async def _health(client: Client, expected: Any, patience_s: float = 30.0) -> str | None:
    answer = await client.post("/v1/completions", PLAIN)
    if answer.status != 200 or answer.body["choices"] != expected:
        return f"a plain request got another answer: {answer.status} {answer.text[:200]}"
    ends = time.perf_counter() + patience_s
    while True:
        status = (await client.get("/outrider/status")).body
        load, engine = status["load"], status["engine"]
        held = engine.get("cache_bytes_in_use", 1) - engine.get("prefix_bytes", 0)
        if load["running"] == load["waiting"] == held == 0:
            return None
        if time.perf_counter() > ends:
            return f"something stayed behind: {load}, {held} bytes held"
        await asyncio.sleep(0.1)


def main(arguments: list[str] | None = None) -> int:
    """Start a server, send the requests, write what was found; 1 if something must not be."""
    given = _parser().parse_args(arguments)
    head = describe_run("benchmarks.http_fuzz", list(arguments if arguments is not None else sys.argv[1:]))
    numbers = range(given.begin, given.begin + given.requests) if given.number is None else [given.number]
    if given.number is not None:
        sent = make_request(given.number, seed=given.seed)
        print(sent.method, sent.path, sent.bends, dict(sent.headers), sent.data[:2000], sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--target", given.target, "--draft", given.draft, "--tool-rendering", "system"]
        log = given.output.with_suffix(".server.log") if given.output else Path(folder) / "server.log"
        with serving(flags, log=log) as server:
            work = fuzz(server.client, numbers, seed=given.seed, limit_s=given.limit, at_once=given.at_once)
            found = asyncio.run(work)
            if server.process.poll() is not None:
                found.problems.append(f"the server ended with status {server.process.returncode}")
    result = {"run": head, **found.to_json()}
    if given.number is None:
        write_json(given.output or RESULTS / "http_fuzz.json", result)
    print(f"{len(numbers)} requests, statuses {result['statuses']}, {len(found.problems)} problems")
    for problem in found.problems[:50]:
        print(problem)
    return int(bool(found.problems))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http_fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m-instruct", help="the smaller the quicker")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--begin", type=int, default=0, help="number of the first one")
    parser.add_argument("--number", type=int, help="only this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--limit", type=float, default=30.0, help="longest seconds of an answer")
    parser.add_argument("--output", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
