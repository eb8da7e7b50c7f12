"""How a drafter follows sequences that start, are put back, go on, and end; a composite one's parts each in its own way."""

from __future__ import annotations

from outrider.drafters.base import Drafter, DrafterWithMemory, SharingDrafter, TapDrafter, parts_of
from outrider.engine.sequence import LiveSequence

__all__ = ["Following"]


class Following:
    """Tells the drafter what becomes of sequences.

    A part with memory gives it back while a sequence is put back. One that reads hidden states without saying what it keeps
    is finished and started again, since those states come anew. All others keep nothing but the text, and go on as if nothing
    had happened.

    Args:
        drafter: whom to tell; ``None`` is nobody.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        parts = parts_of(drafter)
        self._with_memory = [part for part in parts if isinstance(part, DrafterWithMemory)]
        self._sharing = [part for part in parts if isinstance(part, SharingDrafter)]
        self._readers: list[Drafter] = [
            part for part in parts if isinstance(part, TapDrafter) and not isinstance(part, DrafterWithMemory)
        ]

    def start(self, sequence: LiveSequence) -> None:
        """Its text is about to be read, for the first time or again."""
        if self._drafter is None:
            return
        if sequence.is_suspended:
            self._resume(sequence)
        elif not sequence.is_followed:
            for sharing in self._sharing:
                sharing.assign(sequence.key, sequence.request.scope)
            self._drafter.start(sequence.key, sequence.tokens)
            sequence.is_followed = True

    def suspend(self, sequence: LiveSequence) -> None:
        """It is put back."""
        if not sequence.is_followed:
            return
        sequence.is_suspended = True
        for part in self._with_memory:
            part.suspend(sequence.key)
        for reader in self._readers:
            reader.finish(sequence.key)

    def finish(self, sequence: LiveSequence) -> None:
        """It ended, wherever it was."""
        if self._drafter is None or not sequence.is_followed:
            return
        if sequence.is_suspended:
            self._resume(sequence)
        sequence.is_followed = False
        self._drafter.finish(sequence.key)

    def _resume(self, sequence: LiveSequence) -> None:
        sequence.is_suspended = False
        for part in self._with_memory:
            part.resume(sequence.key, sequence.tokens)
        for reader in self._readers:
            reader.start(sequence.key, sequence.tokens)
