"""The engine: submit requests, step, collect events. Everything else is sugar over these three."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from outrider.device import one_torch_thread
from outrider.drafters.base import Drafter, DrafterWithPath
from outrider.drafters.portfolio import members_of
from outrider.engine.batch import Batch
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable
from outrider.engine.measure_costs import load_or_measure
from outrider.engine.planner import Planner
from outrider.engine.request import Prompt, build_request
from outrider.engine.result import GenerationResult, StreamEvent
from outrider.engine.sequence import LiveSequence
from outrider.engine.speculation import SpeculationParams
from outrider.engine.step import Machinery, decode_step
from outrider.errors import ConfigError
from outrider.models.base import Target
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason, StepReport

__all__ = ["Engine"]


class Engine:
    """Decodes requests on one target, many at once, with or without a drafter.

    Args:
        target: the model whose distribution is kept.
        drafter: who proposes; ``None`` decodes plainly.
        config: how to speculate and batch.
        entropy: source of 63-bit seeds for requests without one; the default asks the operating system.
        costs: of passes and drafts, for the adaptive schedule; if not given, measured here in a second or two, or read
            from the cache folder if that was done before.

    Example::

        target = load_target("smollm2-135m-instruct")
        engine = Engine(target, drafter=make_drafter("suffix", target))
        [result] = engine.generate(["Once upon a time"], SamplingParams(max_tokens=64))
        print(result.text, result.stats.tokens_per_pass)
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
        entropy: Callable[[], int] | None = None,
        costs: CostTable | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config or EngineConfig()
        self.tokenizer = getattr(target, "tokenizer", None)
        self._entropy = entropy or (lambda: secrets.randbits(63))
        # Who never drafts need not follow the texts.
        active = drafter if self.config.num_draft_tokens > 0 else None
        self._machinery = Machinery(
            target=target, cache=target.new_cache(), drafter=active, verification=self.config.verification
        )
        self._has_own_threads = target.spec.path.startswith("native")
        self.planner = Planner(self.config, self._cost_table(costs), members_of(active))
        self._batch = Batch(self._machinery, self.config, self.tokenizer)
        self._ids = itertools.count()
        self._live: set[str] = set()
        self._cancelled: set[str] = set()
        self._undelivered: list[StreamEvent] = []
        self._lock = threading.RLock()
        self._queues: dict[str, asyncio.Queue[StreamEvent | BaseException]] = {}
        self._driver: asyncio.Task[None] | None = None

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, or an event has not been handed out."""
        return bool(self._batch.waiting or self._batch.running or self._undelivered)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        speculation: SpeculationParams | None = None,
    ) -> str:
        """Queue a request; returns its id.

        Raises:
            PromptError, SamplingError: what was given is not possible; nothing was queued.
            ConfigError: the id is in use, or ``speculation`` asks for what this engine has not.
        """
        params = params or SamplingParams()
        if speculation is not None:
            speculation.check([each.name for each in members_of(self.drafter)], self.config.num_draft_tokens)
        with self._lock:
            id = id if id is not None else f"request-{next(self._ids)}"
            if id in self._live:
                raise ConfigError(f"request id {id!r} is in use; give another, or none")
            seed = params.seed if params.seed is not None else self._entropy()
            spec, tokenizer = self.target.spec, self.tokenizer
            request = build_request(
                prompt, params, id=id, seed=seed, spec=spec, tokenizer=tokenizer, speculation=speculation
            )
            self._batch.waiting.append(request)
            self._live.add(id)
            return id

    def cancel(self, id: str) -> None:
        """End a request at the next step; its choices finish with what they have, reason ``cancelled``."""
        with self._lock:
            if id in self._live:
                self._cancelled.add(id)

    @torch.inference_mode()
    def step(self) -> list[StreamEvent]:
        """Admit what fits, decode one step of everything that runs; returns what happened to each sequence."""
        with self._lock, one_torch_thread(self._has_own_threads):
            events, self._undelivered = self._undelivered, []
            events += self._drop_cancelled()
            events += self._report(self._batch.admit())
            running = list(self._batch.running)
            if running:
                reports = decode_step(self._machinery, self.planner, running)
                events += self._report(zip(running, reports, strict=True))
            return events

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ids: Sequence[str] | None = None,
        on_event: Callable[[StreamEvent], None] | None = None,
    ) -> list[GenerationResult]:
        """Decode many prompts to the end.

        Args:
            prompts: texts, token id lists or chats.
            params: one for all, or one a prompt.
            ids: one a prompt, unique; made up if not given.
            on_event: called with each event as it happens.

        Returns:
            Results in the order of the prompts, the ``n`` choices of one behind one another.

        Raises:
            PromptError, SamplingError: before anything is decoded.
        """
        if isinstance(prompts, str):
            raise ConfigError("generate takes a list of prompts; put the text into a list")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        names: Sequence[str | None] = [None] * len(prompts) if ids is None else ids
        if not len(each) == len(names) == len(prompts):
            raise ConfigError(
                f"{len(prompts)} prompts, {len(each)} params and {len(names)} ids; give one of each a prompt"
            )
        order = self._submit_all(prompts, each, names)
        results: dict[tuple[str, int], GenerationResult] = {}
        try:
            for event in self._events_of(order):
                if on_event is not None:
                    on_event(event)
                if event.result is not None:
                    results[event.id, event.index] = event.result
        except BaseException:
            self._abandon(order)
            raise
        return [results[id, index] for id, n in order.items() for index in range(n)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Decode one prompt, event by event. Closing the iterator cancels the request."""
        order = self._submit_all([prompt], [params], [None])
        try:
            yield from self._events_of(order)
        finally:
            self._abandon(order)

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        speculation: SpeculationParams | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Decode one prompt beside whatever else this event loop streams; steps run in a worker thread.

        Closing the iterator, or cancelling its task, cancels the request.
        """
        params = params or SamplingParams()
        id = await asyncio.to_thread(self.submit, prompt, params, id=id, speculation=speculation)
        queue = self._queues[id] = asyncio.Queue()
        missing = params.n
        try:
            self._ensure_driver()
            while missing:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                missing -= event.result is not None
                yield event
        finally:
            del self._queues[id]
            if missing:
                self.cancel(id)
                self._ensure_driver()

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> list[GenerationResult]:
        """The finished choices of one prompt, in order of their index."""
        results = [event.result async for event in self.astream(prompt, params) if event.result is not None]
        return sorted(results, key=lambda result: result.index)

    def settings(self, params: SamplingParams) -> dict[str, Any]:
        """Everything resolved, as JSON values: target, drafter, sampling, engine."""
        spec = self.target.spec
        return {
            "target": spec.name,
            "fingerprint": spec.fingerprint,
            "precision": spec.precision,
            "device": str(spec.device),
            "path": spec.path,
            "threads": torch.get_num_threads(),
            "drafter": self._drafter_name,
            **({"drafter_path": self.drafter.path} if isinstance(self.drafter, DrafterWithPath) else {}),
            "engine": self.config.to_json(),
            "sampling": asdict(params),
        }

    def _cost_table(self, given: CostTable | None) -> CostTable:
        members = members_of(self.drafter)
        is_needed = bool(members) and self.config.schedule == "adaptive" and self.config.num_draft_tokens > 0
        if given is not None or not is_needed:
            return given or CostTable()
        with torch.inference_mode(), one_torch_thread(self._has_own_threads):
            return load_or_measure(self.target, members)

    @property
    def _drafter_name(self) -> str:
        return "none" if self.drafter is None else self.drafter.name

    def _submit_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], names: Sequence[str | None]
    ) -> dict[str, int]:
        """Submit all or none; returns each id with its number of choices."""
        order: dict[str, int] = {}
        try:
            for prompt, each, name in zip(prompts, params, names, strict=True):
                order[self.submit(prompt, each, id=name)] = 1 if each is None else each.n
        except BaseException:
            self._abandon(order)
            raise
        return order

    def _events_of(self, order: dict[str, int]) -> Iterator[StreamEvent]:
        """Step until every choice in ``order`` has its result; events of other requests are kept for their owners."""
        missing = sum(order.values())
        while missing:
            with self._lock:
                events = self.step()
                self._undelivered += [event for event in events if event.id not in order]
            for event in events:
                if event.id in order:
                    missing -= event.result is not None
                    yield event

    def _abandon(self, ids: Iterable[str]) -> None:
        with self._lock:
            for id in ids:
                self.cancel(id)
            self._drop_cancelled()
            gone = set(ids)
            self._undelivered = [event for event in self._undelivered if event.id not in gone]

    def _report(self, pairs: Iterable[tuple[LiveSequence, StepReport]]) -> list[StreamEvent]:
        events = []
        for sequence, report in pairs:
            events.append(self._event(sequence, report))
            if sequence.finish_reason is not None:
                self._retire(sequence)
        return events

    def _event(self, sequence: LiveSequence, report: StepReport | None) -> StreamEvent:
        settings = self.settings(sequence.params) if sequence.finish_reason is not None else {}
        return sequence.event(report, drafter=self._drafter_name, settings=settings)

    def _retire(self, sequence: LiveSequence) -> None:
        self._batch.retire(sequence)
        self.planner.forget(sequence)
        if all(other.request.id != sequence.request.id for other in self._batch.running):
            self._live.discard(sequence.request.id)

    def _drop_cancelled(self) -> list[StreamEvent]:
        if not self._cancelled:
            return []
        gone, self._cancelled = self._cancelled, set()
        events = []
        for request in [r for r in self._batch.waiting if r.id in gone]:
            self._batch.waiting.remove(request)
            self._live.discard(request.id)
            for sequence in self._batch.unstarted(request):
                sequence.end(FinishReason.CANCELLED)
                events.append(self._event(sequence, None))
        for sequence in [s for s in self._batch.running if s.request.id in gone]:
            sequence.end(FinishReason.CANCELLED)
            events.append(self._event(sequence, None))
            self._retire(sequence)
        return events

    def _ensure_driver(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Step in a worker thread while there is work; hand events to the streams that own them."""
        while self.has_work:
            try:
                events = await asyncio.to_thread(self.step)
            except Exception as error:
                for queue in self._queues.values():
                    queue.put_nowait(error)
                return
            for event in events:
                if event.id in self._queues:
                    self._queues[event.id].put_nowait(event)
