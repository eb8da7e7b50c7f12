"""The running sequences of an engine: admission, reading of prompts, retirement."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from outrider.device import synchronize
from outrider.engine.config import EngineConfig
from outrider.engine.prefixes import PrefixPool
from outrider.engine.report import PassCost, report_of
from outrider.engine.sequence import LiveSequence, Request
from outrider.engine.step import Machinery, commit
from outrider.engine.stop import OutputText, StopRules
from outrider.engine.taps import joined_taps, tap_reader, wanted_taps
from outrider.models.base import PackedRows
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.laws import ProcessedLaws
from outrider.sampling.state import SamplingState
from outrider.types import NO_DRAFT, StepReport
from outrider.verify import verify

__all__ = ["Batch"]


NO_SLOT = -1


class Batch:
    """Waiting requests and running sequences.

    A prompt is read in chunks; the law behind its last token gives the first output token of each of its ``n`` choices,
    which share the prompt's cache by copy.
    """

    def __init__(self, machinery: Machinery, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._machinery = machinery
        self._config = config
        self._tokenizer = tokenizer
        self._keys = itertools.count()
        self.prefixes = PrefixPool(machinery.cache, config.num_cached_prefixes)
        self.waiting: deque[Request] = deque()
        self.running: list[LiveSequence] = []

    def admit(self) -> list[tuple[LiveSequence, StepReport]]:
        """Read the prompts of waiting requests while there is room; returns their sequences with the prefill's report."""
        admitted: list[tuple[LiveSequence, StepReport]] = []
        while self.waiting and self._has_room(self.waiting[0]):
            sequences, reports = self._start(self.waiting.popleft())
            self.running.extend(sequences)
            admitted.extend(zip(sequences, reports, strict=True))
        return admitted

    def retire(self, sequence: LiveSequence) -> None:
        """Take a finished sequence out; its cache may serve a later turn."""
        self.running.remove(sequence)
        self.prefixes.give(sequence.tokens, sequence.slot)
        if self._machinery.drafter is not None:
            self._machinery.drafter.finish(sequence.key)

    def unstarted(self, request: Request) -> list[LiveSequence]:
        """The choices of a request whose prompt was never read (it was cancelled while it waited)."""
        limit = request.params.max_tokens
        return [self._sequence(request, index, NO_SLOT, limit) for index in range(request.params.n)]

    def _has_room(self, request: Request) -> bool:
        return not self.running or len(self.running) + request.params.n <= self._config.max_batch_size

    def _start(self, request: Request) -> tuple[list[LiveSequence], list[StepReport]]:
        started = time.perf_counter()
        cache = self._machinery.cache
        limit = min(request.params.max_tokens, self._machinery.target.spec.max_positions - len(request.prompt))
        room = len(request.prompt) + limit
        slot, held = self.prefixes.take(request.prompt, room)
        logits_RV, taps = self._read(request.prompt, slot, held)
        slots = [slot]
        for _ in range(1, request.params.n):
            slots.append(cache.allocate(room))
            cache.copy_prefix(slot, slots[-1], len(request.prompt))
        sequences = [self._sequence(request, index, taken, limit) for index, taken in enumerate(slots)]
        if self._machinery.drafter is not None:
            for sequence in sequences:
                self._machinery.drafter.start(sequence.key, sequence.tokens)
        self._hand_over(sequences, taps)
        laws = ProcessedLaws(logits_RV, first_rows=[0] * len(sequences), states=[s.state for s in sequences])
        verdicts = verify([NO_DRAFT] * len(sequences), laws)
        synchronize(self._machinery.target.spec.device)
        read = time.perf_counter()
        committed = commit(self._machinery, sequences, [NO_DRAFT] * len(sequences), verdicts, laws)
        cost = PassCost(
            draft_ms=0.0,
            verify_ms=(read - started) * 1e3,
            other_ms=(time.perf_counter() - read) * 1e3,
            batch_size=len(sequences),
            rows=len(request.prompt) - held,
            is_prefill=True,
        )
        reports = [report_of(NO_DRAFT, *entry, cost) for entry in zip(verdicts, committed, strict=True)]
        for sequence, report in zip(sequences, reports, strict=True):
            sequence.record(report)
        return sequences, reports

    def _read(self, prompt: Sequence[int], slot: int, held: int) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Read ``prompt[held:]`` in chunks.

        Returns:
            The logits behind its last token, ``[1, V]``, and the taps of each chunk with the position it starts at.
        """
        target, cache, chunk = self._machinery.target, self._machinery.cache, self._config.prefill_chunk
        layers = wanted_taps(self._machinery.drafter)
        logits_RV, taps = None, []
        for start in range(held, len(prompt), chunk):
            tokens = prompt[start : start + chunk]
            is_last = start + chunk >= len(prompt)
            rows = PackedRows.pack(
                [tokens],
                slots=[slot],
                starts=[start],
                device=target.spec.device,
                logit_rows=(len(tokens) - 1,) if is_last else (),
            )
            result = target.forward(rows, cache, taps=layers)
            logits_RV = result.logits_RV
            if layers:
                taps.append((start, joined_taps(result.taps, layers)))
        assert logits_RV is not None, "at least one prompt token is always read"
        return logits_RV, taps

    def _hand_over(self, sequences: Sequence[LiveSequence], taps: Sequence[tuple[int, Tensor]]) -> None:
        """Give the prompt's taps, which all choices share, to a drafter that reads them."""
        reader = tap_reader(self._machinery.drafter)
        if reader is not None:
            for sequence in sequences:
                for start, taps_RD in taps:
                    reader.absorb(sequence.key, start, taps_RD)

    def _sequence(self, request: Request, index: int, slot: int, limit: int) -> LiveSequence:
        spec, params = self._machinery.target.spec, request.params
        return LiveSequence(
            key=next(self._keys),
            request=request,
            index=index,
            tokens=list(request.prompt),
            slot=slot,
            state=SamplingState(
                params,
                prompt_tokens=request.prompt,
                vocab_size=spec.vocab_size,
                eos_token_ids=spec.eos_token_ids,
                seed=request.seed,
                choice=index,
            ),
            stop=StopRules(params, eos_token_ids=spec.eos_token_ids, limit=limit),
            text=OutputText(self._tokenizer, params.stop),
            logprobs=None if params.logprobs is None else [],
        )
