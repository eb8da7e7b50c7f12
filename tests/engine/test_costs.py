"""Cost tables: measured, kept, read back, and corrected by what is observed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.device import Placement
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.lm import LMDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.engine import measure_costs
from outrider.engine.costs import CONTEXT, CostTable, DraftCosts, LiveCosts, RowCosts
from tests.drafters.heads import CPU, tiny_head, tiny_target

STEEP = RowCosts(rows=(1, 9), ms=(10.0, 50.0))
TABLE = CostTable(
    passes=RowCosts(rows=(1, 4, 16), ms=(10.0, 11.0, 20.0)),
    sequence_ms=0.1,
    attended_ms=0.001,
    drafts={"head": DraftCosts(fixed=0.1, level=0.4, sequence=0.05, node=0.02, row=0.01)},
)


@pytest.mark.parametrize(("rows", "ms"), [(1, 10.0), (5, 30.0), (9, 50.0), (17, 90.0)])
def test_costs_are_linear_between_and_beyond(rows: int, ms: float) -> None:
    assert STEEP(rows) == pytest.approx(ms)


@pytest.mark.parametrize("rows", [(), (1,), (2, 5), (1, 4, 8, 16)])
@pytest.mark.parametrize("size", [0, 1, 3, 8, 40])
def test_a_curve_is_the_costs_of_all_row_counts(rows: tuple[int, ...], size: int) -> None:
    costs = RowCosts(rows=rows, ms=tuple(3.0 + count**1.5 for count in rows))
    assert costs.curve(size) == pytest.approx([costs(max(1, count)) for count in range(size + 1)])


def test_more_rows_are_never_cheaper() -> None:
    assert RowCosts.monotone({4: 9.0, 1: 10.0, 8: 12.0}) == RowCosts(rows=(1, 4, 8), ms=(10.0, 10.0, 12.0))


def test_timings_that_others_made_longer_are_bounded_by_those_of_more_rows() -> None:
    found = RowCosts.fastest({1: 21.7, 2: 63.4, 4: 25.0, 8: 24.0, 16: 30.0})
    assert found == RowCosts(rows=(1, 2, 4, 8, 16), ms=(21.7, 24.0, 24.0, 24.0, 30.0))


def test_a_table_survives_json() -> None:
    assert CostTable.from_json(TABLE.to_json()) == TABLE


def test_longer_contexts_and_more_sequences_cost_more() -> None:
    live = LiveCosts(TABLE, ["head"])
    assert live.passes(10)[10] == pytest.approx(TABLE.passes(10))
    assert live.around_ms(1, CONTEXT) == 0 == live.row_ms(10)
    assert live.around_ms(3, CONTEXT + 1000) == pytest.approx(0.2 + 3.0)
    assert live.row_ms(CONTEXT + 1000) == pytest.approx(1.0)


def observe(live: LiveCosts, rows: int, factor: float, times: int) -> None:
    for _ in range(times):
        live.learn_pass(num_sequences=1, rows=rows, context=10, verify_ms=factor * TABLE.passes(rows), other_ms=0.5)


def test_a_slower_machine_is_noticed_everywhere() -> None:
    live = LiveCosts(TABLE, ["head"])
    for _ in range(40):
        for rows in (1, 5, 16):
            observe(live, rows, 1.5, 1)
    observe(live, 1, 1.5, 16)
    for rows, is_drafted in ((1, False), (5, True), (16, True), (16, False)):
        found = live.passes(rows, is_drafted=is_drafted)[rows]
        assert found == pytest.approx(1.5 * TABLE.passes(rows), rel=0.1), rows
    assert live.around_ms(1, 10) == pytest.approx(0.5, rel=0.05)
    assert live.around_ms(1, 10, is_drafted=False) == pytest.approx(0.5, rel=0.1)


def test_a_curve_that_was_measured_too_flat_becomes_steeper() -> None:
    live = LiveCosts(TABLE, ["head"])
    for _ in range(150):
        observe(live, 4, 1.0, 1)
        observe(live, 16, 2.0, 1)
    ratio = live.passes(16)[16] / live.passes(4)[4]
    assert ratio == pytest.approx(2 * 20 / 11, rel=0.2)


def test_what_drafts_cost_besides_their_rows_is_not_charged_to_plain_steps() -> None:
    live = LiveCosts(TABLE, ["head"])
    for _ in range(100):
        observe(live, 1, 1.0, 1)
        observe(live, 4, 1.5, 9)
    assert live.passes(1, is_drafted=False)[1] == pytest.approx(10.0, rel=0.05)
    assert live.passes(4)[4] == pytest.approx(1.5 * 11.0, rel=0.05)
    assert live.to_json()["excess_with_drafts"] == pytest.approx(1.5, rel=0.1)


def test_a_machine_that_becomes_slower_is_no_difference_between_both_kinds() -> None:
    live = LiveCosts(TABLE, ["head"])
    for factor in (1.0, 2.5, 1.0, 2.0):
        for _ in range(20):
            observe(live, 1, factor, 2)
            observe(live, 4, factor, 6)
    assert live.to_json()["excess_with_drafts"] == pytest.approx(1.0, rel=0.1)


def test_both_kinds_must_be_seen_side_by_side() -> None:
    live = LiveCosts(TABLE, ["head"])
    observe(live, 4, 1.0, 50)
    assert not live.knows_both
    for _ in range(3):
        observe(live, 1, 1.0, 1)
        observe(live, 4, 1.0, 1)
    assert live.knows_both


def test_one_wild_pass_changes_little() -> None:
    live = LiveCosts(TABLE, ["head"])
    observe(live, 1, 1000.0, 1)
    observe(live, 1, 1.0, 15)
    assert live.passes(1)[1] < 1.3 * TABLE.passes(1)


def test_drafts_that_take_longer_become_dearer() -> None:
    live = LiveCosts(TABLE, ["head", "lookup"])
    before = live.drafts("head")(2, 3)
    assert before == pytest.approx(0.1 + 1.2 + 0.1 + 0.12)
    for _ in range(60):
        live.learn_draft("head", num_sequences=2, depth=3, num_read=4, draft_ms=3 * (before + 0.04))
        live.learn_draft("lookup", num_sequences=2, depth=3, num_read=0, draft_ms=0.01)
    assert live.drafts("head")(2, 3) == pytest.approx(3 * before, rel=0.1)
    assert live.drafts("lookup")(1, 1) < 0.01
    assert set(live.to_json()["drafts_ms"]) == {"head", "lookup"}


def test_a_table_that_is_empty_says_that_rows_are_free() -> None:
    live = LiveCosts(CostTable(), [])
    live.learn_pass(num_sequences=2, rows=5, context=1, verify_ms=3.0, other_ms=0.0)
    assert live.passes(9)[9] == live.passes(9)[1] > 0


def test_measuring_a_target_and_its_drafters_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(measure_costs, "_WORTH_KEEPING_S", 0.0)
    target = tiny_target()
    head = EagleDrafter(tiny_head(target), Placement(device=CPU, precision="float32"), name="head")
    drafters = [NGramDrafter(), head, LMDrafter(target, name="self")]
    table = measure_costs.load_or_measure(target, drafters)
    assert len(table.passes.rows) >= 5 and table.passes.ms == tuple(sorted(table.passes.ms))
    assert set(table.drafts) == {"head", "self"}
    assert all(0 < costs(1, 1) <= costs(4, 4) < 10_000 for costs in table.drafts.values())
    path = measure_costs.cost_file(target, drafters)
    assert path.is_file()
    monkeypatch.setattr(measure_costs, "measure_costs", None)
    assert measure_costs.load_or_measure(target, drafters) == table
    assert measure_costs.cost_file(target, drafters[:1]) != path
    path.write_text("{")
    with pytest.raises(TypeError):  # measured again, were it there to be called
        measure_costs.load_or_measure(target, drafters)


def test_drafters_are_as_they_were_after_they_were_timed() -> None:
    target = tiny_target()
    head = EagleDrafter(tiny_head(target), Placement(device=CPU, precision="float32"), name="head")
    measure_costs.measure_costs(target, [head], seconds=0.05)
    assert not head._reader._texts


def test_a_small_window_is_timed_as_far_as_it_goes() -> None:
    target = tiny_target()
    target.spec = replace(target.spec, max_positions=12)
    table = measure_costs.measure_costs(target)
    assert table.passes.rows[0] == 1 and len(table.passes.rows) >= 3
