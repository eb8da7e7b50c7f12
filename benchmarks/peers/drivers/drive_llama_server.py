"""llama.cpp's ``llama-server`` behind HTTP on this machine. Standard library only.

Options: ``binary`` (the server), ``arguments`` (more of its command line, such as the kind of speculation).
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from wire import Handler, Reply, cut, end_with_parent, serve

START_SECONDS = 120
REQUEST_SECONDS = 600


def command(start: dict[str, Any], port: int) -> list[str]:
    """The server's command line. It keeps nothing of one prompt for the next: each is read in whole."""
    streams, threads = max(1, start["streams"]), str(start["threads"])
    return [
        start["options"]["binary"],
        *("--model", start["model"], "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads),
        *("--parallel", str(streams), "--ctx-size", str(streams * start["context"])),
        *("--cache-ram", "0", "--no-cache-prompt"),
        *start["options"]["arguments"],
    ]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running server."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._port, self._streams = free_port(), max(1, start["streams"])
        self._process = subprocess.Popen(
            command(start, self._port),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            preexec_fn=end_with_parent,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._process.returncode}; its log says why")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not come up in {START_SECONDS} s")
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        try:
            self._ask("GET", "/health", None)
        except (OSError, RuntimeError, http.client.HTTPException):
            return False
        return True

    def _ask(self, method: str, path: str, body: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_SECONDS)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode("utf-8", errors="replace")
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {text[:300]}")
        data: dict[str, Any] = json.loads(text)
        return data

    def answer(self, request: dict[str, Any]) -> Reply:
        """All prompts, as many at a time as there are streams."""
        begun = time.perf_counter()
        with ThreadPoolExecutor(self._streams) as pool:
            bodies = [_body(prompt, request) for prompt in request["prompts"]]
            replies = list(pool.map(lambda body: self._ask("POST", "/completion", body), bodies))
        return summary(replies, request["stop_ids"], time.perf_counter() - begun)


def _body(prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
    """Greedy by the shortest sampler chain that there is."""
    return {
        "prompt": prompt,
        "n_predict": request["max_tokens"],
        "temperature": 0.0,
        "samplers": ["top_k"],
        "top_k": 1,
        "cache_prompt": False,
        "return_tokens": True,
    }


def summary(replies: list[dict[str, Any]], stop_ids: list[int], wall_s: float) -> Reply:
    """What the server's answers say. ``first_s`` is its time of reading the prompt, which ends with the first token.

    Every decode pass commits its accepted drafts and one token more, so passes = committed - accepted.
    """
    answers = []
    for reply in replies:
        tokens = cut(reply["tokens"], stop_ids)
        answers.append({"tokens": tokens, "first_s": reply["timings"]["prompt_ms"] / 1e3})
    accepted = sum(reply["timings"].get("draft_n_accepted", 0) for reply in replies)
    decoded = sum(max(0, reply["timings"]["predicted_n"] - 1) for reply in replies)
    return {
        "answers": answers,
        "wall_s": wall_s,
        "passes": decoded - accepted,
        "drafted": sum(reply["timings"].get("draft_n", 0) for reply in replies),
        "accepted": accepted,
    }


def load(start: dict[str, Any]) -> tuple[Handler, Reply]:
    """Start the server and wait until it is healthy."""
    return Server(start).answer, {"versions": {}}


if __name__ == "__main__":
    serve(load)
