"""One HTTP exchange: a body within its limits, work that ends when the client goes away, events on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outrider.serve.errors import ApiError

__all__ = ["DONE", "EventStream", "Incoming", "frame", "json_response", "read_body", "while_connected"]

T = TypeVar("T")

FORGETTING_S = 5.0
"""Most seconds for a body that is refused unread."""
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters that some clients take for the end of a line, which would cut an event in two; JSON can spell them out."""

DONE = b"data: [DONE]\n\n"
SWALLOWED = 8
"""So many times the largest body is read and forgotten: a client that still sends would meet a reset, not the answer."""


def json_response(body: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(_encode(body), status_code=status, headers=headers, media_type="application/json")


def frame(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def _encode(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    # Half of a surrogate pair, which a client may have sent and an error repeats, has no UTF-8.
    return text.encode("utf-8", "backslashreplace")


async def read_body(request: Request, *, most_bytes: int, timeout_s: float) -> bytes:
    """A request's body.

    Raises:
        ApiError: no JSON (415), larger than allowed (413), or too slow (408).
        ClientDisconnect: the client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content type {kind[:80]!r} is not possible; allowed: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"content encoding {coding[:80]!r} is not possible; send the body as it is")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > most_bytes * SWALLOWED):
        raise _too_large(most_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes * SWALLOWED:
                    break
                if size <= most_bytes:
                    parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s") from None
    if size > most_bytes:
        raise _too_large(most_bytes)
    return b"".join(parts)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most_bytes} bytes, the most that this server takes")


class Incoming:
    """A request's messages; knows whether its body has come whole.

    Args:
        receive: where they come from.
        announced: the header ``Content-Length``, if there is one.
        most_bytes: largest body that is taken.
    """

    def __init__(self, receive: Receive, *, announced: str, most_bytes: int) -> None:
        self._receive = receive
        self._limit = most_bytes * SWALLOWED
        is_huge = announced.isdecimal() and (len(announced) > 18 or int(announced) > self._limit)
        self._is_over = is_huge  # not worth reading

    async def __call__(self) -> Message:
        """The next message."""
        message = await self._receive()
        self._is_over = self._is_over or not message.get("more_body", False)
        return message

    async def forget(self) -> None:
        """Read what nobody read, before an early refusal: a client that still sends would meet a reset instead of it."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FORGETTING_S):
                while not self._is_over and size <= self._limit:
                    size += len((await self()).get("body", b""))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work; stop it when the client goes away.

    Raises:
        ClientDisconnect: the client went away before the work was done.
    """
    watcher = asyncio.ensure_future(_until_gone(receive))
    worker = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watcher, worker}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The source of frames is closed as soon as the client is gone.

    Args:
        frames: bytes of whole events.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the frames end or the client goes away."""
        try:
            await while_connected(receive, self._write(send))
        except ClientDisconnect:
            return

    async def _write(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in frames:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
