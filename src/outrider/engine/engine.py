"""The engine: submit requests, step, collect events. Everything else is sugar over these three."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

import torch

from outrider.device import one_torch_thread
from outrider.drafters.base import Drafter, DrafterWithPath
from outrider.drafters.portfolio import members_of
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable
from outrider.engine.intake import Intake
from outrider.engine.measure_costs import load_or_measure
from outrider.engine.memory import CacheMemory, resolve_budget
from outrider.engine.planner import Planner
from outrider.engine.queue import Ticket
from outrider.engine.request import Prompt, build_request, build_sequences
from outrider.engine.result import GenerationResult, StreamEvent
from outrider.engine.scheduler import PassPlan, Scheduler
from outrider.engine.sequence import LiveSequence
from outrider.engine.speculation import SpeculationParams
from outrider.engine.stats import EngineStats, Meter
from outrider.engine.step import Machinery, decode_step
from outrider.engine.streams import AsyncStreams
from outrider.errors import ConfigError
from outrider.models.base import Target
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason, StepReport

__all__ = ["Engine"]

_log = logging.getLogger(__name__)


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
        config = config or EngineConfig()
        budget_gb = resolve_budget(config, target.spec.device)
        self.config = replace(config, cache_memory_gb=budget_gb)
        self.tokenizer = getattr(target, "tokenizer", None)
        self._entropy = entropy or (lambda: secrets.randbits(63))
        # Who never drafts need not follow the texts.
        active = drafter if self.config.num_draft_tokens > 0 else None
        self._machinery = Machinery(
            target=target, cache=target.new_cache(), drafter=active, verification=self.config.verification
        )
        self._has_own_threads = target.spec.path.startswith("native")
        self.planner = Planner(self.config, self._cost_table(costs), members_of(active))
        self._memory = CacheMemory(self._machinery.cache, active, round(budget_gb * 1e9))
        self._scheduler = Scheduler(self._machinery, self.config, self._memory)
        self._meter = Meter()
        self._ids, self._keys, self._numbers = itertools.count(), itertools.count(), itertools.count()
        self._undelivered: list[StreamEvent] = []
        self._interrupted: PassPlan | None = None  # a pass that began and did not end
        self._next_deadline = math.inf  # nobody's comes earlier
        self._lock = threading.RLock()  # held for a whole step
        self._intake = Intake(self.config.max_waiting)
        self._stats = EngineStats(cache_bytes_budget=self._memory.budget_bytes)
        self._streams = AsyncStreams(step=self.step, has_work=lambda: self.has_work, cancel=self.cancel)

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, or an event has not been handed out."""
        return bool(self._intake or self._undelivered)

    @property
    def cache_bytes_in_use(self) -> int:
        """Bytes of keys and values that are handed out: the target's, the drafter's, cached prefixes."""
        return self._memory.in_use

    @property
    def cache_bytes_budget(self) -> int:
        """What :attr:`cache_bytes_in_use` never passes."""
        return self._memory.budget_bytes

    @property
    def is_draining(self) -> bool:
        """True once nothing new is taken."""
        return self._intake.is_draining

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        scope: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        prediction: str | None = None,
        speculation: SpeculationParams | None = None,
    ) -> str:
        """Queue a request; returns its id. Does not wait for a step that runs in another thread.

        Args:
            prompt: text, token ids or a chat.
            params: how to sample and when to stop; greedy if not given.
            id: unique among requests that have not ended; made up if not given.
            scope: whose request it is: only requests of one scope share cached prefixes, and scopes are served in turn.
            priority: smaller is more urgent.
            timeout_s: seconds from now after which it ends with what it has, reason ``timeout``.
            prediction: a text that the output may largely repeat. Drafters that look text up copy from it; it changes
                speed, never output.
            speculation: how this request may be drafted for; as the engine sees fit if not given.

        Raises:
            PromptError, SamplingError: what was given is not possible; nothing was queued.
            CapacityError: it could never fit into the cache's memory.
            QueueFullError: as many requests wait as may wait.
            DrainingError: nothing new is taken.
            ConfigError: the id is in use, the timeout is not positive, or ``speculation`` asks for what this engine has not.
        """
        params = params or SamplingParams()
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s {timeout_s!r} is not possible; allowed: seconds of more than 0, or none")
        if speculation is not None:
            speculation.check([each.name for each in members_of(self.drafter)], self.config.num_draft_tokens)
        self._intake.check_open()
        seed = params.seed if params.seed is not None else self._entropy()
        id = id if id is not None else self._new_id()
        spec, tokenizer = self.target.spec, self.tokenizer
        request = build_request(
            prompt,
            params,
            id=id,
            seed=seed,
            scope=scope,
            priority=priority,
            spec=spec,
            tokenizer=tokenizer,
            prediction=prediction,
            speculation=speculation,
        )
        deadline = None if timeout_s is None else request.submitted + timeout_s
        request = replace(request, number=next(self._numbers), deadline=deadline)
        sequences = build_sequences(request, keys=self._keys, spec=spec, tokenizer=tokenizer)
        self._memory.check(sequences[0].num_prompt, sequences[0].stop.limit)
        self._intake.accept(Ticket(sequences=sequences))
        return id

    def cancel(self, id: str) -> None:
        """End a request at the next step, wherever it is; its choices finish with what they have, reason ``cancelled``."""
        self._intake.cancel(id)

    def drain(self) -> None:
        """Take nothing new from now on. What was accepted is finished: step until :attr:`has_work` is false."""
        self._intake.is_draining = True

    def clear_prefixes(self) -> None:
        """Forget the caches of finished sequences."""
        with self._lock:
            self._scheduler.prefixes.clear()

    def stats(self) -> EngineStats:
        """What the engine is doing, as of its last step. Does not wait for a step that runs in another thread."""
        return replace(
            self._stats,
            waiting=self._intake.num_waiting,
            num_refused=self._intake.num_refused,
            is_draining=self._intake.is_draining,
            cache_bytes_in_use=self._memory.in_use,
        )

    @torch.inference_mode()
    def step(self) -> list[StreamEvent]:
        """Start what fits, run one pass over everything that runs or is read; returns what happened to each sequence."""
        with self._lock, one_torch_thread(self._has_own_threads):
            events, self._undelivered = self._undelivered, []
            events += self._drop_ended()
            plan = self._scheduler.plan()
            events += self._end(self._scheduler.take_faulty())
            if not plan.is_empty:
                events += self._run(plan)
            self._stats = self._meter.snapshot(self._scheduler)
            self._intake.ends_per_s = self._meter.ends_per_s
            return events

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ids: Sequence[str] | None = None,
        predictions: Sequence[str | None] | None = None,
        on_event: Callable[[StreamEvent], None] | None = None,
    ) -> list[GenerationResult]:
        """Decode many prompts to the end.

        Args:
            prompts: texts, token id lists or chats.
            params: one for all, or one a prompt.
            ids: one a prompt, unique; made up if not given.
            predictions: one a prompt; see :meth:`submit`.
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
        texts: Sequence[str | None] = [None] * len(prompts) if predictions is None else predictions
        if not len(each) == len(names) == len(texts) == len(prompts):
            raise ConfigError(
                f"{len(prompts)} prompts, {len(each)} params, {len(names)} ids and {len(texts)} predictions; "
                "give one of each a prompt"
            )
        order = self._submit_all(prompts, each, names, texts)
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

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, prediction: str | None = None
    ) -> Iterator[StreamEvent]:
        """Decode one prompt, event by event. Closing the iterator cancels the request."""
        order = self._submit_all([prompt], [params], [None], [prediction])
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
        scope: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        prediction: str | None = None,
        speculation: SpeculationParams | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Decode one prompt beside whatever else this event loop streams; steps run in a worker thread.

        Closing the iterator, or cancelling its task, cancels the request. Arguments and errors are those of :meth:`submit`.
        """
        params = params or SamplingParams()
        name = id if id is not None else self._new_id()

        def submit() -> str:
            return self.submit(
                prompt,
                params,
                id=name,
                scope=scope,
                priority=priority,
                timeout_s=timeout_s,
                prediction=prediction,
                speculation=speculation,
            )

        async with aclosing(self._streams.follow(name, params.n, submit)) as events:
            async for event in events:
                yield event

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

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def _submit_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        names: Sequence[str | None],
        predictions: Sequence[str | None],
    ) -> dict[str, int]:
        """Submit all or none; returns each id with its number of choices."""
        order: dict[str, int] = {}
        try:
            for prompt, each, name, text in zip(prompts, params, names, predictions, strict=True):
                order[self.submit(prompt, each, id=name, prediction=text)] = 1 if each is None else each.n
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
            gone = set(ids)
            others = [event for event in self._drop_ended() if event.id not in gone]
            self._undelivered = [event for event in self._undelivered if event.id not in gone] + others

    def _drop_ended(self) -> list[StreamEvent]:
        """Take in what has come, and end what was cancelled or is past its deadline, wherever it is."""
        interrupted = [] if self._interrupted is None else self._fail(self._interrupted, InterruptedError("in a pass"))
        inbox, cancelled = self._intake.take()
        for ticket in inbox:
            self._scheduler.waiting.push(ticket)
            self._next_deadline = min(self._next_deadline, ticket.request.deadline or math.inf)
        now = time.perf_counter()
        if not cancelled and now < self._next_deadline:
            return interrupted
        self._next_deadline = math.inf
        ended: list[tuple[LiveSequence, FinishReason]] = []
        for sequence in self._scheduler.sequences():
            request = sequence.request
            if request.id in cancelled:
                ended.append((sequence, FinishReason.CANCELLED))
            elif request.deadline is not None and now >= request.deadline:
                ended.append((sequence, FinishReason.TIMEOUT))
            elif request.deadline is not None:
                self._next_deadline = min(self._next_deadline, request.deadline)
        for sequence, reason in ended:
            sequence.end_early(reason)
        return interrupted + self._end([sequence for sequence, _ in ended])

    def _run(self, plan: PassPlan) -> list[StreamEvent]:
        """One pass. A fault of the whole pass ends those that were in it; everybody else, and the engine, go on."""
        self._intake.note_started(ticket.request.id for ticket in plan.tickets)
        self._interrupted = plan
        try:
            reports = decode_step(self._machinery, self.planner, plan.sequences, plan.chunks)
        except AssertionError:
            raise
        except Exception as error:
            _log.exception("a pass over %d sequences failed", len(plan.everybody))
            return self._fail(plan, error)
        self._scheduler.settle(plan)
        self._interrupted = None
        return self._report(plan, reports)

    def _fail(self, plan: PassPlan, error: Exception) -> list[StreamEvent]:
        """End everybody who was in a pass: it may have left anything in their caches."""
        self._interrupted = None
        for sequence in plan.everybody:
            sequence.fail(error)
        return self._end(plan.everybody)

    def _report(self, plan: PassPlan, reports: Sequence[StepReport]) -> list[StreamEvent]:
        self._meter.add_pass(plan, reports)
        events = []
        for sequence, report in zip(plan.takers, reports, strict=True):
            if sequence.finish_reason is None:
                events.append(self._event(sequence, report))
            else:
                events += self._end([sequence], report)
        return events

    def _event(self, sequence: LiveSequence, report: StepReport | None) -> StreamEvent:
        settings = self.settings(sequence.params) if sequence.finish_reason is not None else {}
        return sequence.event(report, drafter=self._drafter_name, settings=settings)

    def _end(self, sequences: Iterable[LiveSequence], report: StepReport | None = None) -> list[StreamEvent]:
        """Last events of sequences that have ended; they are nowhere any more."""
        events = []
        for sequence in sequences:
            event = self._event(sequence, report)
            events.append(event)
            self._scheduler.retire(sequence)
            self.planner.forget(sequence)
            assert event.result is not None
            self._meter.add_end(event.result)
            self._intake.note_ended(sequence.request.id)
        return events
