"""Caches of finished sequences, kept for the next turn of the same chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cache.base import Cache

__all__ = ["PrefixPool"]

MIN_SHARED = 16
"""Shortest common prefix worth taking over."""


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: tuple[int, ...]
    slot: int


class PrefixPool:
    """Least recently finished first out.

    Args:
        cache: the target's cache, which holds the slots.
        capacity: most entries; 0 keeps none.
    """

    def __init__(self, cache: Cache, capacity: int) -> None:
        self._cache = cache
        self._capacity = capacity
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def give(self, tokens: Sequence[int], slot: int) -> None:
        """Hand over the slot of a finished sequence."""
        if self._capacity == 0:
            self._cache.free(slot)
            return
        held = min(self._cache.length(slot), len(tokens))
        self._cache.keep(slot, base=held, path=())
        self._entries.append(_Entry(tuple(tokens[:held]), slot))
        while len(self._entries) > self._capacity:
            self._cache.free(self._entries.pop(0).slot)

    def take(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, int]:
        """A slot for a new sequence and how many tokens of its prompt it already holds.

        At least one token of the prompt is left to read, since its row gives the first law. An entry that is mostly
        shared is taken over; of a longer one the shared part is copied.

        Args:
            prompt: the new sequence's prompt.
            num_tokens: room that the sequence may need in all.
        """
        best, shared = None, MIN_SHARED - 1
        for entry in self._entries:
            common = _common_prefix(entry.tokens, prompt, len(prompt) - 1)
            if common > shared:
                best, shared = entry, common
        if best is None:
            return self._cache.allocate(num_tokens), 0
        self._entries.remove(best)
        if 2 * shared >= len(best.tokens):
            self._cache.keep(best.slot, base=shared, path=())
            return best.slot, shared
        self._entries.append(best)
        slot = self._cache.allocate(num_tokens)
        self._cache.copy_prefix(best.slot, slot, shared)
        return slot, shared

    def clear(self) -> None:
        """Free everything."""
        while self._entries:
            self._cache.free(self._entries.pop().slot)


def _common_prefix(left: Sequence[int], right: Sequence[int], most: int) -> int:
    most = min(len(left), len(right), most)
    for index in range(most):
        if left[index] != right[index]:
            return index
    return most
