from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.costs import RowCosts
from outrider.engine.engine import Engine
from outrider.measure.paired import PairedReport, _predicted, compare_paired, measure_row_costs
from outrider.measure.workloads import BUNDLED, bundled
from outrider.sampling.params import SamplingParams
from tests.engine.support import oracle, random_chains, table_model

PROMPTS = {"one": [1, 2, 3], "two": [4, 4]}


def compare(make_drafter: Any, **changes: Any) -> PairedReport:
    arguments: dict[str, Any] = {
        "kinds": {"one": "copy", "two": "prose"},
        "make_drafter": make_drafter,
        "params": SamplingParams(max_tokens=21),
        "config": EngineConfig(num_draft_tokens=4, schedule="fixed", max_batch_size=1),
        "repeats": 2,
    }
    return compare_paired(table_model(), PROMPTS, **{**arguments, **changes})


def test_both_ways_give_the_same_and_the_numbers_fit_together() -> None:
    report = compare(lambda: random_chains(3))
    assert report.is_lossless and not report.differences and report.control is None
    assert [pair.name for pair in report.prompts] == ["one", "two"]
    assert report.overall.num_tokens == 42 and report.overall.is_identical
    for pair in (*report.prompts, report.overall):
        assert pair.plain_speed > 0 and pair.speculative_speed > 0 and pair.measured > 0
        assert pair.tokens_per_pass is not None and pair.tokens_per_pass >= 1
    assert set(report.row_costs_ms) == {1, 2, 4, 5}
    assert json.loads(json.dumps(report.to_json()))["overall"]["num_tokens"] == 42


def test_every_run_gets_a_drafter_of_its_own() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(random_chains(len(made)))
        return made[-1]

    compare(make)
    assert len(made) == len(PROMPTS) * 2


def test_the_prediction_is_tokens_over_the_cost_of_the_passes() -> None:
    """A perfect drafter at k = 4 commits 5 tokens in passes of 5 rows, each costing 1.4 plain passes."""
    target = table_model()
    params = SamplingParams(max_tokens=21)
    [plain] = Engine(target).generate([[1, 2, 3]], params)
    text = [1, 2, 3, *plain.token_ids]
    config = EngineConfig(num_draft_tokens=4, schedule="fixed")
    [result] = Engine(target, drafter=oracle(lambda _: text), config=config).generate([[1, 2, 3]], params)
    assert result.stats.tokens_per_pass == 5
    draft_ms = sum(step.draft_ms for step in result.steps if not step.is_prefill)
    costs = RowCosts(rows=(1, 5), ms=(1000.0, 1400.0))
    assert _predicted([result], costs) == pytest.approx(20 * 1000 / (4 * 1400 + draft_ms))
    assert _predicted([plain], costs) == pytest.approx(20 * 1000 / (20 * 1000), rel=1e-3)
    [short] = Engine(target).generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    assert _predicted([short], costs) is None


def test_a_broken_verifier_shows_up_as_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.engine import judge
    from tests.audit.test_identity import accept_everything

    honest = judge.verify
    monkeypatch.setattr(
        judge,
        "verify",
        lambda proposals, laws: (accept_everything if any(map(len, proposals)) else honest)(proposals, laws),
    )
    report = compare(lambda: random_chains(3))
    assert not report.is_lossless and report.control is not None
    assert not report.overall.is_identical and report.differences[0].verdict == "bug"


def test_row_costs_cover_one_row_to_the_most() -> None:
    costs = measure_row_costs(table_model(), most_rows=9, num_cached=8, repeats=1)
    assert costs.rows == (1, 2, 4, 8, 9) and all(ms > 0 for ms in costs.ms)
    assert measure_row_costs(table_model(), most_rows=1, num_cached=8, repeats=1).rows == (1,)


def test_a_short_run_sees_both_kinds_of_prompts() -> None:
    assert {prompt.kind for prompt in bundled(num_prompts=2)} == {"copy", "prose"}
    assert sorted(prompt.name for prompt in bundled()) == sorted(prompt.name for prompt in BUNDLED)
    assert len({prompt.name for prompt in BUNDLED}) == len(BUNDLED)
