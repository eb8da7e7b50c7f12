"""Any load, any memory: every output equals the one that the request has alone, and nothing is lost, leaked or exceeded."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.drafters.base import DraftRequest
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult, StreamEvent
from outrider.errors import CapacityError, ConfigError, DrainingError, QueueFullError
from outrider.models.table import TableCache
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason, Proposal
from tests.engine.support import VOCAB, Scripted, oracle, random_chains, random_trees, right_trees, table_model

TOKEN_BYTES = 8
FIELDS = (
    SamplingParams(max_tokens=18, ignore_eos=True),
    SamplingParams(max_tokens=25, ignore_eos=True, frequency_penalty=0.7, presence_penalty=-0.4, logprobs=2),
    SamplingParams(max_tokens=22, ignore_eos=True, temperature=1.1, seed=11, logprobs=0),
    SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=1.4, top_k=4, top_p=0.9, repetition_penalty=1.3, seed=5, n=3
    ),
    SamplingParams(max_tokens=15, temperature=1.0),
    SamplingParams(
        max_tokens=30, temperature=1.2, min_tokens=9, stop_token_ids=(5,), seed=3, bad_words_token_ids=[(2, 3)]
    ),
)
PROMPTS = tuple(
    tuple(random.Random(seed).choices(range(VOCAB), k=size)) for seed, size in enumerate((1, 3, 9, 17, 30, 44))
)
LONG_PROMPT = [*PROMPTS[4], *PROMPTS[4]]
LONG = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _little_ahead() -> Iterator[None]:
    """Texts here are short: room for a whole answer at once would leave nobody to be put back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.engine.scheduler.AHEAD", 12)
        patch.setattr("outrider.engine.scheduler.AHEAD_AGAIN", 3)
        yield


class Hoarder(Scripted):
    """Keeps four bytes a token, and all hidden states: checks that it is told all, and again after it was put back."""

    taps = (3,)

    def __init__(self, inner: Scripted) -> None:
        super().__init__(inner._make, inner.name)
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}
        self.num_suspended = 0

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        super().start(sequence, tokens)
        self.texts[sequence] = []

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        assert start == self.ends.get(sequence, start), "positions follow one another"
        self.ends[sequence] = start + len(taps_RD)
        self.texts[sequence] += [int(token) for token in taps_RD[:, 0].tolist()]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for request in requests:
            read = self.texts[request.sequence]
            assert self.ends[request.sequence] == len(request.tokens) - 1
            assert read == list(request.tokens[len(request.tokens) - 1 - len(read) : -1])
        return super().propose(requests)

    def finish(self, sequence: int) -> None:
        super().finish(sequence)
        self.texts.pop(sequence, None)
        self.ends.pop(sequence, None)

    def memory_bytes(self, num_tokens: int) -> int:
        return 4 * num_tokens

    def suspend(self, sequence: int) -> None:
        self.num_suspended += 1
        del self.texts[sequence]
        self.ends.pop(sequence, None)

    def resume(self, sequence: int, tokens: Sequence[int]) -> None:
        assert self.live[sequence] == list(tokens)
        self.texts[sequence] = []

    def num_bytes(self) -> int:
        return sum(4 * len(text) for text in self.texts.values())


DRAFTERS = {
    "plain": lambda: None,
    "chains": lambda: random_chains(1),
    "trees": lambda: random_trees(2),
    "hoarder": lambda: Hoarder(random_trees(4)),
}


def engine_of(
    kind: str = "plain", *, budget_tokens: float = 1e6, drafter: Scripted | None = None, **changes: object
) -> Engine:
    values = {
        "num_draft_tokens": 4,
        "schedule": "fixed",
        "verification": "compare",
        "cache_memory_gb": budget_tokens * TOKEN_BYTES / 1e9,
        **changes,
    }
    drafter = drafter or DRAFTERS[kind]()
    return Engine(table_model(eos=(6,)), drafter=drafter, config=EngineConfig.from_dict(values), entropy=lambda: 77)


@lru_cache
def solo(prompt: tuple[int, ...], fields: int) -> list[GenerationResult]:
    """What a request gives when it is alone on an engine that has memory to spare."""
    return engine_of(num_cached_prefixes=0).generate([list(prompt)], FIELDS[fields])


