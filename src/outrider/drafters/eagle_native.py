"""Entries and drafts of a head on the native kernels: one call a level, or one a tree, one segment of rows a sequence.

Each row's arithmetic depends on its own entries and ancestors alone, so a draft is the same bit for bit whatever is drafted
beside it. Nodes of a walk are cached behind their sequence's entries, as a target's drafts are, and never counted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from outrider.cache.native import NativeCache
from outrider.drafters.eagle_native_head import GrowthLimits, HeadRows, NativeHead, Ranked
from outrider.drafters.eagle_reader import EntryRun
from outrider.drafters.tree import ScoredTree
from outrider.native.library import CGrowth, CSegment

__all__ = ["NativeEntries", "NativeWalk"]


class NativeEntries:
    """A :class:`outrider.drafters.eagle_reader.HeadEntries`; ``head`` is its arithmetic."""

    def __init__(self, head: NativeHead) -> None:
        config = head.config
        self._head = head
        self._cache = NativeCache(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_width=config.head_width
        )

    def take_row(self) -> int:
        """A place for a new sequence."""
        return self._cache.allocate(1)

    def give_row(self, row: int) -> None:
        """The sequence ended; its memory goes back to the system."""
        self._cache.free(row)

    def most_bytes(self, num_tokens: int, window: int, num_nodes: int) -> int:
        """Most bytes of a row with entries of ``num_tokens`` tokens, at most ``window`` of them, and a walk's nodes.

        Rows grow by doubling, so one may have twice the room that it needs."""
        return self._cache.bytes_for(2 * (min(num_tokens, window) + num_nodes))

    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self._cache.num_bytes()

    def keep_last(self, row: int, count: int, num_kept: int) -> None:
        """Of a row's ``count`` entries keep the last ``num_kept``."""
        self._cache.keep(row, base=0, path=range(count - num_kept, count))

    def extend(self, runs: Sequence[EntryRun]) -> None:
        """Make entries."""
        self._make(runs, logit_rows=(), num_top=0, room=0)

    def walk(self, runs: Sequence[EntryRun], *, levels: int, width: int) -> NativeWalk:
        """Make entries and stand behind the last of each run."""
        ranked = self._make(runs, logit_rows=_last_rows(runs), num_top=width, room=levels * width)
        return NativeWalk(self._head, self._cache, runs, ranked, width=width)

    @property
    def can_grow(self) -> bool:
        """True if :meth:`grow` can be asked: it knows no norm between the levels."""
        return self._head.is_feedback_plain

    def grow(self, runs: Sequence[EntryRun], depths: Sequence[int], limits: GrowthLimits) -> list[ScoredTree]:
        """Make entries and grow a tree behind the last of each run by the head's own estimates, all levels in one call.

        The same candidates as :meth:`outrider.drafters.tree.TreeGrowth.expand_into` finds along a walk.

        Args:
            runs: one a tree.
            depths: levels of each, at least 1.
            limits: of all trees.
        """
        width = limits.width
        rows = self._rows(runs, logit_rows=_last_rows(runs), room=max(depths) * width)
        trees = (CGrowth * len(runs))()
        found = []
        for tree, run, depth in zip(trees, runs, depths, strict=True):
            most = width + (depth - 1) * width * width
            tokens, parents, scores = (ctypes.c_int64 * most)(), (ctypes.c_int32 * most)(), (ctypes.c_double * most)()
            tree.cache, tree.capacity = self._cache.address(run.row)
            tree.base, tree.position, tree.depth = run.count + len(run.tokens), run.position + len(run.tokens), depth
            tree.tokens, tree.parents = ctypes.addressof(tokens), ctypes.addressof(parents)
            tree.scores = ctypes.addressof(scores)
            found.append((tokens, parents, scores))
        self._head.grow(rows, trees, limits=limits)
        sizes = [tree.num_candidates for tree in trees]
        return [
            ScoredTree(tokens[:size], parents[:size], scores[:size])
            for size, (tokens, parents, scores) in zip(sizes, found, strict=True)
        ]

    def _make(self, runs: Sequence[EntryRun], *, logit_rows: Sequence[int], num_top: int, room: int) -> Ranked:
        return self._head.run(self._rows(runs, logit_rows=logit_rows, room=room), num_top=num_top)

    def _rows(self, runs: Sequence[EntryRun], *, logit_rows: Sequence[int], room: int) -> HeadRows:
        """The rows of new entries, with room in their caches for them and ``room`` nodes."""
        segments = (CSegment * len(runs))()
        start = 0
        for segment, run in zip(segments, runs, strict=True):
            size = len(run.tokens)
            self._cache.keep(run.row, base=run.count, path=())
            self._cache.reserve(run.row, run.count + size + room)
            segment.cache, segment.capacity = self._cache.address(run.row)
            segment.base, segment.start, segment.num_rows = run.count, start, size
            self._cache.advance(run.row, size)
            start += size
        return HeadRows(
            start_RD=self._head.prepared_taps(
                runs[0].taps_RD if len(runs) == 1 else torch.cat([run.taps_RD for run in runs])
            ),
            is_taps=True,
            tokens=[token for run in runs for token in run.tokens],
            positions=[place for run in runs for place in range(run.position, run.position + len(run.tokens))],
            segments=segments,
            logit_rows=logit_rows,
        )


