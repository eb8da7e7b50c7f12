"""From a request's fields to the engine's: sampling, speculation, constraints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.speculation import SpeculationParams
from outrider.errors import SamplingError
from outrider.sampling.params import SamplingParams
from outrider.serve.errors import bad_request
from outrider.serve.protocol import ChatRequest, CompletionRequest, SharedFields

__all__ = ["COMPLETION_TOKENS", "constraint_of", "most_tokens", "sampling_of", "speculation_of"]

COMPLETION_TOKENS = 16
"""Default of ``max_tokens`` at ``/v1/completions``, as OpenAI and vLLM have it. A chat's default is all that fits."""

_SAME_NAMES = (
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "n",
    "logprobs_mode",
)


def sampling_of(request: ChatRequest | CompletionRequest, *, max_tokens: int) -> SamplingParams:
    """The engine's sampling fields.

    Args:
        request: the checked body.
        max_tokens: most output tokens, already resolved.

    Raises:
        SamplingError: a value out of range, or fields that contradict each other.
    """
    values: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}
    values["temperature"] = 1.0 if request.temperature is None else request.temperature
    if request.logit_bias:
        values["logit_bias"] = _bias(request.logit_bias)
    values["logprobs"] = _num_logprobs(request)
    return SamplingParams(max_tokens=max_tokens, **values)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            raise SamplingError(f"logit_bias {token[:40]!r} is not possible; allowed: token ids")
    return {int(token): value for token, value in given.items()}


def _num_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def most_tokens(request: ChatRequest | CompletionRequest, *, room: int, window: int) -> int:
    """Most output tokens: what the request says, or the endpoint's default, within the window.

    Args:
        request: the checked body.
        room: tokens that the window has left behind the prompt. window: its size.

    Raises:
        ApiError: 400, more tokens are asked for than the window has left.
    """
    name, given = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, given = "max_completion_tokens", request.max_completion_tokens
    if given is None:
        return max(1, room) if isinstance(request, ChatRequest) else max(1, min(COMPLETION_TOKENS, room))
    if given < 1:
        raise bad_request(f"{name} {given} is not possible; allowed: an integer of 1 or more", param=name)
    if given > room >= 1:
        raise bad_request(
            f"{name} {given} does not fit: the window has {window} tokens, the prompt {window - room}; "
            f"allowed: at most {room}",
            param=name,
            code="context_length_exceeded",
        )
    return given


def speculation_of(request: SharedFields) -> SpeculationParams | None:
    """What the request asks of speculation; ``None`` leaves it to the server."""
    fields = request.speculation
    if fields is None:
        return None
    return SpeculationParams(
        enabled=fields.enabled is not False, num_draft_tokens=fields.num_draft_tokens, drafter=fields.drafter
    )


def constraint_of(request: SharedFields) -> Mapping[str, Any] | None:
    """``structured_outputs``, or ``response_format`` in its form; ``None`` for free text."""
    if request.structured_outputs is not None:
        return request.structured_outputs
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    assert wanted.json_schema is not None
    schema = wanted.json_schema.schema_
    return {"json_object": True} if schema is None else {"json": schema}
