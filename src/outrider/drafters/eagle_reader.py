"""A head's memory of many growing texts: taps come in, entries are made of them, drafts grow behind.

An *entry* is a feature beside the token that follows it (:mod:`outrider.drafters.eagle_head` has the table). Taps wait
until a draft is asked for; then their entries are made in one pass over all sequences, and the output of each sequence's
last entry opens its draft. A sequence whose taps waited too long, or whose first positions were never read here (their
cache was taken over from an earlier request), drafts from the positions that it has, at their true places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.drafters.eagle_memory import HeadMemory, attend_padded
from outrider.drafters.eagle_pass import EaglePass
from outrider.models.layers import Rotation

__all__ = ["DraftWalk", "EagleReader"]

JOINT_ROWS = 64
"""A sequence with more waiting taps than this makes all entries but its last by itself first."""
CHUNK = 512
"""Most entries of one sequence in a pass."""


@dataclass(slots=True)
class _Text:
    """Entries ``first .. first + count`` are made; taps of the positions up to ``end`` wait."""

    row: int
    first: int = 0
    count: int = 0
    end: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    num_waiting: int = 0
    last_tap: Tensor | None = None

    def take_waiting(self, most: int) -> Tensor:
        """The last ``most`` waiting taps; if none wait, the last entry's again, which is made anew."""
        if not self.waiting:
            assert self.last_tap is not None, "no taps came for this sequence"
            self.count -= 1
            return self.last_tap
        taps_RD = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
        taps_RD = taps_RD[-most:]
        self.waiting, self.num_waiting, self.last_tap = [], 0, taps_RD[-1:].clone()
        return taps_RD


