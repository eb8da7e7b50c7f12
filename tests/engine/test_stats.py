"""Rates are those of the last seconds, sums those of all time, and a full queue says when to come back."""

from __future__ import annotations

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.engine.scheduler import PassPlan
from outrider.engine.stats import LONGEST_RETRY_S, WINDOW_S, Meter, retry_after_s
from outrider.sampling.params import SamplingParams
from outrider.types import StepReport
from tests.engine.support import table_model

NOTHING = PassPlan(sequences=[], chunks=[])


def result() -> GenerationResult:
    [done] = Engine(table_model(), config=EngineConfig()).generate([[1]], SamplingParams(max_tokens=2))
    return done


def test_rates_forget_what_is_long_past() -> None:
    now = [100.0]
    meter, engine, done = Meter(lambda: now[0]), Engine(table_model()), result()
    for _ in range(20):
        meter.add_pass(NOTHING, [StepReport(tokens=(1, 2, 3))])
        meter.add_end(done)
        now[0] += 1.0
    stats = meter.snapshot(engine._scheduler)
    assert stats.output_tokens == 60 and stats.num_finished == 20
    assert stats.tokens_per_s == pytest.approx(3.0)
    assert meter.ends_per_s == pytest.approx(1.0)
    assert stats.queue_ms == pytest.approx(done.timing.queue)
    assert stats.first_token_ms == pytest.approx(done.timing.first_token)
    now[0] += WINDOW_S + 1
    stats = meter.snapshot(engine._scheduler)
    assert (stats.tokens_per_s, meter.ends_per_s, stats.queue_ms, stats.output_tokens) == (0.0, 0.0, None, 60)


def test_rates_of_the_first_seconds_are_not_thinned() -> None:
    now = [100.0]
    meter = Meter(lambda: now[0])
    now[0] += 2.0
    meter.add_pass(NOTHING, [StepReport(tokens=(1,) * 10)])
    assert meter.snapshot(Engine(table_model())._scheduler).tokens_per_s == pytest.approx(5.0)


def test_a_full_queue_asks_for_as_long_as_it_takes() -> None:
    assert retry_after_s(40, 2.0) == pytest.approx(5.5)
    assert retry_after_s(40, 0.0) == 1.0, "nobody has ended yet: no reason to wait long"
    assert retry_after_s(0, 50.0) == 1.0
    assert retry_after_s(10**6, 0.1) == LONGEST_RETRY_S
