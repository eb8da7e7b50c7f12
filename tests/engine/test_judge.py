"""The pass without logits: same tokens, chosen only where nobody reads logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outrider import Engine, EngineConfig, SamplingParams
from outrider.drafters.ngram import NGramDrafter
from outrider.models.base import ForwardResult, GreedyResult, PackedRows
from outrider.models.table import TableModel


class Counting:
    """A table that counts which kind of pass it was asked for."""

    def __init__(self) -> None:
        self._table = TableModel(torch.randn(16, 16, 16, generator=torch.Generator().manual_seed(3)))
        self.spec, self.tokenizer = self._table.spec, None
        self.with_logits = self.without = 0

    def new_cache(self) -> Any:
        return self._table.new_cache()

    def num_weight_bytes(self) -> int:
        return 1

    def forward(self, rows: PackedRows, cache: Any, *, taps: Sequence[int] = ()) -> ForwardResult:
        self.with_logits += 1
        return self._table.forward(rows, cache, taps=taps)

    def forward_greedy(self, rows: PackedRows, cache: Any, *, taps: Sequence[int] = ()) -> GreedyResult:
        self.without += 1
        return self._table.forward_greedy(rows, cache, taps=taps)


def run(params: Sequence[SamplingParams]) -> tuple[Counting, list[tuple[int, ...]]]:
    target = Counting()
    config = EngineConfig(num_draft_tokens=3, schedule="fixed")
    engine = Engine(target, drafter=NGramDrafter(max_match=4, min_match=1), config=config)
    return target, [result.token_ids for result in engine.generate([[1, 2, 3]] * len(params), params)]


GREEDY = SamplingParams(max_tokens=40)
READERS = {
    "logprobs": SamplingParams(max_tokens=40, logprobs=2),
    "drawn": SamplingParams(max_tokens=40, temperature=1.0, seed=1),
    "penalty": SamplingParams(max_tokens=40, presence_penalty=0.5),
    "bias": SamplingParams(max_tokens=40, logit_bias={3: 1.0}),
}


def test_greedy_sequences_write_no_logits() -> None:
    target, _ = run([GREEDY, GREEDY])
    assert target.without > 0 and target.with_logits == 0


@pytest.mark.parametrize("reader", READERS)
def test_one_reader_of_logits_gets_them_and_changes_nobody(reader: str) -> None:
    alone = run([GREEDY])[1][0]
    target, outputs = run([GREEDY, READERS[reader]])
    assert target.with_logits > 0
    assert outputs[0] == alone
