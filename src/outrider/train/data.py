"""Which tokens the head can say, and in which order texts come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.train.corpus import Text
from outrider.train.packing import TextRows, TextStates, rows_of

__all__ = ["DraftVocabulary", "Schedule", "choose_vocabulary", "split_held_out", "to_draft_ids", "vocabulary_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """The target ids that the head can say, ascending, and the share of trained tokens that they cover."""

    ids: tuple[int, ...]
    coverage: float
    target_size: int

    def draft_index(self) -> Tensor:
        """Draft id of each target id, int64 ``[V]``; -1 where there is none."""
        index_V = torch.full((self.target_size,), -1, dtype=torch.int64)
        index_V[torch.tensor(self.ids)] = torch.arange(len(self.ids))
        return index_V


def choose_vocabulary(texts: Sequence[Text], *, size: int, target_size: int) -> DraftVocabulary:
    """The most frequent trained tokens; if there are fewer, the lowest other ids fill up."""
    counts = Counter(t for text in texts for t, flag in zip(text.tokens, text.trained, strict=True) if flag)
    by_count = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    unused = (token for token in range(target_size) if token not in counts)
    chosen = [*by_count, *(token for token, _ in zip(unused, range(size - len(by_count)), strict=False))]
    covered = sum(counts[token] for token in by_count)
    return DraftVocabulary(
        ids=tuple(sorted(chosen)), coverage=covered / max(counts.total(), 1), target_size=target_size
    )


def vocabulary_of(ids: Sequence[int], texts: Sequence[Text], *, target_size: int) -> DraftVocabulary:
    """A vocabulary that is given, with what it covers of these texts."""
    known = frozenset(ids)
    flags = [t in known for text in texts for t, flag in zip(text.tokens, text.trained, strict=True) if flag]
    return DraftVocabulary(ids=tuple(ids), coverage=sum(flags) / max(len(flags), 1), target_size=target_size)


def to_draft_ids(state: TextStates, draft_index_V: Tensor, *, dtype: torch.dtype) -> TextStates:
    """Laws in draft ids; what the head cannot say has probability 0 (at id 0)."""
    ids_QK = draft_index_V[state.law_ids_QK.long()]
    probs_QK = state.law_probs_QK.to(dtype).masked_fill(ids_QK < 0, 0)
    return TextStates(taps_SD=state.taps_SD, law_ids_QK=ids_QK.clamp_min(0), law_probs_QK=probs_QK)


def split_held_out(texts: Sequence[Text], num_held_out: int, *, seed: int) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts to measure on, the latter drawn evenly by a fixed shuffle."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    held = set(order[:num_held_out])
    return (
        [text for index, text in enumerate(texts) if index not in held],
        [text for index, text in enumerate(texts) if index in held],
    )


class Schedule:
    """The batches of all epochs: a fixed function of texts, seed and epoch, so that any update can be resumed.

    Args:
        texts: each with a query.
        batch_positions: loss-masked positions a batch, at least (a batch ends with the text that fills it).
        num_epochs: how often each text comes; each epoch in another order.
        max_positions: loss-masked positions after which training ends, if it does so before the last epoch.
        seed: of the orders.
    """

    def __init__(
        self, texts: Sequence[Text], *, batch_positions: int, num_epochs: int, max_positions: int | None, seed: int
    ) -> None:
        self.texts = texts
        self.rows: list[TextRows] = [rows_of(text) for text in texts]
        self._batches: list[tuple[int, list[int]]] = []
        self.num_positions = 0
        for epoch in range(num_epochs):
            noise = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(len(texts), generator=noise).tolist()
            for batch in self._cut(order, batch_positions):
                if max_positions is not None and self.num_positions >= max_positions:
                    return
                self._batches.append((epoch, batch))
                self.num_positions += sum(len(self.rows[index].queries) for index in batch)

    def __len__(self) -> int:
        return len(self._batches)

    def batch(self, update: int) -> list[Text]:
        """Texts of the update with this number, from 0."""
        return [self.texts[index] for index in self._batches[update][1]]

    def epoch(self, update: int) -> int:
        """Which epoch, from 0, an update belongs to."""
        return self._batches[min(update, len(self) - 1)][0]

    def _cut(self, order: Sequence[int], batch_positions: int) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        size = 0
        for index in order:
            batches[-1].append(index)
            size += len(self.rows[index].queries)
            if size >= batch_positions:
                batches.append([])
                size = 0
        return [batch for batch in batches if batch]