def check_memory(engine: Engine) -> None:
    cache = engine._machinery.cache
    assert isinstance(cache, TableCache)
    held = cache.num_bytes() + (engine.drafter.num_bytes() if isinstance(engine.drafter, Hoarder) else 0)
    assert held <= engine.cache_bytes_in_use <= engine.cache_bytes_budget


def check_empty(engine: Engine) -> None:
    """Nothing is left of anybody."""
    assert not engine.has_work and engine.step() == []
    engine.clear_prefixes()
    assert engine.cache_bytes_in_use == 0
    assert not engine._machinery.cache._tokens  # type: ignore[attr-defined]
    assert engine.drafter is None or not engine.drafter.live  # type: ignore[attr-defined]
    assert not isinstance(engine.drafter, Hoarder) or not engine.drafter.texts


def run_out(engine: Engine, most_steps: int = 4000) -> list[StreamEvent]:
    events = []
    for _ in range(most_steps):
        if not engine.has_work:
            return events
        events += engine.step()
        check_memory(engine)
    raise AssertionError("somebody never ends")


ACTIONS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.tuples(
            st.integers(0, len(PROMPTS) - 1), st.integers(0, len(FIELDS) - 1), st.integers(0, 2), st.integers(-1, 1)
        ),
    ),
    st.tuples(st.just("step"), st.tuples(st.integers(1, 6))),
    st.tuples(st.just("cancel"), st.tuples(st.integers(0, 30))),
)


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=3, max_size=24),
    kind=st.sampled_from(sorted(DRAFTERS)),
    budget=st.integers(150, 700),
    batch=st.sampled_from([1, 3, 64]),
    chunks=st.sampled_from([(512, 128), (7, 3), (40, 1)]),
    prefixes=st.sampled_from([0, 3]),
)
def test_any_load_in_any_memory_gives_each_request_its_own_output(
    actions: list[tuple[str, tuple[int, ...]]],
    kind: str,
    budget: int,
    batch: int,
    chunks: tuple[int, int],
    prefixes: int,
) -> None:
    engine = engine_of(
        kind,
        budget_tokens=budget,
        max_batch_size=batch,
        prefill_chunk=chunks[0],
        prefill_while_decoding=chunks[1],
        num_cached_prefixes=prefixes,
    )
    asked: list[tuple[str, int, int]] = []
    cancelled: set[str] = set()
    events: list[StreamEvent] = []
    for name, values in actions:
        if name == "submit":
            prompt, fields, scope, priority = values
            id = engine.submit(list(PROMPTS[prompt]), FIELDS[fields], scope=("a", "b", None)[scope], priority=priority)
            asked.append((id, prompt, fields))
        elif name == "step":
            for _ in range(values[0]):
                events += engine.step()
                check_memory(engine)
        elif asked:
            cancelled.add(asked[values[0] % len(asked)][0])
            engine.cancel(asked[values[0] % len(asked)][0])
    events += run_out(engine)
    check_answers(asked, events, cancelled)
    check_empty(engine)


def check_answers(asked: list[tuple[str, int, int]], events: list[StreamEvent], cancelled: set[str]) -> None:
    results = {(event.id, event.index): event.result for event in events if event.result is not None}
    streamed: dict[tuple[str, int], list[int]] = {}
    for event in events:
        streamed.setdefault((event.id, event.index), []).extend(event.token_ids)
    assert len(results) == sum(FIELDS[fields].n for _, _, fields in asked), "each choice ends once"
    for id, prompt, fields in asked:
        for index, alone in enumerate(solo(PROMPTS[prompt], fields)):
            got = results[id, index]
            assert got is not None and list(got.token_ids) == streamed[id, index]
            if got.finish_reason is FinishReason.CANCELLED:
                assert id in cancelled
                assert got.token_ids == alone.token_ids[: len(got.token_ids)]
                continue
            assert got.token_ids == alone.token_ids
            assert got.finish_reason == alone.finish_reason
            check_records(got, alone)