class EagleReader:
    """Entries of many sequences.

    Args:
        head: its arithmetic.
        window: most entries that are looked back at. When a row is full, its older half is forgotten.
    """

    def __init__(self, head: EaglePass, window: int) -> None:
        assert window >= 2
        self._head = head
        self._window = window
        self._memory = HeadMemory(head.config, dtype=head.dtype, device=head.device)
        self._texts: dict[int, _Text] = {}

    def open(self, sequence: int) -> None:
        """A sequence begins."""
        assert sequence not in self._texts, sequence
        self._texts[sequence] = _Text(self._memory.take_row())

    def finish(self, sequence: int) -> None:
        """It ended."""
        self._memory.give_row(self._texts.pop(sequence).row)

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        """Taps of the committed tokens at positions ``start`` and on; older ones than the window are dropped."""
        text = self._texts[sequence]
        assert start >= text.end, (start, text.end)
        if start > text.end:
            text.waiting, text.num_waiting = [], 0
        text.waiting.append(taps_RD)
        text.num_waiting += len(taps_RD)
        text.end = start + len(taps_RD)
        while text.num_waiting - len(text.waiting[0]) >= self._window:
            text.num_waiting -= len(text.waiting.pop(0))

    def catch_up(self, texts: Sequence[tuple[int, Sequence[int]]], *, levels: int, width: int) -> DraftWalk:
        """Make the entries that wait of ``(sequence, committed tokens)``, and stand behind the last.

        Args:
            texts: sequences that taps came for, all of their tokens but the last.
            levels, width: how far and how broadly the walk may step.
        """
        followed = [self._texts[sequence] for sequence, _ in texts]
        taken = []
        for text, (_, tokens) in zip(followed, texts, strict=True):
            assert text.end == len(tokens) - 1, (text.end, len(tokens))
            taps_RD = text.take_waiting(self._window)
            self._make_room(text, len(taps_RD))
            taken.append(taps_RD)
        ends = [text.count + len(taps_RD) for text, taps_RD in zip(followed, taken, strict=True)]
        self._memory.reserve(max(ends) + levels * width)
        for index, (text, (_, tokens)) in enumerate(zip(followed, texts, strict=True)):
            if len(taken[index]) > JOINT_ROWS:
                for chunk_RD in torch.split(taken[index][:-1], CHUNK):
                    self._extend([text], [chunk_RD], [tokens])
                taken[index] = taken[index][-1:]
        outputs_BD = self._extend(followed, taken, [tokens for _, tokens in texts])
        num_positions = max(ends) + levels * width
        return DraftWalk(
            head=self._head,
            memory=self._memory.rows([text.row for text in followed], num_positions),
            counts=[text.count for text in followed],
            positions=[text.end for text in followed],
            outputs_BD=outputs_BD,
            levels=levels,
        )

    def _make_room(self, text: _Text, num_new: int) -> None:
        start = text.end - num_new
        if start != text.first + text.count:  # positions in between are not known
            text.first, text.count = start, 0
        elif text.count + num_new > self._window:
            num_kept = max(0, min(self._window // 2, self._window - num_new))
            self._memory.keep_last(text.row, text.count, num_kept)
            text.first, text.count = start - num_kept, num_kept

    def _extend(self, texts: Sequence[_Text], taps: Sequence[Tensor], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Make ``taps[i]``'s entries behind those that text i has; the outputs of each text's last one, ``[B, D]``."""
        device, sizes = self._head.device, [len(taps_RD) for taps_RD in taps]
        owners: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        following: list[int] = []
        for index, (text, size) in enumerate(zip(texts, sizes, strict=True)):
            start = text.first + text.count
            owners += [index] * size
            slots += range(text.count, text.count + size)
            positions += range(start, start + size)
            following += tokens[index][start + 1 : start + 1 + size]
            text.count += size
        batch = _EntryBatch(
            memory=self._memory,
            rows=[text.row for text in texts],
            owners_R=torch.tensor(owners, device=device),
            slots_R=torch.tensor(slots, device=device),
            sizes=sizes,
            num_positions=max(text.count for text in texts),
            num_heads=self._head.config.num_heads,
        )
        hidden_RD = self._head.fuse(taps[0] if len(taps) == 1 else torch.cat(list(taps)))
        rotation = self._head.rotation(torch.tensor(positions, device=device))
        return self._head.outputs(hidden_RD, torch.tensor(following, device=device), rotation, batch.attend)


class _EntryBatch:
    """Attention while entries are made: ragged rows, each seeing the entries up to itself.

    Of the last layer only each sequence's last row is wanted; the others' keys and values are all that matters.
    """

    def __init__(
        self,
        *,
        memory: HeadMemory,
        rows: Sequence[int],
        owners_R: Tensor,
        slots_R: Tensor,
        sizes: Sequence[int],
        num_positions: int,
        num_heads: int,
    ) -> None:
        self._memory = memory
        self._rows = list(rows)
        self._owners_R, self._slots_R = owners_R, slots_R
        self._sizes, self._num_heads = torch.tensor(sizes, device=owners_R.device), num_heads
        self._num_positions = num_positions

    def attend(self, layer: int, qkv_RNC: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :data:`outrider.drafters.eagle_pass.AttendRows`."""
        queries, keys, values = _split_heads(qkv_RNC, self._num_heads)
        slab = self._memory.slab[layer]
        rows_R = torch.tensor(self._rows, device=slab.device)[self._owners_R]
        slab[0][rows_R, :, self._slots_R] = keys
        slab[1][rows_R, :, self._slots_R] = values
        past_keys, past_values = self._memory.rows(self._rows, self._num_positions)[layer].unbind()
        places_S = torch.arange(self._num_positions, device=slab.device)
        lasts_B = self._sizes.cumsum(0) - 1
        if layer == self._memory.slab.shape[0] - 1:
            seen_B1S = places_S <= self._slots_R[lasts_B].view(-1, 1, 1)
            return attend_padded(queries[lasts_B].unsqueeze(1), past_keys, past_values, seen_B1S)[:, 0], lasts_B
        ranks_R = torch.arange(len(queries), device=slab.device) - (lasts_B + 1 - self._sizes)[self._owners_R]
        shape = (len(self._rows), int(self._sizes.max()))
        padded = queries.new_zeros((*shape, *queries.shape[1:]))
        padded[self._owners_R, ranks_R] = queries
        slots_BT = self._slots_R.new_zeros(shape)
        slots_BT[self._owners_R, ranks_R] = self._slots_R
        found_BTD = attend_padded(padded, past_keys, past_values, places_S <= slots_BT.unsqueeze(-1))
        return found_BTD[self._owners_R, ranks_R], None


class DraftWalk:
    """Drafts of a batch, level by level, each node seeing the sequence's entries, its ancestors and itself.

    Made by :meth:`EagleReader.catch_up`, used until the next one.

    Args:
        head: its arithmetic.
        memory: slab of the sequences, ``[L, 2, B, G, S, C]``; nodes' keys and values go behind each row's entries.
        counts: entries of each sequence.
        positions: rotary position of each sequence's first node.
        outputs_BD: the head's outputs at the last entries.
        levels: most steps.
    """

    def __init__(
        self,
        *,
        head: EaglePass,
        memory: Tensor,
        counts: Sequence[int],
        positions: Sequence[int],
        outputs_BD: Tensor,
        levels: int,
    ) -> None:
        device = memory.device
        self._head, self._memory = head, memory
        self._outputs_BTD = outputs_BD.unsqueeze(1)
        self._next_slots_B1 = torch.tensor(counts, device=device).unsqueeze(1)
        self._owners_B1 = torch.arange(len(counts), device=device).unsqueeze(1)
        places_S = torch.arange(memory.shape[4], device=device)
        self._seen_BTS = places_S.view(1, 1, -1) < self._next_slots_B1.unsqueeze(2)
        places = torch.tensor(positions, device=device) + torch.arange(levels, device=device).unsqueeze(1)
        self._rotations = head.rotation(places.flatten())
        self._level = 0

    def logits(self) -> Tensor:
        """Behind the nodes of the last step (at first: behind the committed text), ``[B, T, U]``."""
        batch, size, width = self._outputs_BTD.shape
        return self._head.logits(self._outputs_BTD.reshape(-1, width)).view(batch, size, -1)

    def step(self, tokens_BT: Tensor, parents_BT: Tensor) -> None:
        """Read one level.

        Args:
            tokens_BT: target ids of its nodes.
            parents_BT: index of each node's parent among the nodes of the step before (0 at first: the committed text).
        """
        hidden_BTD = self._head.feedback(self._outputs_BTD)
        batch, size = tokens_BT.shape
        width, num_places = hidden_BTD.shape[2], self._seen_BTS.shape[2]
        hidden_BTD = hidden_BTD.gather(1, parents_BT.unsqueeze(2).expand(-1, -1, width))
        slots_BT = self._next_slots_B1 + torch.arange(size, device=tokens_BT.device)
        seen_BTS = self._seen_BTS.gather(1, parents_BT.unsqueeze(2).expand(-1, -1, num_places))
        self._seen_BTS = seen_BTS.scatter_(2, slots_BT.unsqueeze(2), True)
        self._next_slots_B1 = self._next_slots_B1 + size
        here = slice(self._level * batch, (self._level + 1) * batch)
        rotation = Rotation(
            cos_RNC=self._rotations.cos_RNC[here].repeat_interleave(size, 0),
            sin_RNC=self._rotations.sin_RNC[here].repeat_interleave(size, 0),
        )
        self._level += 1

        def attend(layer: int, qkv_RNC: Tensor) -> tuple[Tensor, None]:
            heads = _split_heads(qkv_RNC.view(batch, size, *qkv_RNC.shape[1:]), self._head.config.num_heads)
            queries, keys, values = heads
            past = self._memory[layer]
            past[0][self._owners_B1, :, slots_BT] = keys
            past[1][self._owners_B1, :, slots_BT] = values
            return attend_padded(queries, past[0], past[1], self._seen_BTS).flatten(0, 1), None

        outputs_RD = self._head.outputs(hidden_BTD.reshape(-1, width), tokens_BT.reshape(-1), rotation, attend)
        self._outputs_BTD = outputs_RD.view(batch, size, width)


def _split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads of ``[.., H + 2 G, C]``."""
    groups = (qkv.shape[-2] - num_heads) // 2
    queries, keys, values = torch.split(qkv, [num_heads, groups, groups], dim=-2)
    return queries, keys, values
