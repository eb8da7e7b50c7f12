"""Who waits, who is read, who runs: admission by need, memory for every step, and whom to put back when it does not suffice.

A request is a *ticket* until its text is in the cache; then its choices run. Memory is given by need: a sequence gets room
for what it has and a while ahead, and more as it grows. Where that does not fit, cached prefixes are dropped first; then the
least urgent, youngest sequence is *put back*: it keeps its tokens, its sampling history and its text, gives its memory back,
and is read again when there is room. Since a token depends on the tokens before it and on its absolute position alone,
its output is the same as if nothing had happened.

The most urgent, oldest sequence is never put back for another, and whoever could not finish alone is refused at once; so
there is always one that gets ahead, and everybody ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from outrider.engine.config import MAX_DRAFT_TOKENS, EngineConfig
from outrider.engine.following import Following
from outrider.engine.memory import CacheMemory
from outrider.engine.prefixes import Prefix, PrefixPool
from outrider.engine.queue import FairQueue, Ticket
from outrider.engine.reading import Chunk, share_out
from outrider.engine.sequence import NO_SLOT, LiveSequence
from outrider.engine.step import Machinery
from outrider.types import FinishReason

__all__ = ["PassPlan", "Scheduler"]

AHEAD = 256
"""Tokens that a sequence gets room for beyond what it has, where memory allows."""
AHEAD_AGAIN = 64
"""The least of it for one that is started beside others, lest it be put back at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """What the next pass does: decode these sequences, read these parts."""

    sequences: list[LiveSequence]
    chunks: list[Chunk]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not self.sequences and not self.chunks

    @property
    def tickets(self) -> list[Ticket]:
        """Whose parts are read."""
        return [chunk.ticket for chunk in self.chunks]

    @property
    def takers(self) -> list[LiveSequence]:
        """Who takes tokens from the pass, in the order of its reports."""
        return [*self.sequences, *(sequence for chunk in self.chunks for sequence in chunk.sequences)]

    @property
    def everybody(self) -> list[LiveSequence]:
        """Who has rows in the pass."""
        return [*self.sequences, *(sequence for ticket in self.tickets for sequence in ticket.sequences)]