def check_records(got: GenerationResult, alone: GenerationResult) -> None:
    """Counts are honest however often it was read, and log-probabilities are those of the tokens."""
    firsts = [step for step in got.steps if step.is_prefill]
    assert len(firsts) == 1 + sum(step.is_recomputed for step in got.steps) <= 1 + got.num_preemptions
    assert sum(len(step.tokens) for step in got.steps) == len(got.token_ids)
    assert got.stats.committed == len(got.token_ids) - len(firsts)
    assert got.timing.first_token is not None and 0 <= got.timing.queue <= got.timing.first_token <= got.timing.total
    if alone.logprobs is not None:
        assert got.logprobs is not None
        for mine, theirs in zip(got.logprobs, alone.logprobs, strict=True):
            assert (mine.token, [t for t, _ in mine.top]) == (theirs.token, [t for t, _ in theirs.top])
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("kind", ["plain", "chains", "trees", "hoarder", "right"])
def test_sequences_put_back_in_the_middle_of_speculation_go_on_as_if_nothing_had_happened(kind: str) -> None:
    asked = [(prompt, fields) for prompt in (3, 4) for fields in range(len(FIELDS))]
    texts = [[*PROMPTS[prompt], *r.token_ids] for prompt, fields in asked for r in solo(PROMPTS[prompt], fields)]
    drafter = Hoarder(right_trees(lambda sequence: texts[sequence], 3)) if kind == "right" else None
    engine = engine_of("plain" if drafter else kind, budget_tokens=260, drafter=drafter)
    names = [(engine.submit(list(PROMPTS[prompt]), FIELDS[fields]), prompt, fields) for prompt, fields in asked]
    events = run_out(engine)
    check_answers(names, events, set())
    results = [event.result for event in events if event.result is not None]
    recomputed = [step for result in results for step in result.steps if step.is_recomputed]
    assert len(recomputed) > 2, "hardly anybody was put back: the test is void"
    stats = engine.stats()
    assert stats.num_preemptions >= len(recomputed) and stats.recomputed_tokens > 10
    if kind == "right":
        assert sum(result.stats.accepted for result in results) > 10, "hardly any draft was kept: the test is void"
    assert not isinstance(engine.drafter, Hoarder) or engine.drafter.num_suspended > 2
    check_empty(engine)


def test_the_oldest_gets_ahead_while_the_young_give_way() -> None:
    engine = engine_of(budget_tokens=240, num_cached_prefixes=0)
    ids = [engine.submit([1, 2, 3] * 10, replace(LONG, max_tokens=100), id=str(index)) for index in range(3)]
    ended = [event.id for event in run_out(engine) if event.result is not None]
    assert ended == ids
    assert engine.stats().num_preemptions > 0


def test_the_urgent_are_put_back_last() -> None:
    engine = engine_of(budget_tokens=240, num_cached_prefixes=0)
    engine.submit([1, 2, 3] * 10, replace(LONG, max_tokens=100), id="patient", priority=1)
    engine.step()
    engine.submit([3, 2, 1] * 10, replace(LONG, max_tokens=100), id="urgent")
    results = {event.id: event.result for event in run_out(engine) if event.result is not None}
    assert results["patient"].num_preemptions > 0 and results["urgent"].num_preemptions == 0


def test_cached_prefixes_are_dropped_before_anybody_is_put_back() -> None:
    engine = engine_of(budget_tokens=400, num_cached_prefixes=8)
    for token in range(5):
        engine.generate([[token] * 30], LONG)
    assert engine.stats().num_prefixes > 1
    engine.generate([[5, token] * 20 for token in range(3)], LONG)
    stats = engine.stats()
    assert stats.num_preemptions == 0 and stats.cache_bytes_in_use <= engine.cache_bytes_budget


def test_who_could_never_fit_is_refused_with_numbers() -> None:
    engine = engine_of(budget_tokens=100)
    with pytest.raises(CapacityError, match=r"40 prompt tokens and up to 61 more need .* MB"):
        engine.submit([1] * 40, SamplingParams(max_tokens=61))
    assert not engine.has_work
    [result] = engine.generate([[1] * 40], SamplingParams(max_tokens=60, ignore_eos=True))
    assert len(result.token_ids) == 60, "whoever just fits, runs"


