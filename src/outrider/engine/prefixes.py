"""Caches of finished sequences, kept for the next turn of the same chat and for others that begin alike.

Only requests of one *scope* share: whether a prompt was read quickly shows what others have asked before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.engine.memory import CacheMemory

__all__ = ["Prefix", "PrefixPool"]

MIN_SHARED = 16
"""Shortest common prefix worth taking over."""
BLOCK = 64
"""Tokens compared at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What a slot holds, and for whom."""

    tokens: list[int]
    slot: int
    scope: str | None = None


class PrefixPool:
    """Least recently used first out, and out before anybody who runs is put back.

    Args:
        memory: hands out the slots, and counts them.
        capacity: most entries; 0 keeps none.
    """

    def __init__(self, memory: CacheMemory, capacity: int) -> None:
        self._memory = memory
        self._capacity = capacity
        self._entries: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(self._memory.held(entry.slot) for entry in self._entries)

    def give(self, tokens: Sequence[int], slot: int, scope: str | None = None) -> None:
        """Hand over the slot of a finished sequence. Entries that are a beginning of it are not needed any more."""
        cache = self._memory.cache
        held = min(cache.length(slot), len(tokens))
        if self._capacity == 0 or held < MIN_SHARED:
            self._memory.give(slot)
            return
        cache.keep(slot, base=held, path=())
        new = Prefix(list(tokens[:held]), slot, scope)
        for old in [e for e in self._entries if e.scope == scope and e.tokens == new.tokens[: len(e.tokens)]]:
            self._drop(old)
        self._entries.append(new)
        while len(self._entries) > self._capacity:
            self._drop(self._entries[0])

    def take(
        self,
        tokens: Sequence[int],
        *,
        room: int,
        scope: str | None = None,
        live: Iterable[Prefix] = (),
        extra_bytes: int = 0,
    ) -> tuple[int, int] | None:
        """A slot for a new sequence and how many of its tokens it already holds; ``None`` if the memory does not suffice.

        At least one token is left to read, since its row gives the first law. An entry that is mostly shared is taken
        over; of a longer one, and of a sequence that runs, the shared part is copied.

        Args:
            tokens: what the sequence begins with.
            room: tokens that the slot must have room for.
            scope: whose entries may be looked at.
            live: running sequences, which may be copied from.
            extra_bytes: needed besides.
        """
        best, shared = self._longest(tokens, scope, live)
        if best is not None and best in self._entries and 2 * shared >= len(best.tokens):
            more = max(0, self._memory.slot_cost(room) - self._memory.held(best.slot)) + extra_bytes
            if self.make_room(more, spare=best):
                self._entries.remove(best)
                self._memory.cache.keep(best.slot, base=shared, path=())
                self._memory.grow(best.slot, room)
                return best.slot, shared
        if best is not None and self.make_room(self._memory.slot_cost(room) + extra_bytes, spare=best):
            slot = self._memory.take(room)
            self._memory.cache.copy_prefix(best.slot, slot, shared)
            self._touch(best)
            return slot, shared
        if self.make_room(self._memory.slot_cost(room) + extra_bytes):
            return self._memory.take(room), 0
        return None

    def make_room(self, num_bytes: int, *, spare: Prefix | None = None) -> bool:
        """Drop entries until so many bytes more are inside the budget; drops none if that cannot be reached."""
        droppable = [entry for entry in self._entries if entry is not spare]
        if not self._memory.fits(num_bytes - sum(self._memory.held(entry.slot) for entry in droppable)):
            return False
        for entry in droppable:
            if self._memory.fits(num_bytes):
                break
            self._drop(entry)
        return True

    def clear(self) -> None:
        """Free everything."""
        while self._entries:
            self._drop(self._entries[-1])

    def _longest(self, tokens: Sequence[int], scope: str | None, live: Iterable[Prefix]) -> tuple[Prefix | None, int]:
        best, shared = None, MIN_SHARED - 1
        if self._capacity == 0:
            return None, 0
        for entry in (*self._entries, *live):
            if entry.scope == scope:
                most = min(len(tokens) - 1, self._memory.cache.length(entry.slot))
                common = _common_prefix(entry.tokens, tokens, most)
                if common > shared:
                    best, shared = entry, common
        return best, shared

    def _touch(self, entry: Prefix) -> None:
        if entry in self._entries:
            self._entries.remove(entry)
            self._entries.append(entry)

    def _drop(self, entry: Prefix) -> None:
        self._entries.remove(entry)
        self._memory.give(entry.slot)


def _common_prefix(left: Sequence[int], right: Sequence[int], most: int) -> int:
    most = min(len(left), len(right), most)
    start = 0
    while start + BLOCK <= most and left[start : start + BLOCK] == right[start : start + BLOCK]:
        start += BLOCK
    for index in range(start, most):
        if left[index] != right[index]:
            return index
    return most
