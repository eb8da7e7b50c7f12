"""A target whose law is a table: the whole engine can be tested against a distribution that is known exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.cache.base import Cache
from outrider.models.base import ForwardResult, GreedyResult, PackedRows, Segment, TargetSpec
from outrider.sampling.draw import argmax_B

__all__ = ["TableCache", "TableModel"]


class TableCache:
    """Remembers token ids instead of keys and values."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self._rooms: dict[int, int] = {}

    def allocate(self, num_tokens: int) -> int:
        """A new, empty slot."""
        slot = next(slot for slot in range(len(self._tokens) + 1) if slot not in self._tokens)
        self._tokens[slot] = []
        self._rooms[slot] = num_tokens
        return slot

    def free(self, slot: int) -> None:
        """Give the slot back."""
        del self._tokens[slot], self._rooms[slot]

    def length(self, slot: int) -> int:
        """Cached tokens of the slot."""
        return len(self._tokens[slot])

    def keep(self, slot: int, *, base: int, path: Sequence[int]) -> None:
        """Keep ``base`` tokens and those rows behind them that are in ``path``."""
        tokens = self._tokens[slot]
        assert 0 <= base <= len(tokens) and (not path or base + path[-1] < len(tokens))
        self._tokens[slot] = tokens[:base] + [tokens[base + row] for row in path]

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Make the empty ``target`` hold the first tokens of ``source``."""
        assert not self._tokens[target] and num_tokens <= len(self._tokens[source])
        self._tokens[target] = self._tokens[source][:num_tokens]

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a slot with room for ``num_tokens`` takes: eight a token."""
        return 8 * num_tokens

    def ensure(self, slot: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` in all."""
        self._rooms[slot] = max(self._rooms[slot], num_tokens)

    def num_bytes(self) -> int:
        """Bytes held by all slots: what was asked for, or what is there if that is more."""
        return sum(8 * max(self._rooms[slot], len(tokens)) for slot, tokens in self._tokens.items())

    def tokens(self, slot: int) -> list[int]:
        """The cached token ids themselves (the list is live)."""
        return self._tokens[slot]


class TableModel:
    """A :class:`outrider.models.base.Target` that looks its logits up by the last token, or the last two.

    Args:
        logits: float ``[V, V]`` (by the last token) or ``[V, V, V]`` (by the last but one and the last; before a first
            token, id 0 is assumed).
        eos_token_ids: ids that end a sequence.
        max_positions: the window.
    """

    def __init__(self, logits: Tensor, *, eos_token_ids: tuple[int, ...] = (), max_positions: int = 4096) -> None:
        assert logits.dim() in (2, 3) and len(set(logits.shape)) == 1, logits.shape
        self._logits = logits.to(torch.float32)
        self.spec = TargetSpec(
            name="table",
            vocab_size=logits.shape[-1],
            hidden_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_width=1,
            max_positions=max_positions,
            eos_token_ids=eos_token_ids,
            precision="float32",
            device=logits.device,
            fingerprint="table",
            path="table",
        )
        self.tokenizer = None

    def new_cache(self) -> TableCache:
        """An empty cache of token ids."""
        return TableCache()

    def num_weight_bytes(self) -> int:
        """Bytes of the table."""
        return self._logits.numel() * self._logits.element_size()

    def forward(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> ForwardResult:
        """Look up every row's law. A tap is the row's own token id, ``[R, 1]``."""
        assert isinstance(cache, TableCache)
        tokens = rows.tokens_R.tolist()
        before = [token for s in rows.segments for token in _tokens_before(s, tokens, cache.tokens(s.slot))]
        for segment in rows.segments:
            cache.tokens(segment.slot).extend(tokens[segment.start : segment.start + segment.num_rows])
        wanted = range(len(tokens)) if rows.logit_rows is None else rows.logit_rows
        last = torch.tensor([tokens[row] for row in wanted], dtype=torch.int64)
        first = torch.tensor([before[row] for row in wanted], dtype=torch.int64)
        logits = self._logits[last] if self._logits.dim() == 2 else self._logits[first, last]
        return ForwardResult(logits_RV=logits, taps={tap: rows.tokens_R.float().unsqueeze(1) for tap in taps})

    def forward_greedy(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> GreedyResult:
        """Look up every row's likeliest token."""
        result = self.forward(rows, cache, taps=taps)
        return GreedyResult(tokens_R=argmax_B(result.logits_RV), taps=result.taps)


def _tokens_before(segment: Segment, tokens: Sequence[int], cached: Sequence[int]) -> list[int]:
    """The token before each row's own: its parent row's, the last cached one for row 0."""
    own = tokens[segment.start : segment.start + segment.num_rows]
    parents = segment.parents or tuple(range(-1, segment.num_rows - 1))
    root = cached[-1] if cached else 0
    return [root if parent < 0 else own[parent] for parent in parents]