def test_running_streams_go_on_while_a_long_prompt_is_read() -> None:
    engine = engine_of(prefill_while_decoding=5)
    engine.submit([1, 2], LONG, id="running")
    engine.step()
    engine.submit(LONG_PROMPT, LONG, id="long")
    reading = 0
    while True:
        events = engine.step()
        assert [event.id for event in events][:1] == ["running"], "every pass gives it a token"
        report = events[0].report
        assert report is not None and report.prefill_rows <= 5
        reading += report.prefill_rows > 0
        if len(events) > 1:
            break
    assert reading == 12, "60 tokens in parts of five"
    assert events[1].report is not None and events[1].report.rows == 60
    run_out(engine)


def test_prompts_of_several_requests_are_read_together() -> None:
    engine = engine_of(prefill_chunk=100)
    for prompt in PROMPTS[:5]:
        engine.submit(list(prompt), LONG)
    events = engine.step()
    assert len(events) == 5, "60 tokens of five prompts in one pass"
    assert {event.report.batch_size for event in events if event.report} == {5}


@pytest.mark.parametrize("stage", ["waiting", "reading", "running", "put back"])
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_request_can_end_early_at_any_stage(stage: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("hoarder", budget_tokens=1000, max_batch_size=3, prefill_while_decoding=4)
    seconds = 1e9 if how == "cancel" else 1e6
    engine.submit([1, 2] * 10, replace(LONG, max_tokens=100), id="other")
    engine.step()
    params = SamplingParams(max_tokens=80, temperature=1.0, n=2, ignore_eos=True)
    engine.submit(list(PROMPTS[5]), params, id="it", timeout_s=seconds)
    wanted = {"waiting": 0, "reading": 1, "running": 20, "put back": 20}[stage]
    for _ in range(wanted):
        engine.step()
    if stage == "put back":
        for sequence in [s for s in engine._scheduler.running if s.request.id == "it"]:
            engine._scheduler._put_back(sequence)
    stats = engine.stats()
    assert {
        "waiting": stats.waiting == 1,
        "reading": stats.reading == 2,
        "running": stats.running == 3,
        "put back": stats.num_preemptions == 0 and len(engine._scheduler.put_back) == 2,
    }[stage]
    if how == "cancel":
        engine.cancel("it")
    else:
        now = engine._scheduler.running[0].request.submitted
        monkeypatch.setattr("outrider.engine.engine.time.perf_counter", lambda: now + 2e6)
    results = [event.result for event in engine.step() if event.id == "it" and event.result]
    reason = FinishReason.CANCELLED if how == "cancel" else FinishReason.TIMEOUT
    assert [(r.index, r.finish_reason) for r in results] == [(0, reason), (1, reason)]
    assert all(bool(r.token_ids) is (stage in ("running", "put back")) for r in results)
    monkeypatch.undo()
    run_out(engine)
    check_empty(engine)


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="timeout_s 0"):
        engine_of().submit([1], LONG, timeout_s=0)


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    engine = engine_of(max_batch_size=1, max_waiting=2)
    engine.submit([1], LONG)
    engine.step()
    engine.submit([1], LONG, id="a")
    engine.submit([1], LONG, id="b")
    with pytest.raises(QueueFullError, match="2 requests wait already, and 2 may") as refused:
        engine.submit([1], LONG)
    assert refused.value.retry_after_s >= 1
    assert (engine.stats().waiting, engine.stats().num_refused) == (2, 1)
    engine.cancel("b")
    engine.step()
    engine.submit([1], LONG)
    assert len([event for event in run_out(engine) if event.result]) == 3


def test_draining_finishes_what_was_accepted_and_takes_nothing_new() -> None:
    engine = engine_of(max_batch_size=1)
    for _ in range(3):
        engine.submit([1, 2], LONG)
    engine.step()
    engine.drain()
    with pytest.raises(DrainingError):
        engine.submit([1], LONG)
    assert engine.is_draining and engine.stats().is_draining
    results = [event.result for event in run_out(engine) if event.result]
    assert [len(result.token_ids) for result in results] == [30, 30, 30]


def test_requests_may_come_and_go_from_other_threads_while_steps_run() -> None:
    engine = engine_of("chains", budget_tokens=500)
    asked: list[tuple[str, int, int]] = []
    dropped: set[str] = set()

    def client(number: int) -> None:
        for turn in range(6):
            id, prompt, fields = f"{number}-{turn}", (number + turn) % len(PROMPTS), turn % len(FIELDS)
            asked.append((id, prompt, fields))
            engine.submit(list(PROMPTS[prompt]), FIELDS[fields], id=id)
            if turn == number:
                dropped.add(id)
                engine.cancel(id)
            assert engine.stats().cache_bytes_in_use <= engine.cache_bytes_budget

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in clients:
        each.start()
    events = []
    while engine.has_work or any(each.is_alive() for each in clients):
        events += engine.step()
    check_answers(asked, events, dropped)
    check_empty(engine)


