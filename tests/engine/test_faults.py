"""A fault ends whoever it belongs to, with a message; everybody else, and the engine, go on unharmed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.drafters.base import DraftRequest
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.engine.stop import OutputText
from outrider.models.base import GreedyResult, PackedRows
from outrider.models.table import TableModel
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.types import FinishReason, Proposal
from tests.engine.support import Scripted, random_chains, table_model

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=2, frequency_penalty=0.5)


def engine_of(drafter: Scripted | None = None, **changes: object) -> Engine:
    config = EngineConfig.from_dict({"num_draft_tokens": 3, "schedule": "fixed", "num_cached_prefixes": 0, **changes})
    return Engine(table_model(), drafter=drafter, config=config)


def three(engine: Engine, params: SamplingParams) -> dict[str, GenerationResult]:
    results = engine.generate([[1, 2], [3, 4], [5, 6]], params, ids=["a", "bad", "c"])
    assert not engine.has_work and engine.cache_bytes_in_use == 0
    assert engine.drafter is None or not engine.drafter.live  # type: ignore[attr-defined]
    return {result.id: result for result in results}


def check_only_one_is_hurt(got: dict[str, GenerationResult], params: SamplingParams, message: str) -> None:
    alone = three(engine_of(), params)
    for id in ("a", "c"):
        assert (got[id].token_ids, got[id].finish_reason) == (alone[id].token_ids, alone[id].finish_reason)
    bad = got["bad"]
    assert bad.finish_reason is FinishReason.ERROR and message in bad.error
    assert bad.token_ids == alone["bad"].token_ids[: len(bad.token_ids)] and 0 < len(bad.token_ids) < 20
    assert bad.to_json()["error"] == bad.error


@pytest.mark.parametrize("drafter", [None, "chains"])
def test_a_text_that_cannot_be_decoded_ends_its_own_request(
    drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, seen = OutputText.add, {}

    def broken(self: OutputText, token: int, *, may_stop: bool) -> bool:
        count = seen[id(self)] = seen.get(id(self), 0) + 1
        if self is victim and count == 6:
            raise UnicodeError("no such character")
        return add(self, token, may_stop=may_stop)

    engine = engine_of(random_chains(1) if drafter else None)
    for name, prompt in (("a", [1, 2]), ("bad", [3, 4]), ("c", [5, 6])):
        engine.submit(prompt, GREEDY, id=name)
    victim = engine._intake._inbox[1].sequences[0].text
    monkeypatch.setattr(OutputText, "add", broken)
    results = {}
    while engine.has_work:
        results |= {event.id: event.result for event in engine.step() if event.result}
    monkeypatch.undo()
    check_only_one_is_hurt(results, GREEDY, "UnicodeError: no such character")
    assert len(results["bad"].token_ids) <= 5
    assert engine.stats().num_failed == 1


@pytest.mark.parametrize("drafter", [None, "chains"])
def test_a_law_that_cannot_be_computed_ends_its_own_request(
    drafter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    banned = SamplingState.banned_tokens

    def broken(self: SamplingState, path: Sequence[int]) -> set[int]:
        if self is victim and self.num_output >= 5:
            raise ValueError("the grammar is lost")
        return banned(self, path)

    engine = engine_of(random_chains(1) if drafter else None)
    for name, prompt in (("a", [1, 2]), ("bad", [3, 4]), ("c", [5, 6])):
        engine.submit(prompt, DRAWN, id=name)
    victim = engine._intake._inbox[1].sequences[0].state
    monkeypatch.setattr(SamplingState, "banned_tokens", broken)
    results = {}
    while engine.has_work:
        results |= {event.id: event.result for event in engine.step() if event.result}
    monkeypatch.undo()
    check_only_one_is_hurt(results, DRAWN, "ValueError: the grammar is lost")


def test_a_pass_that_fails_ends_those_in_it_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TableModel.forward_greedy

    def broken(self: TableModel, rows: PackedRows, cache: object, *, taps: Sequence[int] = ()) -> GreedyResult:
        if 4 in rows.tokens_R.tolist() and len(rows.segments) == 2:
            raise RuntimeError("the device is gone")
        return forward(self, rows, cache, taps=taps)  # type: ignore[arg-type]

    engine = engine_of(max_batch_size=2)
    engine.submit([1, 2], GREEDY, id="a")
    engine.submit([3, 4], GREEDY, id="b")
    engine.submit([5, 6], GREEDY, id="c")
    monkeypatch.setattr(TableModel, "forward_greedy", broken)
    results = {event.id: event.result for event in engine.step() if event.result}
    monkeypatch.undo()
    assert {id: result.error for id, result in results.items()} == dict.fromkeys(
        "ab", "RuntimeError: the device is gone"
    )
    while engine.has_work:
        results |= {event.id: event.result for event in engine.step() if event.result}
    assert results["c"].token_ids == three(engine_of(), GREEDY)["c"].token_ids
    assert engine.cache_bytes_in_use == 0 and engine.stats().num_failed == 2


def test_a_drafter_that_fails_leaves_an_engine_that_works() -> None:
    class Failing(Scripted):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
            if any(len(request.tokens) == 6 for request in requests):
                raise OSError("the draft model is gone")
            return super().propose(requests)

    engine = engine_of(Failing(lambda request: Proposal.chain([0], drafter="failing"), "failing"))
    [failed] = engine.generate([[1, 2, 3, 4, 5]], GREEDY)
    assert failed.finish_reason is FinishReason.ERROR and "OSError: the draft model is gone" in failed.error
    assert len(failed.token_ids) == 1
    [fine] = engine.generate([[1] * 7], GREEDY)
    assert fine.finish_reason is FinishReason.LENGTH


def test_a_drafter_that_cannot_start_ends_its_request_alone() -> None:
    class Choosy(Scripted):
        def start(self, sequence: int, tokens: Sequence[int]) -> None:
            if list(tokens) == [3, 4]:
                raise ValueError("not this text")
            super().start(sequence, tokens)

    results = three(engine_of(Choosy(random_chains(1)._make, "choosy")), GREEDY)
    assert results["bad"].finish_reason is FinishReason.ERROR and "not this text" in results["bad"].error
    alone = three(engine_of(), GREEDY)
    assert [results[id].token_ids for id in "ac"] == [alone[id].token_ids for id in "ac"]


def test_our_own_broken_invariants_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: OutputText, token: int, *, may_stop: bool) -> bool:
        raise AssertionError("cannot be")

    engine = engine_of()
    engine.submit([1, 2], GREEDY)
    monkeypatch.setattr(OutputText, "add", broken)
    with pytest.raises(AssertionError, match="cannot be"):
        engine.step()
    monkeypatch.undo()
    [event] = engine.step()
    assert event.result is not None and event.result.finish_reason is FinishReason.ERROR
    assert not engine.has_work and engine.cache_bytes_in_use == 0


def test_an_interrupted_pass_leaves_nothing_behind_that_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind a pass that wrote refused drafts into the cache."""
    forward = TableModel.forward_greedy

    def stopped(self: TableModel, rows: PackedRows, cache: object, *, taps: Sequence[int] = ()) -> GreedyResult:
        result = forward(self, rows, cache, taps=taps)  # type: ignore[arg-type]
        if len(rows.tokens_R) > 1 and int(rows.positions_R[0]) >= 30:
            raise KeyboardInterrupt
        return result

    wrong = Scripted(lambda request: Proposal.chain([0, 0, 0][: request.num_draft_tokens], drafter="wrong"), "wrong")
    engine = engine_of(wrong, num_cached_prefixes=4)
    monkeypatch.setattr(TableModel, "forward_greedy", stopped)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3] * 10], GREEDY)
    monkeypatch.undo()
    assert not engine.has_work and len(engine._scheduler.prefixes) == 0 == engine.cache_bytes_in_use


