"""A head's memory of many growing texts: taps come in, entries are made of them, drafts grow behind.

An *entry* is a feature beside the token that follows it (:mod:`outrider.drafters.eagle_head` has the table). Taps wait
until a draft is asked for; then their entries are made in one pass over all sequences, and the output of each sequence's
last entry opens its draft. A sequence whose taps waited too long, or whose first positions were never read here (their
cache was taken over from an earlier request), drafts from the positions that it has, at their true places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["DraftWalk", "EagleReader", "EntryRun", "HeadEntries"]

JOINT_ROWS = 64
"""A sequence with more waiting taps than this makes all entries but its last by itself first."""
CHUNK = 512
"""Most entries of one sequence in a pass."""
RING_BYTES = 256 << 20
"""Most memory of the taps that wait, of all sequences together."""
RING_LEAST = 32
"""Taps of a sequence that may always wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRun:
    """Neighbouring entries of one sequence that are made together.

    Attributes:
        row: the sequence's place in memory.
        count: entries that it has before.
        position: of the first new one.
        tokens: the token that follows each.
        taps_RD: the target's hidden states at each.
    """

    row: int
    count: int
    position: int
    tokens: Sequence[int]
    taps_RD: Tensor


class DraftWalk(Protocol):
    """Drafts of a batch, level by level, each node seeing the sequence's entries, its ancestors and itself.

    Its *rows* are the nodes of the last step, sequence by sequence; at first one a sequence, the committed text's end.
    """

    def step(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> None:
        """Read one level.

        Args:
            tokens: of each sequence, target ids of its nodes; a sequence without any has no rows from here on.
            parents: index of each node's parent among the sequence's nodes of the step before (at first 0).
        """
        ...

    def logits(self) -> Tensor:
        """Behind each row, float32 ``[R, U]``; the next step may overwrite them."""
        ...

    def best(self) -> tuple[list[list[int]], list[list[float]]]:
        """Each row's likeliest draft ids, as many as the walk is wide, best first, and their log-probabilities."""
        ...


class HeadEntries(Protocol):
    """A head's arithmetic, and its memory of many sequences."""

    def take_row(self) -> int:
        """A place for a new sequence."""
        ...

    def give_row(self, row: int) -> None:
        """The sequence ended."""
        ...

    def keep_last(self, row: int, count: int, num_kept: int) -> None:
        """Of a row's ``count`` entries keep the last ``num_kept``."""
        ...

    def extend(self, runs: Sequence[EntryRun]) -> None:
        """Make entries behind those that their sequences have. Whatever a walk left there is gone."""
        ...

    def walk(self, runs: Sequence[EntryRun], *, levels: int, width: int) -> DraftWalk:
        """The same, and stand behind the last of each run; at most ``levels`` steps of ``width`` nodes a sequence.

        The walk ends with the next call.
        """
        ...


@dataclass(slots=True)
class _Text:
    """Entries ``first .. first + count`` are made; taps of the positions up to ``end`` wait."""

    row: int
    first: int = 0
    count: int = 0
    end: int = 0
    waiting: deque[Tensor] = field(default_factory=deque)
    num_waiting: int = 0
    last_tap: Tensor | None = None

    def take_waiting(self, most: int) -> Tensor:
        """The last ``most`` waiting taps; if none wait, the last entry's again, which is made anew."""
        if not self.waiting:
            assert self.last_tap is not None, "no taps came for this sequence"
            self.count -= 1
            return self.last_tap
        taps_RD = self.waiting[0] if len(self.waiting) == 1 else torch.cat(tuple(self.waiting))
        taps_RD = taps_RD[-most:]
        self.waiting, self.num_waiting, self.last_tap = deque(), 0, taps_RD[-1:].clone()
        return taps_RD


class EagleReader:
    """Which entries each sequence has and which it still needs.

    Args:
        entries: what makes and keeps them.
        window: most entries that are looked back at. When a row is full, its older half is forgotten.
    """

    def __init__(self, entries: HeadEntries, window: int) -> None:
        assert window >= 2
        self._entries = entries
        self._window = window
        self._texts: dict[int, _Text] = {}

    def open(self, sequence: int) -> None:
        """A sequence begins."""
        assert sequence not in self._texts, sequence
        self._texts[sequence] = _Text(self._entries.take_row())

    def finish(self, sequence: int) -> None:
        """It ended, or is put back for a while."""
        self._entries.give_row(self._texts.pop(sequence).row)

    def waiting_bytes(self) -> int:
        """Bytes of all taps that wait."""
        return sum(taps.numel() * taps.element_size() for text in self._texts.values() for taps in text.waiting)

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        """Taps of the committed tokens at positions ``start`` and on.

        Those older than the window are dropped, and those past this sequence's share of ``RING_BYTES``: who was idle for
        long drafts from what is left.
        """
        text, size = self._texts[sequence], taps_RD.shape[0]
        assert start >= text.end, (start, text.end)
        if start > text.end:
            text.waiting, text.num_waiting = deque(), 0
        text.waiting.append(taps_RD)
        text.num_waiting += size
        text.end = start + size
        if text.num_waiting > min(self._window, RING_LEAST):
            self._drop_old(text, taps_RD.shape[1] * taps_RD.element_size())

    def _drop_old(self, text: _Text, row_bytes: int) -> None:
        most = min(self._window, max(RING_LEAST, RING_BYTES // (row_bytes * len(self._texts))))
        while text.num_waiting - len(text.waiting[0]) >= most:
            text.num_waiting -= len(text.waiting.popleft())

    def backlog(self, sequence: int) -> int:
        """Taps that wait for a sequence."""
        return self._texts[sequence].num_waiting

    def catch_up(self, texts: Sequence[tuple[int, Sequence[int]]], *, levels: int, width: int) -> DraftWalk:
        """Make the entries that wait of ``(sequence, committed tokens)``, and stand behind the last.

        Args:
            texts: sequences that taps came for, all of their tokens but the last.
            levels, width: how far and how broadly the walk may step.
        """
        return self._entries.walk(self.take_runs(texts), levels=levels, width=width)

    def take_runs(self, texts: Sequence[tuple[int, Sequence[int]]]) -> list[EntryRun]:
        """The entries that wait of ``(sequence, committed tokens)``, which are made now: at least one each, and not many."""
        runs = []
        for sequence, tokens in texts:
            text = self._texts[sequence]
            assert text.end == len(tokens) - 1, (text.end, len(tokens))
            taps_RD = text.take_waiting(self._window)
            self._make_room(text, len(taps_RD))
            if len(taps_RD) > JOINT_ROWS:
                for chunk_RD in torch.split(taps_RD[:-1], CHUNK):
                    self._entries.extend([self._run(text, tokens, chunk_RD)])
                taps_RD = taps_RD[-1:]
            runs.append(self._run(text, tokens, taps_RD))
        return runs

    @staticmethod
    def _run(text: _Text, tokens: Sequence[int], taps_RD: Tensor) -> EntryRun:
        """Entries behind those that the text has, counted from here on."""
        count, size = text.count, len(taps_RD)
        start = text.first + count
        text.count += size
        following = tokens[start + 1 : start + 1 + size]
        return EntryRun(row=text.row, count=count, position=start, tokens=following, taps_RD=taps_RD)

    def _make_room(self, text: _Text, num_new: int) -> None:
        start = text.end - num_new
        if start != text.first + text.count:  # positions in between are not known
            text.first, text.count = start, 0
        elif text.count + num_new > self._window:
            num_kept = max(0, min(self._window // 2, self._window - num_new))
            self._entries.keep_last(text.row, text.count, num_kept)
            text.first, text.count = start - num_kept, num_kept
