"""Replay of what a planner decided: the same passes, whatever it decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.drafters.base import Drafter, DraftRequest
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.lm import LMDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.portfolio import portfolio_of
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.costs import CostTable, RowCosts
from outrider.engine.taps import wanted_taps
from outrider.errors import ConfigError
from outrider.measure.live import LiveRun, decode_live
from outrider.measure.planned import plan_of, replay_plan
from outrider.measure.target_pass import read_text
from outrider.models.llama import LlamaTarget
from outrider.sampling.params import SamplingParams
from outrider.types import NO_DRAFT, ROOT, Proposal
from tests.drafters.heads import VOCAB, tiny_head, tiny_target
from tests.engine.support import Scripted, table_model
from tests.measure.helpers import padded, questions, text_of
from tests.measure.test_replay import FLOAT32

COSTS = CostTable(passes=RowCosts(rows=(1, 8, 64), ms=(10.0, 14.0, 60.0)))
"""Rows that cost something, so that the planner has something to decide."""


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return tiny_target()


def makers(target: LlamaTarget) -> dict[str, Callable[[], Drafter]]:
    head, half = tiny_head(target), target.slice_layers(2)
    return {
        "ngram": NGramDrafter,
        "suffix": lambda: SuffixDrafter(rule="chain"),
        "slice": lambda: LMDrafter(half, name="slice"),
        "head": lambda: EagleDrafter(head, FLOAT32),
        "portfolio": lambda: portfolio_of([SuffixDrafter(rule="chain"), EagleDrafter(head, FLOAT32)], name="auto"),
    }


def decode(target: LlamaTarget, drafter: Drafter, params: SamplingParams) -> list[LiveRun]:
    """Decode with a planner, one request after the other."""
    asked = questions(5, params, vocab=VOCAB)
    return list(decode_live(target, drafter, asked, num_draft_tokens=5, batch_size=1, schedule="adaptive", costs=COSTS))


@pytest.mark.parametrize("name", makers(tiny_target()))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_recorded_plan_gives_the_same_passes(target: LlamaTarget, name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3 if temperature else None, max_tokens=24, top_p=0.95)
    runs = decode(target, makers(target)[name](), params)
    assert len({step.depth for run in runs for step in run.plan}) > 1, "a planner that decides nothing proves nothing"
    drafter = makers(target)[name]()
    for key, run in enumerate(runs):
        read = read_text(target, text_of(run, target), wanted_taps(drafter))
        scores = replay_plan(drafter, read, run.plan, key=key)
        counted = replace(run.counts, draft_ms=0.0, verify_ms=0.0, other_ms=0.0)
        assert padded(scores.counts[0]) == padded(counted) and scores.marks == run.marks


def test_a_plan_that_drafted_less_is_followed() -> None:
    """The planner cut a proposal of four to one token: so does replay."""
    target = table_model(3, scale=2.5)

    def always(request: DraftRequest) -> Proposal:
        return Proposal.chain([1, 2, 3, 4][: request.num_draft_tokens], drafter="always")

    asked = questions(1, SamplingParams(max_tokens=30), vocab=7)
    [run] = decode_live(target, Scripted(always), asked, num_draft_tokens=1, batch_size=1)
    read = read_text(target, text_of(run, target), ())
    plan = [replace(step, depth=4) for step in run.plan]
    scores = replay_plan(Scripted(always), read, plan, key=0)
    assert scores.counts[0].drafted == run.counts.drafted == sum(step.num_nodes for step in plan) > 20


def test_a_plan_of_another_text_is_refused() -> None:
    target = table_model(3, scale=2.5)
    drafter = NGramDrafter()
    params = SamplingParams(temperature=0.9, max_tokens=30)
    [run] = decode_live(target, drafter, questions(1, params, vocab=7), num_draft_tokens=4, batch_size=1)
    read = read_text(target, text_of(run, target), ())
    for plan, words in ((run.plan[:-1], "fewer passes"), ((*run.plan, run.plan[0]), "more passes")):
        with pytest.raises(ConfigError, match=words):
            replay_plan(NGramDrafter(), read, plan, key=0)


def fork(request: DraftRequest) -> Proposal:
    """Two siblings, and a child of the first."""
    if request.num_draft_tokens < 2:
        return NO_DRAFT
    return Proposal(tokens=(1, 2, 3), parents=(ROOT, ROOT, 0), drafter="fork")


def test_a_tree_is_replayed_whole_and_refused_where_nodes_were_left_out() -> None:
    target = table_model(3)
    asked = questions(1, SamplingParams(max_tokens=20), vocab=7)
    [run] = decode_live(target, Scripted(fork), asked, num_draft_tokens=4, batch_size=1)
    read = read_text(target, text_of(run, target), ())
    scores = replay_plan(Scripted(fork), read, run.plan, key=0)
    assert scores.marks == run.marks and scores.counts[0].drafted == run.counts.drafted
    pruned = replace(run.plan[0], num_nodes=1)
    with pytest.raises(ConfigError, match="does not say which"):
        replay_plan(Scripted(fork), read, (pruned, *run.plan[1:]), key=1)


def test_the_reading_of_the_prompt_is_no_pass_of_the_plan() -> None:
    target = table_model(3)
    [run] = decode_live(
        target, NGramDrafter(), questions(1, SamplingParams(max_tokens=9), vocab=7), num_draft_tokens=2, batch_size=1
    )
    assert len(run.plan) == run.counts.passes == len(run.marks) and plan_of(()) == ()
