"""From texts to one batch of packed rows: which indexes carry keys, which carry queries, and what each step is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.train.corpus import Text

__all__ = ["TextRows", "TextStates", "TrainBatch", "pack_batch", "rows_of"]

ROW_PAD, QUERY_PAD = 128, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows:
    """Where a text has keys and queries (see :mod:`outrider.train.unroll`).

    Attributes:
        num_keys: indexes 0 .. num_keys - 1 have features and keys.
        queries: indexes where a draft can begin, ascending. The law that step 0 is held to lies one position further.
        num_steps: for each query how many unroll steps stay within its answer, 1 or more.
    """

    num_keys: int
    queries: tuple[int, ...]
    num_steps: tuple[int, ...]


def rows_of(text: Text) -> TextRows:
    """Queries stand before a trained token that is followed by another trained token."""
    run = 0
    left: dict[int, int] = {}
    for index in range(len(text.tokens) - 1, 0, -1):
        run = run + 1 if text.trained[index] else 0
        if run > 1:
            left[index - 1] = run - 1
    queries = tuple(sorted(left))
    num_keys = queries[-1] + 1 if queries else 0
    return TextRows(num_keys=num_keys, queries=queries, num_steps=tuple(left[query] for query in queries))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStates:
    """What the target said of a text.

    Attributes:
        taps_SD: taps of its key indexes, concatenated, ``[num_keys, A * D]``.
        law_ids_QK, law_probs_QK: the K likeliest tokens one position behind each query, and their probabilities.
    """

    taps_SD: Tensor
    law_ids_QK: Tensor
    law_probs_QK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Packed texts, ready for the head.

    Rows and queries are padded to few different counts, for the reason that :class:`outrider.train.attention.AttentionPlan`
    gives; padding belongs to no text, is read by no query and has no loss.

    Attributes:
        ids: of the texts.
        taps_RD: taps of all key indexes, concatenated, ``[R, A * D]``.
        next_tokens_R: the token behind each index. positions_R: its position in its text.
        query_rows_Q: packed row of each query. text_of_Q: which text it belongs to, -1 for padding.
        read_tokens_NQ: token read at step n. is_live_NQ: whether step n predicts a trained token of the same answer.
        law_ids_QK, law_probs_QK: the law that step 0 of each query is held to, sparse (:mod:`outrider.train.losses`).
        plan_texts, all_texts: for each text its number of keys and its query indexes (all of them).
    """

    ids: tuple[str, ...]
    taps_RD: Tensor
    next_tokens_R: Tensor
    positions_R: Tensor
    query_rows_Q: Tensor
    text_of_Q: Tensor
    read_tokens_NQ: Tensor
    is_live_NQ: Tensor
    law_ids_QK: Tensor
    law_probs_QK: Tensor
    plan_texts: tuple[tuple[int, Sequence[int]], ...]

    @property
    def all_texts(self) -> tuple[tuple[int, Sequence[int]], ...]:
        """As ``plan_texts``, with a query at every index."""
        return tuple((num_keys, range(num_keys)) for num_keys, _ in self.plan_texts)

    @property
    def num_queries(self) -> int:
        """Loss-masked positions."""
        return sum(len(queries) for _, queries in self.plan_texts)

    @property
    def num_keys(self) -> int:
        """Positions processed."""
        return sum(num_keys for num_keys, _ in self.plan_texts)


def pack_batch(texts: Sequence[Text], states: Sequence[TextStates], *, num_steps: int) -> TrainBatch:
    """Pack texts with what the target said of them.

    Args:
        texts: each with at least one query.
        states: what the target said of each.
        num_steps: unroll steps.
    """
    rows = [rows_of(text) for text in texts]
    starts = [sum(row.num_keys for row in rows[:index]) for index in range(len(rows))]
    pairs = list(zip(texts, rows, strict=True))
    read = [
        [text.tokens[min(query + 1 + step, len(text.tokens) - 1)] for text, row in pairs for query in row.queries]
        for step in range(num_steps)
    ]
    left = torch.tensor([count for row in rows for count in row.num_steps])
    owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row.queries) for row in rows]))
    num_keys = sum(row.num_keys for row in rows)
    more_queries = -len(owners) % QUERY_PAD
    more_rows = more_queries + -(num_keys + more_queries) % ROW_PAD
    at = [start + query for start, row in zip(starts, rows, strict=True) for query in row.queries]
    return TrainBatch(
        ids=tuple(text.id for text in texts),
        taps_RD=F.pad(torch.cat([state.taps_SD for state in states]), (0, 0, 0, more_rows)),
        next_tokens_R=F.pad(
            torch.tensor([t for text, row in pairs for t in text.tokens[1 : row.num_keys + 1]]), (0, more_rows)
        ),
        positions_R=F.pad(torch.cat([torch.arange(row.num_keys) for row in rows]), (0, more_rows)),
        # Queries of the padding stand at rows of their own behind all texts: no row is taken twice.
        query_rows_Q=torch.tensor(at + list(range(num_keys, num_keys + more_queries))),
        text_of_Q=F.pad(owners, (0, more_queries), value=-1),
        read_tokens_NQ=F.pad(torch.tensor(read, dtype=torch.int64), (0, more_queries)),
        is_live_NQ=F.pad(left > torch.arange(num_steps).unsqueeze(1), (0, more_queries)),
        law_ids_QK=torch.cat([state.law_ids_QK for state in states]),
        law_probs_QK=torch.cat([state.law_probs_QK for state in states]),
        plan_texts=tuple((row.num_keys, row.queries) for row in rows),
    )
