"""A sound engine passes, every planted fault is caught, and nothing is proved by noise that was used twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.audit import pages
from outrider.audit.calibration import CalibrationSettings, audit_calibration
from outrider.audit.calibration_report import CalibrationReport
from outrider.audit.faults import FAULTS, Fault, fault_named, planted
from outrider.audit.guesses import Output
from outrider.audit.selftest import FaultyEngine, self_test
from outrider.drafters.ngram import NGramDrafter
from outrider.engine.config import EngineConfig
from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams
from outrider.types import Proposal
from tests.audit.support import PARAMS, PROMPTS, drawing_drafter, engine_source, world
from tests.audit.test_identity import RowSensitive
from tests.engine.support import Scripted, random_trees


def audit(
    source: Any, *, params: SamplingParams = PARAMS, make: Any = drawing_drafter, **more: Any
) -> CalibrationReport:
    settings = CalibrationSettings(**{"num_tokens": 2000, **more.pop("settings", {})})
    target = more.pop("target", None) or world()
    return audit_calibration(
        target, PROMPTS, source=source, params=params, make_drafter=make, settings=settings, **more
    )


SAMPLINGS = {
    "cut": PARAMS,
    "hot": SamplingParams(temperature=1.3, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=24),
    "masked": SamplingParams(
        temperature=1.0, min_tokens=6, bad_words_token_ids=((4,),), logit_bias={2: 1.0}, max_tokens=24
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("make", [drawing_drafter, NGramDrafter], ids=["drawn", "ngram"])
def test_a_sound_engine_passes(make: Callable[[], Any], name: str) -> None:
    params = SAMPLINGS[name]
    report = audit(engine_source(make(), params=params), params=params, make=make)
    assert report.verdict == "calibrated" and report.is_sound and report.null == "one-sample"
    assert report.tokens >= 2000 and report.alarm_at is None and report.num_outside == 0 and not report.repeats
    assert report.evidence is not None and report.evidence < 2
    assert report.speculation is not None and report.speculation.accepted > 10
    assert sum(report.histogram) == report.tokens


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_planted_fault_is_caught(fault: Fault) -> None:
    params = replace(PARAMS, **fault.fields)  # type: ignore[arg-type]
    faulty = FaultyEngine(engine_source(drawing_drafter(), params=params), fault)
    report = audit(faulty, params=params, settings={"num_tokens": 10_000})
    assert report.verdict == "biased" and report.cause and faulty.origin["planted fault"] == fault.name
    assert report.tokens_to_alarm is not None and report.tokens_to_alarm < 10_000


def test_the_self_test_accuses_the_faulty_and_nobody_else() -> None:
    report = self_test(
        world(),
        PROMPTS,
        make_drafter=drawing_drafter,
        params=PARAMS,
        config=EngineConfig(num_draft_tokens=3, schedule="fixed", num_cached_prefixes=0),
        settings=CalibrationSettings(num_tokens=1500),
        faults=[fault_named("wrong-bonus-row"), fault_named("min-p-forgotten")],
    )
    assert report.is_right and json.dumps(report.to_json(), allow_nan=False)
    assert [row.fault for row in report.rows] == ["none", "none", "wrong-bonus-row", "min-p-forgotten"]
    assert [row.is_caught for row in report.rows] == [False, False, True, True]
    assert "min_p 0.1" in report.rows[1].sampling and report.rows[3].cause
    assert "every planted fault was caught" in pages.selftest_page(report)


def test_a_fault_is_gone_when_it_is_taken_out() -> None:
    import importlib

    for fault in FAULTS:
        module, path = fault.seam

        def found(module: str = module, path: str = path) -> Any:
            owner: Any = importlib.import_module(module)
            for name in path.split("."):
                owner = getattr(owner, name)
            return owner

        sound = found()
        with planted(fault):
            assert found() is not sound
        assert found() is sound
    assert fault_named("wrong-bonus-row") in FAULTS
    with pytest.raises(ConfigError, match="wrong-bonus-rows"):
        fault_named("wrong-bonus-rows")


class OneSeed:
    """An engine that gives every request the same noise."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.origin, self.speculation = wrapped.origin, wrapped.speculation

    def answer(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> list[Output]:
        outputs: list[Output] = self._wrapped.answer(prompts)
        first = {output.prompt_id: output for output in reversed(outputs)}
        return [replace(first[output.prompt_id], seed=None) for output in outputs]


def test_noise_used_twice_voids_the_audit() -> None:
    report = audit(OneSeed(engine_source(drawing_drafter())), settings={"num_tokens": 200})
    assert report.verdict == "void" and not report.is_sound and report.repeats
    twice = engine_source(drawing_drafter())
    twice._noise = type("Same", (), {"integers": staticmethod(lambda low, high: 7)})()
    report = audit(twice, settings={"num_tokens": 200})
    assert report.verdict == "void" and any(each.chance == 0 for each in report.repeats)


def test_an_engine_that_drafts_nothing_proves_nothing() -> None:
    silent = Scripted(lambda request: Proposal())
    assert audit(engine_source(silent), settings={"num_tokens": 300}).verdict == "void"


def test_trees_pass_and_their_guess_is_the_first_branch() -> None:
    from tests.engine.support import VOCAB, table_model

    small = table_model(3)
    prompts = {"a": [1, 2], "b": [3, 3, 4]}
    report = audit_calibration(
        small,
        prompts,
        source=engine_source(random_trees(5), target=small),
        params=PARAMS,
        make_drafter=lambda: random_trees(6),
        settings=CalibrationSettings(num_tokens=1500),
    )
    assert small.spec.vocab_size == VOCAB and report.verdict == "calibrated"


def shaky(change: float = 0.02) -> RowSensitive:
    return RowSensitive(world(), token=5, change=change)


def test_where_rounding_moves_logits_two_arms_are_compared() -> None:
    """One sample would accuse this sound engine: its passes of several rows know another law than its plain ones."""
    target = shaky()
    plain = engine_source(target=target, seed=1)
    report = audit(
        engine_source(drawing_drafter(), target=target), plain=plain, target=target, settings={"num_tokens": 1200}
    )
    assert report.null == "two-sample" and report.verdict == "calibrated" and report.p_value is not None
    assert report.plain is not None and report.control.deviation > 1e-3
    with planted(fault_named("wrong-bonus-row")):
        report = audit(
            engine_source(drawing_drafter(), target=target), plain=engine_source(target=target, seed=1), target=target
        )
    assert report.verdict == "biased" and report.p_value is not None and report.p_value <= 1e-3 and report.cause


def test_without_a_plain_arm_a_foreign_engine_is_only_suspected() -> None:
    sound = audit(engine_source(drawing_drafter()), settings={"is_foreign": True})
    assert sound.verdict == "no sign" and sound.is_sound and "plain arm" in sound.unchecked[0]
    with planted(fault_named("greedy-drafts")):
        faulty = audit(engine_source(drawing_drafter()), settings={"is_foreign": True, "num_tokens": 6000})
    assert faulty.verdict == "deviates" and not faulty.is_sound


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"temperature": 0.0}, {}, "temperature 0"),
        ({"seed": 3}, {}, "a seed"),
        ({"n": 2}, {}, "n = 2"),
        ({"presence_penalty": 0.5}, {"order": "transformers"}, "presence_penalty"),
        ({}, {"order": "vlm"}, "processor order"),
        ({}, {"num_tokens": 5}, "5 tokens"),
        ({}, {"null": "three"}, "null 'three'"),
        ({}, {"null": "two-sample"}, "plain arm"),
    ],
)
def test_what_cannot_be_audited_is_refused(changes: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    params = SamplingParams(**{"temperature": 0.8, "max_tokens": 8, **changes})
    with pytest.raises(ConfigError, match=words):
        audit(engine_source(drawing_drafter()), params=params, settings=settings)


def test_a_drafter_that_draws_nothing_is_no_self_test() -> None:
    with pytest.raises(ConfigError, match="drafted nothing"):
        self_test(
            world(),
            PROMPTS,
            make_drafter=lambda: Scripted(lambda request: Proposal()),
            params=PARAMS,
            config=EngineConfig(schedule="fixed"),
            settings=CalibrationSettings(num_tokens=100),
            faults=[],
        )


def test_reports_are_json_and_pages() -> None:
    report = audit(engine_source(drawing_drafter()), settings={"num_tokens": 300})
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert values["verdict"] == "calibrated" and values["source"]["drafter"] == "other"
    assert values["versions"]["torch"] and values["fingerprint"] == "table" and len(values["channels"]) > 50
    page = pages.calibration_page(report)
    assert page.startswith("<!doctype html>") and "calibrated:" in page and "<script" not in page and "http" not in page
    assert page.count("<rect") == len(report.histogram)
    with planted(fault_named("top-p-one-side")):
        faulty = audit(engine_source(drawing_drafter()), settings={"num_tokens": 3000})
    assert faulty.verdict == "biased" and faulty.violations and faulty.tokens_to_alarm
    json.dumps(faulty.to_json(), allow_nan=False)
    assert "outside the recomputed support" in pages.calibration_page(faulty)


def test_the_same_seed_gives_the_same_audit() -> None:
    first, second = (audit(engine_source(drawing_drafter()), settings={"num_tokens": 400}) for _ in range(2))
    assert first.to_json() == second.to_json()
    other = audit(engine_source(drawing_drafter(), seed=1), settings={"num_tokens": 400})
    assert other.evidence != first.evidence and np.isfinite(other.evidence or np.nan)
