"""A draft model's memory of many growing texts.

The reader keeps one cache slot a sequence and knows which of its cached tokens are committed. Drafts that the draft model
read stay in the cache until the verdict is known: those that were kept need not be read again, the others are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from outrider.cache.base import MeteredCache
from outrider.models.base import PackedRows, Target

__all__ = ["DraftReader", "DraftTree"]

PREFILL_CHUNK = 512
"""Most rows of one sequence in a pass."""
JOINT_ROWS = 32
"""A sequence with more unread tokens than this reads all but the last by itself first."""


@dataclass(slots=True)
class DraftTree:
    """A tree of draft tokens: parents before children, -1 for a child of the last committed token."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Text:
    """What the cache holds of one sequence: ``agreed`` committed tokens, then the drafts of the last proposal."""

    slot: int
    agreed: int = 0
    drafts: list[int] = field(default_factory=list)


class DraftReader:
    """Feeds committed and draft tokens of many sequences to one model.

    Args:
        model: the draft model.
        vocab_size: of the target. Ids past it are left out of all logits; ids past the model's own are read as 0.
    """

    def __init__(self, model: Target, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = min(vocab_size, model.spec.vocab_size)
        self._knows_all = self.vocab_size == vocab_size
        self._cache = model.new_cache()
        self._texts: dict[int, _Text] = {}

    def deepest(self, num_tokens: int) -> int:
        """Most draft tokens behind a text of ``num_tokens`` tokens: the last of them is never read."""
        return max(0, self.model.spec.max_positions - num_tokens + 1) if num_tokens else 0

    def backlog(self, sequence: int, num_tokens: int) -> int:
        """Tokens of a text of ``num_tokens`` that are unread."""
        text = self._texts.get(sequence)
        return num_tokens - (0 if text is None else text.agreed)

    def settle(self, sequence: int, tokens: Sequence[int]) -> None:
        """``tokens`` are committed now: cut the cache to what it shares with them."""
        text = self._texts.get(sequence)
        if text is None:
            return
        for draft, token in zip(text.drafts, tokens[text.agreed :], strict=False):
            if draft != token:
                break
            text.agreed += 1
        text.drafts.clear()
        self._cut(text)

    def catch_up(self, texts: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Read what is unread of ``(sequence, tokens)``.

        Returns:
            Logits behind the last token of each, ``[B, V]``.
        """
        followed = [self._open(sequence, tokens) for sequence, tokens in texts]
        for text, (_, tokens) in zip(followed, texts, strict=True):
            if len(tokens) - text.agreed > JOINT_ROWS:
                self._prefill(text, tokens)
        unread = [list(tokens[text.agreed :]) for text, (_, tokens) in zip(followed, texts, strict=True)]
        logits_BV = self._read(followed, unread)
        for text, (_, tokens) in zip(followed, texts, strict=True):
            text.agreed = len(tokens)
        return logits_BV

    def read_drafts(self, sequences: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """Read one more draft token of each sequence, ``[B, V]`` logits behind them."""
        texts = [self._texts[sequence] for sequence in sequences]
        logits_BV = self._read(texts, [[draft] for draft in drafts])
        for text, draft in zip(texts, drafts, strict=True):
            text.drafts.append(draft)
        return logits_BV

    def read_run(self, sequence: int, drafts: Sequence[int]) -> Tensor:
        """Read several draft tokens of one sequence in one pass, ``[len(drafts), V]`` logits behind each."""
        text = self._texts[sequence]
        logits_KV = self._read([text], [list(drafts)], logit_rows=tuple(range(len(drafts))))
        text.drafts.extend(drafts)
        return logits_KV

    def read_trees(
        self, sequences: Sequence[int], roots: Sequence[int], trees: Sequence[DraftTree], leaves: Sequence[int]
    ) -> Tensor:
        """Read whole trees behind the committed text, and forget them again.

        A pass only knows how its own rows are related, so the last committed token is read again with each tree.

        Args:
            sequences: one a tree; each must have been caught up with.
            roots: the last committed token of each.
            trees: at least one node each.
            leaves: how many of each tree's last nodes logits are wanted of.

        Returns:
            Logits behind those nodes, tree by tree, ``[R, V]``.
        """
        texts = [self._texts[sequence] for sequence in sequences]
        for text in texts:
            text.agreed -= 1
            self._cut(text)
        rows = [[root, *tree.tokens] for root, tree in zip(roots, trees, strict=True)]
        parents = [(-1, *(parent + 1 for parent in tree.parents)) for tree in trees]
        ends = accumulate(len(tokens) for tokens in rows)
        wanted = tuple(row for end, count in zip(ends, leaves, strict=True) for row in range(end - count, end))
        logits_RV = self._read(texts, rows, parents=parents, logit_rows=wanted)
        for text in texts:
            text.agreed += 1
            self._cut(text)
        return logits_RV

    def memory_bytes(self, num_tokens: int, num_drafts: int) -> int:
        """Most bytes of a text of ``num_tokens`` tokens with ``num_drafts`` draft tokens behind it.

        Slots grow by doubling, so a text may have twice the room that it needs.
        """
        if not isinstance(self._cache, MeteredCache):
            return 0
        return self._cache.bytes_for(2 * (min(num_tokens, self.model.spec.max_positions) + num_drafts))

    def num_bytes(self) -> int:
        """Bytes held by all texts."""
        return self._cache.num_bytes() if isinstance(self._cache, MeteredCache) else 0

    def finish(self, sequence: int) -> None:
        """Free the sequence's slot."""
        text = self._texts.pop(sequence, None)
        if text is not None:
            self._cache.free(text.slot)

    def _open(self, sequence: int, tokens: Sequence[int]) -> _Text:
        """The sequence's record, with at least the last token unread."""
        if sequence not in self._texts:
            self._texts[sequence] = _Text(self._cache.allocate(len(tokens)))
        self.settle(sequence, tokens)
        text = self._texts[sequence]
        text.agreed = min(text.agreed, len(tokens) - 1)
        self._cut(text)
        return text

    def _cut(self, text: _Text) -> None:
        if self._cache.length(text.slot) > text.agreed:
            self._cache.keep(text.slot, base=text.agreed, path=())

    def _prefill(self, text: _Text, tokens: Sequence[int]) -> None:
        for start in range(text.agreed, len(tokens) - 1, PREFILL_CHUNK):
            chunk = list(tokens[start : min(start + PREFILL_CHUNK, len(tokens) - 1)])
            self._read([text], [chunk], logit_rows=())
        text.agreed = len(tokens) - 1

    def _read(
        self,
        texts: Sequence[_Text],
        rows: Sequence[Sequence[int]],
        *,
        parents: Sequence[tuple[int, ...]] | None = None,
        logit_rows: tuple[int, ...] | None = None,
    ) -> Tensor:
        if logit_rows is None:  # the last row of each sequence
            logit_rows = tuple(end - 1 for end in accumulate(len(tokens) for tokens in rows))
        if not self._knows_all:
            rows = [[token if token < self.vocab_size else 0 for token in tokens] for tokens in rows]
        packed = PackedRows.pack(
            rows,
            slots=[text.slot for text in texts],
            starts=[self._cache.length(text.slot) for text in texts],
            parents=parents,
            device=self.model.spec.device,
            logit_rows=logit_rows,
        )
        return self.model.forward(packed, self._cache).logits_RV[:, : self.vocab_size]
