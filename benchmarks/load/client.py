"""A client that costs next to nothing, so that it does not compete with the server for the processors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer", "Client"]

GONE = 0
"""Status of a request whose connection ended before its answer was there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back.

    Attributes:
        status: HTTP status, 0 if the connection ended first.
        body: JSON value, ``None`` if there was none.
        seconds: from the first byte sent to the last one received.
        headers: names in lower case.
        text: the body as it came, without the framing of chunks.
    """

    status: int
    body: Any
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""


class Client:
    """One connection a request, no library in between.

    Args:
        host, port: where the server listens.
        key: API key, empty for none.
    """

    def __init__(self, host: str, port: int, key: str = "") -> None:
        self.host, self.port = host, port
        self._authorization = f"Authorization: Bearer {key}\r\n" if key else ""

    async def get(self, path: str) -> Answer:
        """A GET."""
        return await self.send(self._head("GET", path, "") + b"\r\n")

    async def post(self, path: str, body: Mapping[str, Any] | bytes) -> Answer:
        """A POST of JSON (or of bytes that claim to be)."""
        return await self.send(self.request(path, body))

    def request(self, path: str, body: Mapping[str, Any] | bytes) -> bytes:
        """Bytes of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        more = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return self._head("POST", path, more) + b"\r\n" + data

    def _head(self, method: str, path: str, more: str) -> bytes:
        fixed = f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
        return (fixed + self._authorization + more).encode()

    async def send(self, request: bytes, *, leave_after_s: float | None = None) -> Answer:
        """Send bytes and read the answer to its end.

        Args:
            request: a whole request.
            leave_after_s: close the connection after this time, whatever has come.
        """
        begun = time.perf_counter()
        data = b""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(leave_after_s):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                writer.write(request)
                data = await reader.read()
        except (TimeoutError, OSError):
            data = b""
        finally:
            if writer is not None:
                writer.transport.abort()
        return _parsed(data, time.perf_counter() - begun)


def _parsed(data: bytes, seconds: float) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 1"):  # only tells to go on
        head, _, body = body.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        return Answer(status=GONE, body=None, seconds=seconds)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "chunked" in headers.get("transfer-encoding", ""):
        body = b"".join(_chunks(body))
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    text = body.decode("utf-8", "replace")
    return Answer(status=int(words[1]), body=value, seconds=seconds, headers=headers, text=text)


def _chunks(body: bytes) -> Iterator[bytes]:
    """Contents of the chunks of a chunked body, as far as they came."""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        yield rest[:length]
        body = rest[length + 2 :]
