"""Planner and verifier together keep the target's law: exactly, by enumeration, and in the whole engine, by a G-test.

In a small world everything that is random is integrated in float64: the noise of drafting at every position, each draw, each
acceptance. The planner is the engine's own, with the memory that each history leaves it, so that its budgets and its choice of
drafter depend on everything that they may depend on. After as many steps as it takes, outputs must have the law of plain
decoding.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.audit.cases import World
from outrider.audit.fork import explore
from outrider.audit.law import TOLERANCE, _hinter, _runner
from outrider.drafters.base import DraftRequest
from outrider.drafters.portfolio import portfolio_of
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable, DraftCosts, RowCosts
from outrider.engine.drafting import draft
from outrider.engine.engine import Engine
from outrider.engine.plan import StepPlan
from outrider.engine.planner import Planner
from outrider.engine.report import PassCost, report_of
from outrider.engine.speculation import DEFAULT_SPECULATION, SpeculationParams
from outrider.sampling.params import SamplingParams
from outrider.types import NO_DRAFT, DraftMode, Proposal, Verdict
from tests.engine.support import drawn_chains, random_chains, random_trees, table_model
from tests.engine.test_law import DRAFT_LAW, NUM_REQUESTS, NUM_TOKENS, PARAMS, PROMPT, exact_law, p_value

VOCAB, CELLS, LENGTH, MOST = 2, 3, 4, 2
PARAMS_T1 = SamplingParams(temperature=1.0, max_tokens=LENGTH)
PASS_MS = (10.0, 13.0, 15.0)
COSTS = CostTable(passes=RowCosts(rows=(1, 2, 3), ms=PASS_MS), drafts={"head": DraftCosts(), "copy": DraftCosts()})
"""Rows so dear that one refusal ends drafting; clocks that say nothing."""


class Head:
    """Draws chains from a law of its own; where the noise of a position falls is written in ``cells``."""

    name, cost_key, nodes_per_level, levels, deepest = "head", "head", 1.0, 100, 100

    def __init__(self, laws: Sequence[Sequence[int]], promise: float) -> None:
        self._laws = laws
        self.card_rates = (promise, promise)
        self.cells: tuple[int, ...] = ()

    def __deepcopy__(self, memo: object) -> Head:
        return self  # planners of all histories may share it

    def backlog(self, sequence: int, num_tokens: int) -> int:
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._chain(request) for request in requests]

    def _chain(self, request: DraftRequest) -> Proposal:
        assert request.mode is DraftMode.DRAWN
        tokens: list[int] = []
        rows: list[Tensor] = []
        last, first = request.tokens[-1], len(request.tokens) - 1
        for depth in range(request.num_draft_tokens):
            shares = self._laws[last]
            edges = list(itertools.accumulate(shares))
            last = next(token for token, edge in enumerate(edges) if self.cells[first + depth] < edge)
            tokens.append(last)
            rows.append(torch.tensor(shares, dtype=torch.float64) / CELLS)
        return Proposal.chain(tokens, drafter="head", draft_probs_NV=torch.stack(rows))


class Copy:
    """Proposes the last token again where the text has just repeated itself: a function of the text."""

    name = "copy"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._again(request) for request in requests]

    def _again(self, request: DraftRequest) -> Proposal:
        last = request.tokens[-1]
        if len(request.tokens) < 2 or request.tokens[-2] != last:
            return NO_DRAFT
        return Proposal.chain([last] * request.num_draft_tokens, drafter="copy")


@dataclass
class Sequence1:
    """What drafting reads of a running sequence."""

    tokens: list[int]
    key: int = 0
    index: int = 0
    params: SamplingParams = PARAMS_T1
    speculation: SpeculationParams = DEFAULT_SPECULATION
    seed: int = 0
    grammar: None = None
    prediction: tuple[int, ...] = ()
    most_nodes: int = 1 << 10

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def most_drafts(self) -> int:
        return LENGTH - len(self.tokens)  # the prompt is one token

    @property
    def request(self) -> Sequence1:
        return self

    @property
    def state(self) -> Sequence1:
        return self

    def draft_mode(self, verification: str) -> DraftMode:
        return DraftMode.DRAWN


@dataclass
class History:
    """One of all possible pasts: what was committed, what the planner made of it, and how probable that is."""

    output: tuple[int, ...]
    cells: tuple[int, ...]
    planner: Planner
    probability: float


@dataclass
class Step:
    """A history with what is drafted next."""

    history: History
    sequence: Sequence1
    plan: StepPlan
    proposal: Proposal


@dataclass
class Enumeration:
    """The law of all outputs, and what the planner did on the way."""

    law: dict[tuple[int, ...], float] = field(default_factory=dict)
    decisions: set[tuple[str, int]] = field(default_factory=set)
    depths: dict[int, set[int]] = field(default_factory=dict)  # by output tokens before the step
    num_replaced: int = 0  # times that the head drafted although the text repeats itself


@cache
def enumerate_world(world: int) -> Enumeration:
    """Decode ``LENGTH`` tokens behind the prompt (0,) in every way that there is."""
    logits, laws, promise = world_of(world)
    head, found = Head(laws, promise), Enumeration()
    members = [Copy(), head]
    drafter = portfolio_of(members, name="auto")  # type: ignore[arg-type]
    config = EngineConfig(num_draft_tokens=MOST)
    every = list(itertools.product(range(CELLS), repeat=LENGTH))
    planner = Planner(config, COSTS, members)  # type: ignore[arg-type]
    planner._purse.ms = 0.0
    going = [History((), cells, copy.deepcopy(planner), 1 / len(every)) for cells in every]
    while going:
        steps = []
        for history in going:
            sequence = Sequence1([0, *history.output])
            head.cells = history.cells
            plan, [proposal] = draft(drafter, history.planner, [sequence], "auto")  # type: ignore[list-item]
            plan.calls = []  # clocks of this machine say nothing here
            found.decisions.add((proposal.drafter, len(proposal)))
            found.depths.setdefault(len(history.output), set()).add(len(proposal))
            has_find = len(sequence.tokens) > 1 and sequence.tokens[-1] == sequence.tokens[-2]
            found.num_replaced += has_find and proposal.drafter == "head"
            steps.append(Step(history, sequence, plan, proposal))
        going = _verified(steps, logits)
        for history in [history for history in going if len(history.output) >= LENGTH]:
            found.law[history.output] = found.law.get(history.output, 0.0) + history.probability
        going = [history for history in going if len(history.output) < LENGTH]
    return found


def _verified(steps: Sequence[Step], logits: Tensor) -> list[History]:
    """Every outcome of every step, the planner told of it."""
    starts = [(_world(step, logits), step.proposal, step.history.probability) for step in steps]
    leaves = explore([p for _, _, p in starts], _runner(starts), _hinter(starts))
    after = []
    for leaf in leaves:
        step = steps[leaf.start]
        tokens = _committed(step, leaf.verdict)
        cost = PassCost(
            draft_ms=0, verify_ms=PASS_MS[len(step.proposal)], other_ms=0, batch_size=1, rows=1 + len(step.proposal)
        )
        report = report_of(step.proposal, leaf.verdict, tokens, cost, step.plan.asks[0].depth)
        planner = copy.deepcopy(step.history.planner)
        planner.learn(step.plan, [step.sequence], [step.proposal], [report])
        after.append(History((*step.history.output, *tokens), step.history.cells, planner, leaf.probability))
    return after


def _committed(step: Step, verdict: Verdict) -> tuple[int, ...]:
    run = (*(step.proposal.tokens[node] for node in verdict.path), verdict.next_token)
    return run[: LENGTH - len(step.history.output)]


def _world(step: Step, logits: Tensor) -> World:
    paths = [path for n in range(MOST + 1) for path in itertools.product(range(VOCAB), repeat=n)]
    return World(
        kind="rejection chain",
        vocab_size=VOCAB,
        depth=MOST,
        params=PARAMS_T1,
        prompt=(0,),
        output=step.history.output,
        logits={path: logits[(*step.sequence.tokens, *path)[-1]] for path in paths},
    )


def plain_law(logits: Tensor) -> dict[tuple[int, ...], float]:
    probs = logits.softmax(dim=-1)
    law = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        law[tokens] = 1.0
        for before, token in itertools.pairwise((0, *tokens)):
            law[tokens] *= float(probs[before, token])
    return law


def distance(found: dict[tuple[int, ...], float], law: dict[tuple[int, ...], float]) -> float:
    return sum(abs(found.get(tokens, 0.0) - p) for tokens, p in law.items()) / 2


WORLDS = (
    (((0.4, -0.3), (-0.5, 0.2)), ((2, 1), (1, 2)), 0.5),
    (((1.2, 0.1), (0.3, -0.1)), ((1, 2), (2, 1)), 0.75),
    (((-0.7, 0.6), (0.9, -0.2)), ((3, 0), (2, 1)), 0.5),
)
"""Logits of the target and law of the head, in thirds, behind each last token; and what the head's card promises."""