def test_scopes_do_not_share_prompts() -> None:
    engine = engine_of()
    rows = []
    for scope in ("alice", "bob", "alice", None, None):
        engine.submit(LONG_PROMPT, LONG, scope=scope)
        results = [event.result for event in run_out(engine) if event.result]
        rows.append(results[0].steps[0].rows)
    assert rows == [60, 60, 1, 60, 1]
    assert engine.stats().reused_tokens == 2 * 59


def test_a_running_request_of_the_same_scope_is_shared_with() -> None:
    engine = engine_of(num_cached_prefixes=2)
    engine.submit(LONG_PROMPT, LONG, scope="alice", id="first")
    engine.step()
    engine.submit([*LONG_PROMPT, 3], LONG, scope="alice", id="second")
    engine.submit([*LONG_PROMPT, 3], LONG, scope="bob", id="third")
    rows = {event.id: event.result.steps[0].rows for event in run_out(engine) if event.result}
    assert rows == {"first": 60, "second": 1, "third": 61}


def test_scopes_with_work_are_served_in_turn() -> None:
    engine = engine_of(max_batch_size=1, num_cached_prefixes=0)
    for index in range(4):
        engine.submit([1, index], LONG, scope="greedy", id=f"greedy-{index}")
    engine.submit([2], LONG, scope="modest", id="modest")
    ended = [event.id for event in run_out(engine) if event.result]
    assert ended.index("modest") == 1


def test_choices_that_do_not_fit_beside_each_other_are_read_one_by_one() -> None:
    engine = engine_of(budget_tokens=100, num_cached_prefixes=0)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=4, n=3, ignore_eos=True)
    got = engine.generate([[1, 2, 3] * 15], params)
    alone = engine_of().generate([[1, 2, 3] * 15], params)
    assert [r.token_ids for r in got] == [r.token_ids for r in alone]
    check_empty(engine)


def test_stats_add_up() -> None:
    engine = engine_of("chains")
    results = engine.generate([list(prompt) for prompt in PROMPTS], LONG)
    stats = engine.stats()
    assert stats.num_finished == 6 and stats.num_failed == 0
    assert stats.output_tokens == sum(len(result.token_ids) for result in results) == 180
    assert stats.prompt_tokens == sum(map(len, PROMPTS)) - stats.reused_tokens
    assert stats.tokens_per_s > 0 and stats.queue_ms is not None and stats.first_token_ms is not None
    assert (stats.running, stats.reading, stats.waiting, stats.put_back) == (0, 0, 0, 0)
    assert stats.prefix_bytes == stats.cache_bytes_in_use > 0
    assert stats.to_json()["num_prefixes"] == stats.num_prefixes


def test_an_automatic_budget_is_resolved_and_reported() -> None:
    engine = Engine(table_model())
    assert isinstance(engine.config.cache_memory_gb, float)
    assert engine.cache_bytes_budget == round(engine.config.cache_memory_gb * 1e9) >= 10**8
    [result] = engine.generate([[1]], LONG)
    assert result.settings["engine"]["cache_memory_gb"] == engine.config.cache_memory_gb
    for bad in (0, -1, "much", True):
        with pytest.raises(ConfigError, match="cache_memory_gb"):
            EngineConfig.from_dict({"cache_memory_gb": bad})


def test_oracle_drafts_are_cut_to_what_the_memory_holds() -> None:
    """Chains as long as the engine may ask for, in a memory that has room for hardly any of them."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    [alone] = engine_of().generate([[1, 2, 3]], params)
    text = [1, 2, 3, *alone.token_ids]
    engine = engine_of(drafter=oracle(lambda _: text), budget_tokens=45, num_draft_tokens=100)
    engine.submit([1, 2, 3], params)
    [result] = [event.result for event in run_out(engine) if event.result]
    assert result.token_ids == alone.token_ids and result.stats.accepted > 20
