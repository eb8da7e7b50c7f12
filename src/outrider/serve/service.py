"""From a checked request to the engine and back: what both endpoints do, without a word of HTTP."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult, StreamEvent
from outrider.errors import PromptError, nearest
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.params import SamplingParams
from outrider.serve.bridge import Bridge, Job
from outrider.serve.chat import chat_prompt
from outrider.serve.chat_reply import ChatReply
from outrider.serve.completion_reply import CompletionReply
from outrider.serve.config import ServeConfig
from outrider.serve.connection import DONE, frame
from outrider.serve.errors import ApiError, api_error, bad_request
from outrider.serve.protocol import ChatRequest, CompletionRequest, SharedFields
from outrider.serve.replies import Reply, ReplyContext
from outrider.serve.sampling import constraint_of, most_tokens, sampling_of, speculation_of
from outrider.serve.tool_grammar import tool_constraint
from outrider.serve.tools import ToolParser, call_style
from outrider.serve.worker import Stream, Worker

__all__ = ["Caller", "Prepared", "Service"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: the scope of the API key, and the id of the request."""

    scope: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is ready to run.

    Attributes:
        jobs: one a prompt.
        reply: makes the response's objects.
        num_choices: ``n``.
        is_streamed: as events, or whole.
    """

    jobs: Sequence[Job]
    reply: Reply
    num_choices: int
    is_streamed: bool

    def choice(self, stream: Stream, event: StreamEvent) -> int:
        """The response's index of an event's choice: choices of the first prompt first."""
        return stream.order[event.id] * self.num_choices + event.index


class Service:
    """The endpoints' work.

    Args:
        engine: what decodes; from now on only :attr:`worker` touches it.
        config: limits and names.
    """

    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        self.config = config
        self.spec = engine.target.spec
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.model_name = config.model_name or self.spec.name
        self.started = int(time.time())
        self.worker = Worker(Bridge(engine), max_waiting=config.max_waiting)
        self.settings = engine_settings(engine)
        self._num_draft_tokens = None if engine.drafter is None else engine.config.num_draft_tokens
        self._numbers = itertools.count()

    # --- requests

    def prepare_chat(self, request: ChatRequest, caller: Caller) -> Prepared:
        """Render, tokenise and check a chat.

        Raises:
            ApiError, OutriderError: what the client must change.
        """
        self._check_shared(request)
        if len(request.messages) > self.spec.max_positions:
            count, window = len(request.messages), self.spec.max_positions
            raise bad_request(f"messages has {count} entries, more than the window's {window} tokens", param="messages")
        prompts = [self._chat_prompt(request)]
        top = (request.top_logprobs or 0) if request.logprobs else None
        with_calls = tool_constraint(request, call_style(self.config.tool_format, self.tokenizer))
        jobs, context = self._jobs(request, prompts, caller, prefix="chatcmpl", top_logprobs=top)
        if with_calls is not None:
            jobs = [replace(job, structured_outputs=with_calls, constrained_by="tools") for job in jobs]
        has_tools = bool(request.tools) and request.tool_choice != "none"
        reply = ChatReply(context, (lambda: self._tool_parser(request)) if has_tools else None)
        return self._prepared(request, jobs, reply)

    def prepare_completion(self, request: CompletionRequest, caller: Caller) -> Prepared:
        """Tokenise and check prompts.

        Raises:
            ApiError, OutriderError: what the client must change.
        """
        self._check_shared(request)
        prompts = self._prompts(request)
        jobs, context = self._jobs(request, prompts, caller, prefix="cmpl", top_logprobs=request.logprobs)
        return self._prepared(request, jobs, CompletionReply(context))

    def _chat_prompt(self, request: ChatRequest) -> list[int]:
        try:
            return chat_prompt(request, self.tokenizer)
        except PromptError as error:
            raise bad_request(str(error), param="messages", code="invalid_prompt") from None

    def _check_shared(self, request: SharedFields) -> None:
        if request.model is not None and request.model != self.model_name:
            raise ApiError(
                404,
                f"model {request.model[:200]!r} is not served here; allowed: {self.model_name!r}"
                f"{nearest(request.model, [self.model_name])}",
                param="model",
                code="model_not_found",
            )

    def _prompts(self, request: CompletionRequest) -> list[list[int]]:
        given = request.prompt
        if isinstance(given, str):
            return [self._encode(given)]
        if not given:
            raise PromptError("the prompt is empty; give a text, or at least one token id")
        if all(isinstance(part, int) for part in given):
            return [[part for part in given if isinstance(part, int)]]
        if len(given) > self.config.max_choices:
            raise self._too_many(len(given), "prompt")
        return [
            self._encode(part) if isinstance(part, str) else list(part) for part in given if not isinstance(part, int)
        ]

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise PromptError("this target has no tokenizer; give the prompt as token ids")
        return self.tokenizer.encode_prompt(text)

    def _jobs(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        caller: Caller,
        *,
        prefix: str,
        top_logprobs: int | None,
    ) -> tuple[list[Job], ReplyContext]:
        """One job a prompt, checked as far as it can be without the engine."""
        name = "messages" if isinstance(request, ChatRequest) else "prompt"
        prompts = [self._fitted(request, prompt, name) for prompt in prompts]
        window = self.spec.max_positions
        limit = most_tokens(request, room=window - max(map(len, prompts)), window=window)
        params = sampling_of(request, max_tokens=limit)
        if params.n * len(prompts) > self.config.max_choices:
            raise self._too_many(params.n * len(prompts), "n")
        id = f"{prefix}-{caller.request_id}"
        jobs = [
            Job(
                id=f"{id}-{next(self._numbers)}",
                prompt=prompt,
                params=params,
                scope=caller.scope,
                speculation=speculation_of(request),
                structured_outputs=constraint_of(request),
                constrained_by="response_format" if request.structured_outputs is None else "structured_outputs",
                prediction=None if request.prediction is None else request.prediction.text,
            )
            for prompt in prompts
        ]
        options = request.stream_options
        context = ReplyContext(
            id=id,
            created=int(time.time()),
            model=self.model_name,
            fingerprint=self.spec.fingerprint,
            tokenizer=self.tokenizer,
            prompts=prompts,
            num_choices=params.n,
            num_draft_tokens=self._num_draft_tokens,
            top_logprobs=top_logprobs,
            returns_token_ids=bool(request.return_token_ids),
            includes_usage=bool(options and options.include_usage),
            includes_steps=bool(options and options.include_steps),
        )
        return jobs, context

    def _fitted(self, request: SharedFields, prompt: list[int], name: str) -> list[int]:
        """The prompt within ``truncate_prompt_tokens`` (its end is kept) and the server's own limit."""
        keep, window = request.truncate_prompt_tokens, self.spec.max_positions
        if keep is not None:
            keep = window - 1 if keep == -1 else keep
            prompt = prompt[len(prompt) - min(keep, len(prompt)) :]
        most = self.config.max_prompt_tokens
        if most and len(prompt) > most:
            raise bad_request(f"the prompt has {len(prompt)} tokens; allowed: at most {most}", param=name)
        if len(prompt) >= window:
            raise bad_request(
                f"the prompt has {len(prompt)} tokens, the window {window}; shorten it to at most {window - 1}",
                param=name,
                code="context_length_exceeded",
            )
        return prompt

    def _too_many(self, given: int, param: str) -> ApiError:
        return bad_request(
            f"{given} outputs are asked for in one request; allowed: at most {self.config.max_choices}", param=param
        )

    def _tool_parser(self, request: ChatRequest) -> ToolParser:
        return ToolParser(
            [tool.raw for tool in request.tools or ()],
            style=call_style(self.config.tool_format, self.tokenizer),
            is_parallel=request.parallel_tool_calls is not False,
        )

    def _prepared(self, request: SharedFields, jobs: Sequence[Job], reply: Reply) -> Prepared:
        choices = jobs[0].params.n
        return Prepared(jobs=jobs, reply=reply, num_choices=choices, is_streamed=bool(request.stream))

    # --- answers

    @asynccontextmanager
    async def running(self, prepared: Prepared) -> AsyncIterator[Stream]:
        """Submit the jobs; whatever is unfinished at the end is cancelled."""
        stream = await self.worker.submit(prepared.jobs)
        try:
            yield stream
        finally:
            if stream.missing:
                self.worker.cancel(stream)

    async def whole(self, prepared: Prepared) -> dict[str, Any]:
        """Decode to the end.

        Raises:
            ApiError: refused (400, 429, 503), too slow (408), or a fault (500).
        """
        results: dict[int, GenerationResult] = {}
        async with self._in_time(), self.running(prepared) as stream:
            while stream.missing:
                for event in await stream.batch():
                    if event.result is not None:
                        results[prepared.choice(stream, event)] = event.result
        return prepared.reply.whole(sorted(results.items()))

    async def frames(self, prepared: Prepared, stream: Stream, deadline: float) -> AsyncGenerator[bytes, None]:
        """Events on the wire, all that are there in one piece; an error ends the stream as its last event."""
        results: list[GenerationResult] = []
        try:
            while stream.missing:
                async with asyncio.timeout_at(deadline):
                    events = await stream.batch()
                results += [event.result for event in events if event.result is not None]
                yield self._chunks(prepared, stream, events, results)
        except Exception as error:
            yield frame(self._told(error).body())
            return
        finally:
            if stream.missing:
                self.worker.cancel(stream)
        if prepared.reply.context.includes_usage:
            yield frame(prepared.reply.usage_chunk(results)) + DONE
        else:
            yield DONE

    def _chunks(
        self, prepared: Prepared, stream: Stream, events: Sequence[StreamEvent], results: Sequence[GenerationResult]
    ) -> bytes:
        chunks = [chunk for event in events for chunk in prepared.reply.chunks(prepared.choice(stream, event), event)]
        if chunks and not stream.missing and not prepared.reply.context.includes_usage:
            chunks[-1]["metrics"] = prepared.reply.usage_chunk(results)["metrics"]
        return b"".join(map(frame, chunks))

    def deadline(self) -> float:
        """When a request that begins now must be done, by the event loop's clock."""
        return asyncio.get_running_loop().time() + self.config.request_timeout_s

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self.deadline()):
                yield
        except TimeoutError as error:
            raise self._told(error) from None

    def _told(self, error: Exception) -> ApiError:
        if isinstance(error, TimeoutError):
            limit = self.config.request_timeout_s
            return ApiError(
                408, f"the request took longer than {limit:g} s, the most that this server gives", code="timeout"
            )
        return api_error(error)


def engine_settings(engine: Engine) -> dict[str, Any]:
    """The engine's settings without a request's own."""
    settings = engine.settings(SamplingParams())
    del settings["sampling"]
    return settings