def world_of(world: int) -> tuple[Tensor, Sequence[Sequence[int]], float]:
    table, laws, promise = WORLDS[world]
    return torch.tensor(table, dtype=torch.float64), laws, promise


@pytest.mark.parametrize("world", range(len(WORLDS)))
def test_budgets_and_choices_from_any_history_keep_the_law(world: int) -> None:
    found = enumerate_world(world)
    assert sum(found.law.values()) == pytest.approx(1.0, abs=1e-12)
    assert distance(found.law, plain_law(world_of(world)[0])) < TOLERANCE


def test_the_worlds_leave_the_planner_something_to_decide() -> None:
    every = [enumerate_world(world) for world in range(len(WORLDS))]
    decisions = set().union(*(found.decisions for found in every))
    assert {("head", 2), ("copy", 2), ("", 0)} <= decisions
    assert any(len(each) > 1 for found in every for each in found.depths.values()), "depth depends on history"
    assert any(found.num_replaced for found in every), "the head may take a find's place"


def test_the_enumeration_sees_a_wrong_law() -> None:
    assert distance(enumerate_world(0).law, plain_law(world_of(1)[0])) > 0.01


@pytest.mark.parametrize("name", ["T1", "T0.8-top_p"])
def test_an_adaptive_engine_with_three_drafters_follows_the_law(name: str) -> None:
    """Drawn chains, random chains and random trees; which and how many, the planner says."""
    seeds = itertools.count(777)
    members = [random_chains(1), random_trees(2), drawn_chains(DRAFT_LAW)]
    costs = CostTable(passes=RowCosts(rows=(1, 64, 500, 4000), ms=(10.0, 12.0, 30.0, 300.0)))
    config = EngineConfig(num_draft_tokens=3, num_cached_prefixes=0, max_batch_size=250)
    engine = Engine(
        table_model(3),
        drafter=portfolio_of(members, name="auto"),
        config=config,
        entropy=lambda: next(seeds),
        costs=costs,
    )
    results = engine.generate([PROMPT] * NUM_REQUESTS, PARAMS[name])
    assert all(len(result.token_ids) == NUM_TOKENS for result in results)
    counters = engine.planner.log.counters
    assert counters.drafted_sequences > 200 and sum(result.stats.accepted for result in results) > 50
    assert p_value(Counter(result.token_ids for result in results), exact_law(PARAMS[name])) > 1e-4
