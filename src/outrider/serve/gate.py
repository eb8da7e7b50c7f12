"""What every request passes before its endpoint: an id, the host it asked for, its API key; and the line in the log."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.auth import KeyRing
from outrider.serve.config import ServeConfig
from outrider.serve.connection import Incoming, json_response
from outrider.serve.errors import ApiError
from outrider.serve.service import Caller
from outrider.serve.tally import Tally

__all__ = ["KNOWN_PATHS", "OPEN_PATHS", "Gate"]

logger = logging.getLogger("outrider.serve")

KNOWN_PATHS = ("/", "/health", "/metrics", "/outrider/status", "/v1/models", "/v1/chat/completions", "/v1/completions")
OPEN_PATHS = ("/", "/health")
"""Paths that ask for no key: the page holds nothing secret, and a health check has none."""

_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Gate:
    """ASGI middleware.

    Args:
        app: what is behind it.
        keys: who may pass.
        config: where the server listens.
        tally: counts requests by path and status.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyRing, config: ServeConfig, tally: Tally) -> None:
        self._app = app
        self._keys = keys
        self._tally = tally
        self._most_bytes = config.max_body_bytes
        # A page that is open in a browser can reach a loopback server under a name of its own (DNS rebinding).
        is_guarded = config.is_loopback and keys.is_open
        self._hosts = frozenset((*_LOOPBACK, config.host, *config.allowed_hosts)) if is_guarded else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else secrets.token_hex(12)

        announced = headers.get("content-length", "")
        incoming = Incoming(receive, announced=announced, most_bytes=self._most_bytes)

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400 and status != 408:
                    await incoming.forget()
                marked = MutableHeaders(scope=message)
                marked["x-request-id"] = request_id
                marked["x-content-type-options"] = "nosniff"
            await send(message)

        scope_name = self._keys.scope_of(headers.get("authorization"))
        try:
            refusal = self._refusal(scope["path"], headers, scope_name)
            if refusal is not None:
                answer = json_response(refusal.body(), status=refusal.status, headers=refusal.headers())
                await answer(scope, incoming, send_marked)
                return
            scope.setdefault("state", {})["caller"] = Caller(scope=scope_name or "", request_id=request_id)
            await self._app(scope, incoming, send_marked)
        finally:
            path = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
            self._tally.requests[path, status] += 1
            ms = (time.perf_counter() - begun) * 1e3
            method = scope["method"]
            line = "%s %s status=%d ms=%.0f request_id=%s scope=%s"
            logger.info(line, method, path, status, ms, request_id, scope_name or "unknown")

    def _refusal(self, path: str, headers: Headers, scope_name: str | None) -> ApiError | None:
        if self._hosts is not None and _host_name(headers.get("host", "")) not in self._hosts:
            return ApiError(403, "the host of this request is not allowed; start the server with --allowed-host NAME")
        if scope_name is None and path not in OPEN_PATHS:
            return ApiError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )
        return None


def _host_name(given: str) -> str:
    """The name in a ``Host`` header, without port and brackets."""
    if given.startswith("["):
        return given[1:].partition("]")[0]
    return given.partition(":")[0].lower()
