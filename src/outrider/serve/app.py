"""The web application: which path does what."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from outrider.engine.engine import Engine
from outrider.errors import OutriderError, nearest
from outrider.serve.auth import KeyRing
from outrider.serve.config import ServeConfig
from outrider.serve.connection import EventStream, json_response, read_body, while_connected
from outrider.serve.errors import ApiError, api_error, internal_error
from outrider.serve.gate import KNOWN_PATHS, Gate
from outrider.serve.metrics import CONTENT_TYPE, render_metrics
from outrider.serve.page import PAGE_HEADERS, page
from outrider.serve.protocol import ChatRequest, CompletionRequest, parse_body
from outrider.serve.service import Caller, Prepared, Service

__all__ = ["create_app"]

logger = logging.getLogger("outrider.serve")

CLIENT_GONE = 499
"""Status in the log for a client that went away before its answer was there (nginx's number); nobody receives it."""
STATUS_WAIT_S = 2.0
"""Seconds that a look at the engine may wait for the step that is running."""


def create_app(engine: Engine, *, config: ServeConfig | None = None, keys: KeyRing | None = None) -> FastAPI:
    """An application around an engine. From its start to its end nobody else may use the engine.

    Args:
        engine: what decodes.
        config: limits and names.
        keys: who may use it; everybody by default.
    """
    config, keys = config or ServeConfig(), keys or KeyRing(())
    service = Service(engine, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            service.worker.stop()
            await asyncio.to_thread(service.worker.join, config.drain_timeout_s)

    app = FastAPI(
        title="Outrider", lifespan=lifespan, redirect_slashes=False, openapi_url=None, docs_url=None, redoc_url=None
    )
    app.state.service = service
    app.add_middleware(Gate, keys=keys, config=config, tally=service.worker.tally)
    app.add_exception_handler(HTTPException, _no_such_path)
    app.add_exception_handler(Exception, _fault)
    app.add_api_route("/v1/chat/completions", _chat, methods=["POST"])
    app.add_api_route("/v1/completions", _completion, methods=["POST"])
    for path, answer in _LOOKS.items():
        app.add_api_route(path, answer, methods=["GET", "HEAD"])
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


async def _chat(request: Request) -> Response:
    return await _answered(request, ChatRequest)


async def _completion(request: Request) -> Response:
    return await _answered(request, CompletionRequest)


async def _answered(request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
    """Read, check, decode, answer; every failure becomes an error object."""
    service = _service(request)
    try:
        config = service.config
        raw = await read_body(request, most_bytes=config.max_body_bytes, timeout_s=config.request_timeout_s)
        # Checking, rendering and tokenising take milliseconds for a long body: not in the loop that feeds all streams.
        prepared = await asyncio.to_thread(_prepare, service, kind, raw, _caller(request))
        if prepared.is_streamed:
            deadline = service.deadline()
            stream = await service.worker.submit(prepared.jobs)
            return EventStream(service.frames(prepared, stream, deadline))
        return json_response(await while_connected(request.receive, service.whole(prepared)))
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    except (ApiError, OutriderError) as error:
        return _refused(api_error(error))
    except Exception:
        logger.exception("request %s failed", _caller(request).request_id)
        return _refused(internal_error())


def _prepare(
    service: Service, kind: type[ChatRequest] | type[CompletionRequest], raw: bytes, caller: Caller
) -> Prepared:
    if kind is ChatRequest:
        return service.prepare_chat(parse_body(raw, ChatRequest), caller)
    return service.prepare_completion(parse_body(raw, CompletionRequest), caller)


def _refused(error: ApiError) -> Response:
    return json_response(error.body(), status=error.status, headers=error.headers())


async def _models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(_service(request))]})


async def _model(request: Request, name: str) -> Response:
    service = _service(request)
    if name != service.model_name:
        return _refused(ApiError(404, f"model {name[:200]!r} is not served here; allowed: {service.model_name!r}"))
    return json_response(_model_card(service))


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "outrider",
        "max_model_len": service.spec.max_positions,
    }


async def _health(request: Request) -> Response:
    worker = _service(request).worker
    state = "ok" if worker.is_healthy and not worker.is_draining else "draining" if worker.is_healthy else "unhealthy"
    return json_response({"status": state}, status=200 if state == "ok" else 503)


async def _metrics(request: Request) -> Response:
    service = _service(request)
    load = await _looked(service, "load")
    text = render_metrics(service.worker.tally, model_name=service.model_name, engine_load=load)
    return Response(text, media_type=CONTENT_TYPE)


async def _status(request: Request) -> Response:
    """What the page shows: load, speculation since the start, the planner, the settings."""
    service = _service(request)
    tally = service.worker.tally
    return json_response(
        {
            "model": service.model_name,
            "load": {
                "running": tally.running,
                "waiting": tally.waiting,
                "refused": tally.refused,
                "cancelled": tally.cancelled,
                "generated_tokens": tally.generated_tokens,
                "passes": tally.passes,
                "pass_ms": round(tally.pass_ms, 3),
            },
            "engine": await _looked(service, "load"),
            "speculation": tally.speculation.to_json(service.settings["drafter"]),
            "planner": {
                "draft_tokens_chosen": {str(k): n for k, n in sorted(dict(tally.drafts).items())},
                **await _looked(service, "planner"),
            },
            "settings": service.settings,
        }
    )


async def _looked(service: Service, what: str) -> dict[str, Any]:
    """The engine's own view, ``{}`` if it does not get to it soon."""
    try:
        async with asyncio.timeout(STATUS_WAIT_S):
            found = await service.worker.call(lambda bridge: getattr(bridge, what)())
    except (TimeoutError, ApiError):
        return {}
    return found if isinstance(found, dict) else {}


async def _page(request: Request) -> Response:
    return Response(page(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


_LOOKS: Mapping[str, Callable[..., Awaitable[Response]]] = {
    "/v1/models": _models,
    "/v1/models/{name:path}": _model,
    "/health": _health,
    "/metrics": _metrics,
    "/outrider/status": _status,
    "/": _page,
}


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]  # request.url would read the Host header, which may hold anything
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "POST")
        refusal = ApiError(405, f"{request.method} is not possible at {path}; allowed: {allowed}")
        return json_response(refusal.body(), status=405, headers={"allow": allowed})
    hint = nearest(path, KNOWN_PATHS) or f"; allowed: {', '.join(KNOWN_PATHS)}"
    return _refused(ApiError(error.status_code, f"there is nothing at {path!r}{hint}", code="not_found"))


async def _fault(request: Request, error: Exception) -> Response:
    return _refused(internal_error())
