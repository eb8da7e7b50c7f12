"""A machine of known costs and drafts of known chances, in plain Python: what the planner decides, and what that is worth.

Decisions are scored by the tokens that they commit on average, while the planner learns from drafts that were drawn, so that
a few thousand steps tell speeds to a per mille.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable, DraftCosts, RowCosts
from outrider.engine.plan import Call, StepPlan
from outrider.engine.planner import Planner
from outrider.engine.speculation import DEFAULT_SPECULATION, SpeculationParams
from outrider.types import NO_DRAFT, Proposal, StepReport

CURVE = RowCosts(rows=(1, 4, 8, 16, 32, 64, 128, 256), ms=(10.0, 10.1, 11.5, 16.0, 26.0, 46.0, 86.0, 166.0))
"""About what a small model costs in bfloat16 on two cores: flat, then a row costs half a millisecond."""
HEAD = DraftCosts(fixed=0.2, level=0.5, sequence=0.1, node=0.03)
TABLE = CostTable(passes=CURVE, drafts={"head": HEAD})


@dataclass
class FakeModel:
    """What the planner reads of a drafter that runs a model."""

    name: str = "head"
    cost_key: str = "head"
    nodes_per_level: float = 1.0
    levels: int = 100
    deepest: int = 100
    card_rates: tuple[float, ...] = ()
    unread: int = 0

    def backlog(self, sequence: int, num_tokens: int) -> int:
        return self.unread


@dataclass
class FakeLookup:
    """What the planner reads of a drafter that runs none."""

    name: str = "lookup"


@dataclass
class Running:
    """What the planner reads of a sequence."""

    key: int = 0
    most_drafts: int = 1000
    num_tokens: int = 200
    speculation: SpeculationParams = DEFAULT_SPECULATION


def step(depth: int, kept: int, *, batch_size: int = 1, rows: int = 1, verify_ms: float = 10.0) -> StepReport:
    """A step that drafted a chain of ``depth`` of which ``kept`` were kept."""
    return StepReport(
        tokens=tuple(range(kept + 1)),
        drafted=depth,
        accepted=kept,
        reached=tuple(int(i <= kept) for i in range(depth)),
        kept=tuple(int(i < kept) for i in range(depth)),
        drafter="head" if depth else "",
        verify_ms=verify_ms,
        batch_size=batch_size,
        rows=rows,
    )


@dataclass
class Outcome:
    """What a run was worth.

    Attributes:
        tokens: committed on average; ms: of the machine; depths: of every sequence and step, in order.
    """

    tokens: float = 0.0
    ms: float = 0.0
    depths: list[list[int]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.ms


def machine_ms(rows: int, calls: Sequence[tuple[int, int]], costs: DraftCosts) -> float:
    """The truth: one pass, and calls for (sequences, depth)."""
    return CURVE(rows) + sum(costs(size, depth) for size, depth in calls if size)


def fixed_speed(batch: int, k: int, chance: float, costs: DraftCosts = HEAD) -> float:
    """Tokens a millisecond of always drafting ``k``."""
    tokens = batch * sum(chance**i for i in range(k + 1))
    return tokens / machine_ms(batch * (1 + k), [(batch, k)] if k else [], costs)


def best_fixed(batch: int, chance: float, most: int = 8, costs: DraftCosts = HEAD) -> float:
    """Of the best k, 0 among them."""
    return max(fixed_speed(batch, k, chance, costs) for k in range(most + 1))


def make_planner(
    *, k: int = 8, costs: CostTable = TABLE, schedule: str = "adaptive", card: tuple[float, ...] = ()
) -> Planner:
    """With one model drafter."""
    config = EngineConfig.from_dict({"num_draft_tokens": k, "schedule": schedule})
    return Planner(config, costs, [FakeModel(card_rates=card)])  # type: ignore[list-item]


def simulate(
    planner: Planner,
    *,
    batch: int,
    steps: int,
    chance: Callable[[int, int], float],
    seed: int = 0,
    costs: DraftCosts = HEAD,
    length: int = 200,
    truth: Callable[[int, int, int], float] = lambda now, rows, batch: CURVE(rows),
) -> Outcome:
    """Decode ``steps`` steps of ``batch`` sequences, each replaced by a new one after ``length`` steps.

    Args:
        planner: of one model drafter.
        chance: that a draft is kept where verification stands before it, by step and row of the batch.
        truth: milliseconds of a pass, by step, rows and sequences; the planner's table says what ``CURVE`` says.
    """
    rng, outcome = random.Random(seed), Outcome()
    live = [Running(key=index) for index in range(batch)]
    born = [-(index * length) // batch for index in range(batch)]
    for now in range(steps):
        for row in range(batch):
            if now - born[row] >= length:
                planner.forget(live[row])
                live[row], born[row] = Running(key=live[row].key + batch), now
        plan, depths = _decide(planner, live, costs)
        proposals = planner.prune(plan, live, [Proposal.chain(range(d)) if d else NO_DRAFT for d in depths])
        chances = [chance(now, row) for row in range(batch)]
        kept = [_kept(depth, p, rng) for depth, p in zip(depths, chances, strict=True)]
        rows = batch + sum(depths)
        pass_ms = truth(now, rows, batch)
        reports = [
            step(d, k, batch_size=batch, rows=rows, verify_ms=pass_ms) for d, k in zip(depths, kept, strict=True)
        ]
        planner.learn(plan, live, proposals, reports)
        outcome.tokens += sum(sum(p**i for i in range(d + 1)) for d, p in zip(depths, chances, strict=True))
        outcome.ms += pass_ms + sum(call.ms for call in plan.calls)
        outcome.depths.append(depths)
    return outcome


def _decide(planner: Planner, live: Sequence[Running], costs: DraftCosts) -> tuple[StepPlan, list[int]]:
    plan = planner.open(live)
    asks = planner.ask_models(plan, live, [NO_DRAFT] * len(live)) or plan.asks
    plan.asks = asks
    depths = [ask.depth for ask in asks]
    size, depth = sum(map(bool, depths)), max(depths)
    if size:
        ms = costs(size, 0) + costs.level * depth + costs.node * (sum(depths))
        plan.calls.append(Call(drafter="head", num_sequences=size, depth=depth, num_read=0, ms=ms))
    return plan, depths


def _kept(depth: int, chance: float, rng: random.Random) -> int:
    for done in range(depth):
        if rng.random() >= chance:
            return done
    return depth
