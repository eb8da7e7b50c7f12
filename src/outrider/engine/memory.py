"""Bytes of keys and values against a hard budget: the target's slots, the drafter's share of each sequence, and prefixes.

What is counted is what may be taken: a slot counts with all its room, a drafter with the most that a sequence of that
room may cost it. While a slot grows, its old place lives until it is copied; that moment is not counted.
"""

from __future__ import annotations

import torch

from outrider.cache.base import Cache, MeteredCache
from outrider.device import free_memory_bytes
from outrider.drafters.base import Drafter, DrafterWithMemory, parts_of
from outrider.engine.config import EngineConfig
from outrider.errors import CapacityError

__all__ = ["CacheMemory", "resolve_budget"]

SHARE_OF_FREE = 0.5
"""Of the memory that is free when an engine is made: the rest is for activations, prompts, and everybody else."""
UNKNOWN_FREE = 4 * 10**9
"""Taken for free where the system does not say."""


def resolve_budget(config: EngineConfig, device: torch.device) -> float:
    """``cache_memory_gb`` as a number: itself, or for ``auto`` a share of what is free now, in steps of 0.1."""
    given = config.cache_memory_gb
    if not isinstance(given, str):
        return given
    free = free_memory_bytes(device)
    return max(0.1, round(SHARE_OF_FREE * (UNKNOWN_FREE if free is None else free) / 1e9, 1))


class CacheMemory:
    """Hands out slots, and knows what everything costs.

    Args:
        cache: the target's. One that cannot tell its bytes costs nothing.
        drafter: its parts count that are :class:`outrider.drafters.base.DrafterWithMemory`.
        budget_bytes: what :attr:`in_use` may reach.
    """

    def __init__(self, cache: Cache, drafter: Drafter | None = None, budget_bytes: int = 1 << 62) -> None:
        self.cache = cache
        self.budget_bytes = budget_bytes
        self._meter = cache if isinstance(cache, MeteredCache) else None
        self._parts = [part for part in parts_of(drafter) if isinstance(part, DrafterWithMemory)]
        self._rooms: dict[int, int] = {}
        self._slot_bytes: dict[int, int] = {}
        self._drafter_bytes: dict[int, int] = {}
        self.in_use = 0

    def slot_cost(self, num_tokens: int) -> int:
        """Bytes of a slot with room for ``num_tokens``."""
        return 0 if self._meter is None else self._meter.bytes_for(num_tokens)

    def drafter_cost(self, num_tokens: int) -> int:
        """Bytes that the drafter may need for a sequence of ``num_tokens``."""
        return sum(part.memory_bytes(num_tokens) for part in self._parts)

    def cost(self, num_tokens: int) -> int:
        """Bytes of a running sequence with room for ``num_tokens``."""
        return self.slot_cost(num_tokens) + self.drafter_cost(num_tokens)

    def check(self, num_prompt: int, limit: int) -> None:
        """Refuse a request that could not finish even alone.

        Raises:
            CapacityError: with the numbers.
        """
        needed = self.cost(num_prompt + limit)
        if needed > self.budget_bytes:
            raise CapacityError(
                f"the request's {num_prompt} prompt tokens and up to {limit} more need {needed / 1e6:.1f} MB of cache, "
                f"and there are {self.budget_bytes / 1e6:.1f} MB; shorten the prompt, lower max_tokens, or raise "
                "cache_memory_gb"
            )

    def fits(self, num_bytes: int) -> bool:
        """True if so many bytes more are inside the budget."""
        return self.in_use + num_bytes <= self.budget_bytes

    def room(self, slot: int) -> int:
        """Tokens that a slot may hold."""
        return self._rooms[slot]

    def held(self, slot: int) -> int:
        """Bytes that a slot is counted with."""
        return self._slot_bytes[slot]

    def take(self, num_tokens: int) -> int:
        """A new slot with room for ``num_tokens``."""
        slot = self.cache.allocate(num_tokens)
        self._rooms[slot] = num_tokens
        self._count(self._slot_bytes, slot, self.slot_cost(num_tokens))
        return slot

    def grow(self, slot: int, num_tokens: int) -> None:
        """Give a slot room for ``num_tokens``; never takes any away."""
        if num_tokens > self._rooms[slot]:
            if self._meter is not None:
                self._meter.ensure(slot, num_tokens)
            self._rooms[slot] = num_tokens
            self._count(self._slot_bytes, slot, max(self._slot_bytes[slot], self.slot_cost(num_tokens)))

    def growth(self, slot: int, key: int, num_tokens: int) -> int:
        """Bytes more that a slot and the drafter's sequence ``key`` take with room for ``num_tokens``."""
        more = max(0, self.slot_cost(num_tokens) - self._slot_bytes[slot])
        return more + max(0, self.drafter_cost(num_tokens) - self._drafter_bytes.get(key, 0))

    def give(self, slot: int) -> None:
        """Free a slot."""
        self.cache.free(slot)
        del self._rooms[slot]
        self.in_use -= self._slot_bytes.pop(slot)

    def count_drafter(self, key: int, num_tokens: int) -> None:
        """The drafter's sequence ``key`` may be ``num_tokens`` long."""
        cost = max(self.drafter_cost(num_tokens), self._drafter_bytes.get(key, 0))
        self._count(self._drafter_bytes, key, cost)

    def forget_drafter(self, key: int) -> None:
        """The drafter has given the sequence's memory back."""
        self.in_use -= self._drafter_bytes.pop(key, 0)

    def _count(self, entries: dict[int, int], name: int, num_bytes: int) -> None:
        self.in_use += num_bytes - entries.get(name, 0)
        entries[name] = num_bytes
