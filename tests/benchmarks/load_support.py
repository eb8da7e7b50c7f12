"""What tests of load scripts share."""

from __future__ import annotations

from benchmarks.load.client import Client

from tests.serve.support import LiveServer

ROWS = [{"messages": [{"role": "user", "content": text}]} for text in ("a long story", "hi", "Reply with exactly: OK")]


def client_of(server: LiveServer) -> Client:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return Client(host, int(port))
