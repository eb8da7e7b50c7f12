"""Entries and drafts of a head in PyTorch: any device and dtype. The reference of :mod:`outrider.drafters.eagle_native`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.eagle_memory import HeadMemory, attend_padded
from outrider.drafters.eagle_pass import EaglePass
from outrider.drafters.eagle_reader import EntryRun
from outrider.models.layers import Rotation
from outrider.sampling.draw import argmax_tokens

__all__ = ["TorchEntries", "TorchWalk"]


class TorchEntries:
    """A :class:`outrider.drafters.eagle_reader.HeadEntries`; ``head`` is its arithmetic."""

    def __init__(self, head: EaglePass) -> None:
        self._head = head
        self._memory = HeadMemory(head.config, dtype=head.dtype, device=head.device)

    def take_row(self) -> int:
        """A place for a new sequence."""
        return self._memory.take_row()

    def give_row(self, row: int) -> None:
        """The sequence ended."""
        self._memory.give_row(row)

    def most_bytes(self, num_tokens: int, window: int, num_nodes: int) -> int:
        """Most bytes of a row with entries of ``num_tokens`` tokens, at most ``window`` of them, and a walk's nodes.

        All rows of the slab are as long as the longest, so each may be a whole window."""
        return self._memory.row_bytes(window + num_nodes)

    def num_bytes(self) -> int:
        """Bytes of the slab."""
        return self._memory.slab.numel() * self._memory.slab.element_size()

    def keep_last(self, row: int, count: int, num_kept: int) -> None:
        """Move the last ``num_kept`` of a row's ``count`` entries to its front."""
        self._memory.keep_last(row, count, num_kept)

    def extend(self, runs: Sequence[EntryRun]) -> None:
        """Make entries."""
        self._outputs(runs)

    def walk(self, runs: Sequence[EntryRun], *, levels: int, width: int) -> TorchWalk:
        """Make entries and stand behind the last of each run."""
        ends = [run.count + len(run.tokens) for run in runs]
        num_positions = max(ends) + levels * width
        self._memory.reserve(num_positions)
        outputs_BD = self._outputs(runs)
        return TorchWalk(
            head=self._head,
            memory=self._memory.rows([run.row for run in runs], num_positions),
            counts=ends,
            positions=[run.position + len(run.tokens) for run in runs],
            outputs_BD=outputs_BD,
            levels=levels,
            width=width,
        )

    def _outputs(self, runs: Sequence[EntryRun]) -> Tensor:
        """Make the entries; the outputs of each run's last one, ``[B, D]``."""
        device, sizes = self._head.device, [len(run.tokens) for run in runs]
        self._memory.reserve(max(run.count + size for run, size in zip(runs, sizes, strict=True)))
        owners = [index for index, size in enumerate(sizes) for _ in range(size)]
        slots = [slot for run, size in zip(runs, sizes, strict=True) for slot in range(run.count, run.count + size)]
        positions = [place for run, size in zip(runs, sizes, strict=True) for place in _places(run, size)]
        batch = _EntryBatch(
            memory=self._memory,
            rows=[run.row for run in runs],
            owners_R=torch.tensor(owners, device=device),
            slots_R=torch.tensor(slots, device=device),
            sizes=sizes,
            num_positions=max(run.count + size for run, size in zip(runs, sizes, strict=True)),
            num_heads=self._head.config.num_heads,
        )
        hidden_RD = self._head.fuse(torch.cat([run.taps_RD for run in runs]))
        following_R = torch.tensor([token for run in runs for token in run.tokens], device=device)
        rotation = self._head.rotation(torch.tensor(positions, device=device))
        return self._head.outputs(hidden_RD, following_R, rotation, batch.attend)


def _places(run: EntryRun, size: int) -> range:
    return range(run.position, run.position + size)


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


class TorchWalk:
    """A :class:`outrider.drafters.eagle_reader.DraftWalk`. Levels are padded: every sequence has as many nodes as the widest.

    Args:
        head: its arithmetic.
        memory: slab of the sequences, ``[L, 2, B, G, S, C]``; nodes' keys and values go behind each row's entries.
        counts: entries of each sequence.
        positions: rotary position of each sequence's first node.
        outputs_BD: the head's outputs at the last entries.
        levels, width: most steps, and nodes in each.
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
        width: int,
    ) -> None:
        device = memory.device
        self._head, self._memory = head, memory
        self._outputs_BTD = outputs_BD.unsqueeze(1)
        self._sizes = [1] * len(counts)
        self._width = width
        self._next_slots_B1 = torch.tensor(counts, device=device).unsqueeze(1)
        self._owners_B1 = torch.arange(len(counts), device=device).unsqueeze(1)
        places_S = torch.arange(memory.shape[4], device=device)
        self._seen_BTS = places_S.view(1, 1, -1) < self._next_slots_B1.unsqueeze(2)
        places = torch.tensor(positions, device=device) + torch.arange(levels, device=device).unsqueeze(1)
        self._rotations = head.rotation(places.flatten())
        self._level = 0

    def logits(self) -> Tensor:
        """Behind each row."""
        rows = [self._outputs_BTD[index, :size] for index, size in enumerate(self._sizes) if size]
        return self._head.logits(rows[0] if len(rows) == 1 else torch.cat(rows))

    def best(self) -> tuple[list[list[int]], list[list[float]]]:
        """Each row's likeliest draft ids; of a walk one node wide, of equals the lowest."""
        law_RU = self.logits().log_softmax(dim=-1)
        if self._width == 1:
            chosen_R1 = torch.tensor(argmax_tokens(law_RU), device=law_RU.device).unsqueeze(1)
            return chosen_R1.tolist(), law_RU.gather(1, chosen_R1).tolist()
        best = law_RU.topk(min(self._width, law_RU.shape[1]), dim=-1)
        return best.indices.tolist(), best.values.tolist()

    def step(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> None:
        """Read one level."""
        self._sizes = [len(nodes) for nodes in tokens]
        tokens_BT, parents_BT = (self._padded(values) for values in (tokens, parents))
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

    def _padded(self, values: Sequence[Sequence[int]]) -> Tensor:
        size = max(self._sizes)
        return torch.tensor([[*row, *[0] * (size - len(row))] for row in values], device=self._memory.device)


def _split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads of ``[.., H + 2 G, C]``."""
    groups = (qkv.shape[-2] - num_heads) // 2
    queries, keys, values = torch.split(qkv, [num_heads, groups, groups], dim=-2)
    return queries, keys, values
