"""The cache protocol: memory of keys and values that can forget.

A sequence owns a *slot*, a small integer that stays its own until it is freed, whatever moves inside. ``lengths`` counts
cached tokens. A pass appends its rows (draft nodes included); the verdict then keeps a path of them and forgets the rest.

Worked example: 5 cached tokens; a pass of 4 rows (last token and a chain of three drafts) makes the length 9. The first
draft is kept, the others refused: ``keep(slot, base=5, path=(0, 1))`` leaves 7 cached tokens: the five, the last token's
row (0) and the kept draft's row (1). The correction token has no row yet; it is the next pass's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Cache", "MeteredCache"]


class Cache(Protocol):
    """Keys and values of many sequences."""

    def allocate(self, num_tokens: int) -> int:
        """A new, empty slot with room for ``num_tokens`` (it grows by itself past that)."""
        ...

    def free(self, slot: int) -> None:
        """Give the slot back."""
        ...

    def length(self, slot: int) -> int:
        """Cached tokens of the slot."""
        ...

    def keep(self, slot: int, *, base: int, path: Sequence[int]) -> None:
        """Keep the first ``base`` cached tokens and, of the rows behind them, those in ``path`` (ascending), in order.

        With an empty path this truncates to ``base`` tokens.
        """
        ...

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Make ``target`` (an empty slot) hold the first ``num_tokens`` cached tokens of ``source``."""
        ...


@runtime_checkable
class MeteredCache(Protocol):
    """A cache whose memory can be planned: what a scheduler with a budget asks besides."""

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a slot with room for ``num_tokens`` takes."""
        ...

    def ensure(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` in all, and for no more than :meth:`bytes_for` counts."""
        ...

    def num_bytes(self) -> int:
        """Bytes held by all slots."""
        ...