def _last_rows(runs: Sequence[EntryRun]) -> list[int]:
    return [end - 1 for end in accumulate(len(run.tokens) for run in runs)]


class _Branches:
    """A sequence's nodes so far, in the order in which they are cached."""

    def __init__(self, row: int, base: int, position: int) -> None:
        self.row, self.base, self.position = row, base, position
        self.parents: list[int] = []
        self.level = [-1]  # nodes of the step before
        self.num_cached = 0

    def step(self, parents: Sequence[int]) -> None:
        """Nodes below those of the step before."""
        self.num_cached = len(self.parents)
        self.parents += [self.level[parent] for parent in parents]
        self.level = list(range(self.num_cached, len(self.parents)))
        self.position += 1


class NativeWalk:
    """A :class:`outrider.drafters.eagle_reader.DraftWalk`.

    Args:
        head, cache: its arithmetic, and the memory of ``runs``.
        runs: whose last entries the walk stands behind.
        ranked: what the pass over them found.
        width: most nodes of a level.
    """

    def __init__(
        self, head: NativeHead, cache: NativeCache, runs: Sequence[EntryRun], ranked: Ranked, *, width: int
    ) -> None:
        self._head, self._cache, self._width = head, cache, width
        self._ranked = ranked
        lasts = _last_rows(runs)
        self._outputs_RD: Tensor = ranked.outputs_RD[-1:] if len(runs) == 1 else ranked.outputs_RD[torch.tensor(lasts)]
        self._sizes = [1] * len(runs)
        self._branches = [
            _Branches(run.row, run.count + len(run.tokens), run.position + len(run.tokens)) for run in runs
        ]

    def logits(self) -> Tensor:
        """Behind each row."""
        return self._ranked.logits_RU

    def best(self) -> tuple[list[list[int]], list[list[float]]]:
        """Each row's likeliest draft ids, of equals the lowest."""
        return self._ranked.ids_RK.tolist(), self._ranked.logprobs_RK.tolist()

    def step(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> None:
        """Read one level."""
        firsts = [0, *accumulate(self._sizes)]
        origins = [first + parent for first, places in zip(firsts, parents, strict=False) for parent in places]
        positions = [branches.position for branches, nodes in zip(self._branches, tokens, strict=True) for _ in nodes]
        self._sizes = [len(nodes) for nodes in tokens]
        going = [index for index, size in enumerate(self._sizes) if size]
        segments = (CSegment * len(going))()
        alive: list[ctypes.Array[ctypes.c_int32]] = []  # the segments point into these
        start = 0
        for segment, index in zip(segments, going, strict=True):
            branches = self._branches[index]
            branches.step(parents[index])
            alive.append((ctypes.c_int32 * len(branches.parents))(*branches.parents))
            segment.cache, segment.capacity = self._cache.address(branches.row)
            segment.base, segment.start, segment.num_rows = branches.base, start, self._sizes[index]
            segment.parents, segment.num_cached_nodes = ctypes.addressof(alive[-1]), branches.num_cached
            start += self._sizes[index]
        rows = HeadRows(
            start_RD=self._head.feedback(self._outputs_of(origins)),
            is_taps=False,
            tokens=[token for nodes in tokens for token in nodes],
            positions=positions,
            segments=segments,
            logit_rows=range(start),
        )
        self._ranked = self._head.run(rows, num_top=self._width)
        self._outputs_RD = self._ranked.outputs_RD

    def _outputs_of(self, rows: Sequence[int]) -> Tensor:
        if rows == list(range(len(self._outputs_RD))):
            return self._outputs_RD
        return self._outputs_RD[torch.tensor(rows)]