def test_rows_of_a_pass_that_failed_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass wrote its rows, drafts included, and failed behind that: nobody may begin with them."""
    forward = TableModel.forward_greedy

    def broken(self: TableModel, rows: PackedRows, cache: object, *, taps: Sequence[int] = ()) -> GreedyResult:
        result = forward(self, rows, cache, taps=taps)  # type: ignore[arg-type]
        if len(rows.tokens_R) > 1 and int(rows.positions_R[0]) > 30:
            raise RuntimeError("too late")
        return result

    prompt = [1, 2, 3] * 10
    wrong = Scripted(lambda request: Proposal.chain([0, 0, 0][: request.num_draft_tokens], drafter="wrong"), "wrong")
    engine = engine_of(wrong, num_cached_prefixes=4)
    monkeypatch.setattr(TableModel, "forward_greedy", broken)
    [failed] = engine.generate([prompt], GREEDY)
    monkeypatch.undo()
    assert failed.finish_reason is FinishReason.ERROR and len(failed.token_ids) >= 1
    assert engine.stats().num_prefixes == 0
    again = [*prompt, *failed.token_ids, 0, 0]
    [got], [fresh] = engine.generate([again], GREEDY), engine_of().generate([again], GREEDY)
    assert got.token_ids == fresh.token_ids