class Scheduler:
    """Keeps every sequence of an engine in one place: waiting, put back, being read, or running.

    Args:
        machinery: target, cache, drafter.
        config: batch size, tokens read a pass, cached prefixes.
        memory: of the machinery's cache.
    """

    def __init__(self, machinery: Machinery, config: EngineConfig, memory: CacheMemory) -> None:
        self._following = Following(machinery.drafter)
        self._config = config
        self.memory = memory
        self.prefixes = PrefixPool(memory, config.num_cached_prefixes)
        self.waiting = FairQueue()
        self.put_back: list[Ticket] = []
        self.reading: list[Ticket] = []
        self.running: list[LiveSequence] = []
        self._faulty: list[LiveSequence] = []
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self._nodes_ahead = MAX_DRAFT_TOKENS if machinery.drafter is not None and config.num_draft_tokens else 0

    def sequences(self) -> Iterable[LiveSequence]:
        """Everybody."""
        for tickets in (self.waiting, self.put_back, self.reading):
            for ticket in tickets:
                yield from ticket.sequences
        yield from self.running

    def plan(self) -> PassPlan:
        """Decide what the next pass does, and make room for it. See :meth:`take_faulty` for who cannot go on."""
        for sequence in sorted(filter(self._is_short, self.running), key=lambda s: s.seniority):
            if sequence.slot != NO_SLOT:  # not put back for an older one meanwhile
                with self._isolated([sequence]):
                    self._keep_going(sequence)
        most = self._config.prefill_while_decoding if self.running else self._config.prefill_chunk
        while sum(ticket.num_unread for ticket in self.reading) < most:
            ticket = self._next_ticket()
            is_started = False
            if ticket is not None:
                with self._isolated(ticket.sequences):
                    is_started = self._may_start(ticket) and self._start(ticket)
            if not is_started:
                break
        running = [sequence for sequence in self.running if sequence.finish_reason is None]
        reading = [ticket for ticket in self.reading if ticket.sequences[0].finish_reason is None]
        return PassPlan(sequences=running, chunks=share_out(reading, most))

    def take_faulty(self) -> list[LiveSequence]:
        """Sequences that a fault has ended while the pass was planned."""
        faulty, self._faulty = self._faulty, []
        return faulty

    def settle(self, plan: PassPlan) -> None:
        """Behind a pass: choices whose text is read run from here on, each with a cache of its own."""
        for chunk in plan.chunks:
            if chunk.is_last:
                self.reading.remove(chunk.ticket)
                first, *others = chunk.ticket.sequences
                for other in others:
                    self.memory.cache.copy_prefix(first.slot, other.slot, chunk.ticket.num_read)
                self.running += chunk.ticket.sequences

    def retire(self, sequence: LiveSequence) -> None:
        """Take an ended sequence out, wherever it is; its cache may serve a later turn."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._leave_ticket(sequence)
        if sequence.slot != NO_SLOT:
            self._give_slot(sequence)
        self._following.finish(sequence)
        self.memory.forget_drafter(sequence.key)

    def _give_slot(self, sequence: LiveSequence) -> None:
        """A fault may have left anything in a cache; what all others ended with may be shared."""
        slot, sequence.slot = sequence.slot, NO_SLOT
        if sequence.finish_reason is FinishReason.ERROR:
            self.memory.give(slot)
        else:
            self.prefixes.give(sequence.tokens, slot, sequence.request.scope)

    def _leave_ticket(self, sequence: LiveSequence) -> None:
        """A ticket whose last sequence leaves is no more."""
        tickets = [t for t in (*self.waiting, *self.put_back, *self.reading) if sequence in t.sequences]
        for ticket in tickets:
            if len(ticket.sequences) > 1:
                ticket.sequences.remove(sequence)
            elif ticket in self.reading:
                self.reading.remove(ticket)
            elif ticket in self.put_back:
                self.put_back.remove(ticket)
            else:
                self.waiting.remove(ticket)

    def _next_ticket(self) -> Ticket | None:
        """Whoever was put back has waited its turn already: it goes before all that are not more urgent."""
        new = self.waiting.peek()
        if self.put_back:
            old = min(self.put_back, key=lambda t: t.seniority)
            if new is None or old.request.priority <= new.request.priority:
                return old
        return new

    @property
    def _num_active(self) -> int:
        return len(self.running) + sum(len(ticket.sequences) for ticket in self.reading)

    def _may_start(self, ticket: Ticket) -> bool:
        """True if there is a place in the batch and memory; the ticket then has its slots."""
        num_active = self._num_active
        if num_active and num_active + len(ticket.sequences) > self._config.max_batch_size:
            return False
        if self._take_slots(
            ticket, [self._room_ahead(ticket, AHEAD + self._nodes_ahead), self._room_ahead(ticket, AHEAD_AGAIN)]
        ):
            return True
        if num_active:
            return False
        self._split(ticket)
        is_taken = self._take_slots(ticket, [len(ticket.tokens)])
        assert is_taken, "who could not run alone was refused at once"
        return True

    def _room_ahead(self, ticket: Ticket, num_tokens: int) -> int:
        return min(self._most_room(ticket.sequences[0]), len(ticket.tokens) + num_tokens)

    def _split(self, ticket: Ticket) -> None:
        """Choices that do not fit beside each other are read one by one."""
        others = ticket.sequences[1:]
        del ticket.sequences[1:]
        self.put_back += [Ticket(sequences=[other], was_put_back=ticket.was_put_back) for other in others]

    def _take_slots(self, ticket: Ticket, rooms: Iterable[int]) -> bool:
        """A slot for each choice, with the first of these rooms that fits."""
        first, *others = ticket.sequences
        live = [Prefix(t.tokens, t.sequences[0].slot, t.request.scope) for t in self.reading]
        live += [Prefix(s.tokens, s.slot, s.request.scope) for s in self.running]
        for room in rooms:
            extra = len(others) * self.memory.cost(room) + self.memory.drafter_cost(room)
            taken = self.prefixes.take(
                ticket.tokens, room=room, scope=ticket.request.scope, live=live, extra_bytes=extra
            )
            if taken is not None:
                first.slot, ticket.num_held = taken
                for other in others:
                    other.slot = self.memory.take(room)
                for sequence in ticket.sequences:
                    sequence.room = self.memory.room(sequence.slot)
                    self.memory.count_drafter(sequence.key, room)
                return True
        return False

    def _start(self, ticket: Ticket) -> bool:
        """Begin to read a ticket's text; always true."""
        ticket.num_read = ticket.num_held
        ticket.verify_ms = ticket.other_ms = 0.0
        self.num_reused_tokens += ticket.num_held
        if ticket in self.put_back:
            self.put_back.remove(ticket)
        else:
            self.waiting.take(ticket)
        self.reading.append(ticket)
        for sequence in ticket.sequences:
            sequence.started = sequence.started or perf_counter()
            self._following.start(sequence)
        return True

    def _is_short(self, sequence: LiveSequence) -> bool:
        """True if the next step may need more room than there is."""
        return sequence.room < min(self._most_room(sequence), len(sequence.tokens) + self._nodes_ahead)

    def _keep_going(self, sequence: LiveSequence) -> None:
        """Room for the next step of a running sequence; whoever is younger gives way, or it gives way itself."""
        needed, whole, nodes = len(sequence.tokens), self._most_room(sequence), self._nodes_ahead
        plenty = max(needed + nodes + AHEAD, sequence.room * 3 // 2)
        for room in (plenty, needed + nodes, needed + nodes // 4, needed + nodes // 16):
            if min(whole, room) <= sequence.room or self._grow(sequence, min(whole, room)):
                return
        while sequence.room < needed and not self._grow(sequence, needed):
            youngest = max((*self.running, *(s for t in self.reading for s in t.sequences)), key=lambda s: s.seniority)
            self._put_back(youngest)
            if youngest is sequence:
                return

    def _grow(self, sequence: LiveSequence, room: int) -> bool:
        if not self.prefixes.make_room(self.memory.growth(sequence.slot, sequence.key, room)):
            return False
        self.memory.grow(sequence.slot, room)
        self.memory.count_drafter(sequence.key, room)
        sequence.room = self.memory.room(sequence.slot)
        return True

    def _most_room(self, sequence: LiveSequence) -> int:
        """Tokens that a sequence may ever need room for, drafts included."""
        return sequence.num_prompt + sequence.stop.limit + self._nodes_ahead

    def _put_back(self, sequence: LiveSequence) -> None:
        """Give up the memory of a running sequence, or of the ticket that it is read with; nothing else is lost."""
        if sequence in self.running:
            self.running.remove(sequence)
            ticket = Ticket(sequences=[sequence], was_put_back=True)
        else:
            ticket = next(ticket for ticket in self.reading if sequence in ticket.sequences)
            self.reading.remove(ticket)
        self.put_back.append(ticket)
        for each in ticket.sequences:
            each.num_preemptions += 1
            self.num_preemptions += 1
            self.memory.give(each.slot)
            each.slot = NO_SLOT
            self._following.suspend(each)
            self.memory.forget_drafter(each.key)

    @contextmanager
    def _isolated(self, sequences: Iterable[LiveSequence]) -> Iterator[None]:
        """A fault while memory or a drafter is made ready ends these, and nobody else."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            for sequence in sequences:
                sequence.fail(error)
                self._faulty.append(sequence)
