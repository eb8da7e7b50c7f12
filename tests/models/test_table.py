"""The table model is a target like any other: what it looks up, and how its cache forgets."""

from __future__ import annotations

import torch

from outrider.models.base import ForwardResult, PackedRows
from outrider.models.table import TableCache, TableModel

V = 5
LOGITS_1 = torch.arange(V * V).view(V, V)
LOGITS_2 = torch.arange(V**3).view(V, V, V)


def run(
    model: TableModel,
    cache: TableCache,
    tokens: list[list[int]],
    slots: list[int],
    parents: list[tuple[int, ...] | None] | None = None,
    logit_rows: tuple[int, ...] | None = None,
) -> ForwardResult:
    packed = PackedRows.pack(
        tokens,
        slots=slots,
        starts=[cache.length(slot) for slot in slots],
        parents=parents,
        device=torch.device("cpu"),
        logit_rows=logit_rows,
    )
    return model.forward(packed, cache, taps=(0,))


def test_logits_by_the_last_token() -> None:
    model = TableModel(LOGITS_1)
    cache = model.new_cache()
    result = run(model, cache, [[3, 1]], [cache.allocate(2)])
    assert result.logits_RV.dtype == torch.float32
    assert result.logits_RV.tolist() == LOGITS_1[[3, 1]].tolist()
    assert result.taps[0].tolist() == [[3], [1]]


def test_logits_by_the_last_two_tokens_ragged() -> None:
    model = TableModel(LOGITS_2)
    cache = model.new_cache()
    first, second = cache.allocate(4), cache.allocate(4)
    run(model, cache, [[4], [2, 3]], [first, second])
    got = run(model, cache, [[1, 2], [0]], [second, first]).logits_RV
    assert got.tolist() == [LOGITS_2[3, 1].tolist(), LOGITS_2[1, 2].tolist(), LOGITS_2[4, 0].tolist()]


def test_a_tree_row_looks_at_its_parent() -> None:
    model = TableModel(LOGITS_2)
    cache = model.new_cache()
    slot = cache.allocate(4)
    run(model, cache, [[4]], [slot])
    got = run(model, cache, [[1, 2, 3, 0]], [slot], parents=[(-1, 0, 0, 2)], logit_rows=(0, 2, 3)).logits_RV
    assert got.tolist() == [LOGITS_2[4, 1].tolist(), LOGITS_2[1, 3].tolist(), LOGITS_2[3, 0].tolist()]
    cache.keep(slot, base=1, path=(0, 2))
    assert cache.tokens(slot) == [4, 1, 3]
    assert run(model, cache, [[2]], [slot]).logits_RV.tolist() == [LOGITS_2[3, 2].tolist()]


def test_slots_prefixes_and_truncation() -> None:
    model = TableModel(LOGITS_1)
    cache = model.new_cache()
    slots = [cache.allocate(1) for _ in range(3)]
    assert slots == [0, 1, 2]
    run(model, cache, [[1, 2, 3]], [0])
    cache.copy_prefix(0, 1, 2)
    assert cache.tokens(1) == [1, 2]
    cache.keep(0, base=1, path=())
    assert cache.length(0) == 1 and cache.length(1) == 2
    cache.free(0)
    assert cache.allocate(1) == 0 and cache.length(0) == 0


def test_spec_and_bytes() -> None:
    model = TableModel(LOGITS_1, eos_token_ids=(4,), max_positions=77)
    assert (model.spec.vocab_size, model.spec.eos_token_ids, model.spec.max_positions) == (5, (4,), 77)
    assert model.num_weight_bytes() == 4 * V * V
