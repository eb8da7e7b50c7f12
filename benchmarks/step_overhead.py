"""What a decode step costs besides the model's passes: microseconds of Python by part, batch and arm.

The target looks each row's next token up and the head reads it off, so that next to nothing but the engine is left. Times
are of the thread's own processor time, so that others on the machine disturb them little. The planner is told that passes
(and the head) take what :data:`PASSES` and its own table say: else it would learn that passes are free, and draft nothing.

Arms: ``off`` no drafter; ``idle`` a drafter whose drafts are never kept, so that the planner leaves it alone; ``adaptive``
texts that repeat themselves, so that drafts pay. The parts come from a run of their own with clocks around them, which
costs a little; ``step`` is timed without.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, wide_console, write_json
from outrider.cache.base import Cache
from outrider.drafters.base import Drafter, DraftRequest
from outrider.drafters.portfolio import portfolio_of
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import step as engine_step
from outrider.engine.config import EngineConfig
from outrider.engine.costs import CostTable, DraftCosts, RowCosts
from outrider.engine.engine import Engine
from outrider.models.base import ForwardResult, GreedyResult, PackedRows, TargetSpec
from outrider.models.table import TableCache
from outrider.sampling.params import SamplingParams
from outrider.types import Proposal

__all__ = ["ARMS", "Cell", "FreeTarget", "main", "measure"]

ARMS = ("off", "idle", "adaptive")
PARTS = ("planner", "drafters", "judge", "commit", "scheduler", "target", "other")
DRAFTERS = ("suffix", "head", "both")
PASSES = RowCosts(rows=(1, 4, 8, 16, 32, 64, 128, 256), ms=(8.0, 8.1, 8.4, 12.2, 21.9, 40.6, 78.0, 153.0))
"""About what a small model costs on two cores: flat, then each row costs more than half a millisecond."""
HEAD = DraftCosts(fixed=0.2, level=0.5, sequence=0.1, node=0.03)
LOOKUP = DraftCosts(sequence=0.03)
VOCAB, PERIOD = 4096, 40
WARM_UP = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One place of the grid: what is decoded, and how."""

    arm: str
    batch: int
    context: int
    drafter: str
    num_draft_tokens: int


class FreeCache(TableCache):
    """Remembers lengths only."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[int, int] = defaultdict(int)

    def free(self, slot: int) -> None:
        """Give the slot back."""
        super().free(slot)
        del self.lengths[slot]

    def length(self, slot: int) -> int:
        """Cached tokens of the slot."""
        return self.lengths[slot]

    def keep(self, slot: int, *, base: int, path: Sequence[int]) -> None:
        """Keep ``base`` tokens and as many more as ``path`` has."""
        self.lengths[slot] = base + len(path)


class FreeTarget:
    """A :class:`outrider.models.base.Target` whose passes cost nothing.

    Args:
        repeats: True: every text walks through a cycle of :data:`PERIOD` tokens and slips now and then. False: what
            follows is a hash of token and position, which no drafter guesses.
    """

    def __init__(self, *, repeats: bool) -> None:
        self.tokenizer = None
        self.repeats = repeats
        self.spec = TargetSpec(
            name="free",
            vocab_size=VOCAB,
            hidden_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_width=1,
            max_positions=1 << 20,
            eos_token_ids=(),
            precision="float32",
            device=torch.device("cpu"),
            fingerprint="free",
            path="native",
        )

    def new_cache(self) -> FreeCache:
        """An empty cache."""
        return FreeCache()

    def num_weight_bytes(self) -> int:
        """None."""
        return 0

    def follow(self, tokens_R: Tensor, positions_R: Tensor) -> Tensor:
        """The token behind each row."""
        if self.repeats:
            return (tokens_R + 1 + 7 * (positions_R % 23 == 0)) % PERIOD
        return ((tokens_R * 40503 + positions_R * 2654435) >> 4) % VOCAB

    def forward(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> ForwardResult:
        """Only the greedy pass is free."""
        raise AssertionError("greedy requests only")

    def forward_greedy(self, rows: PackedRows, cache: Cache, *, taps: Sequence[int] = ()) -> GreedyResult:
        """Look up every row's token."""
        lengths = cast(FreeCache, cache).lengths
        for segment in rows.segments:
            lengths[segment.slot] += segment.num_rows
        tokens_R = self.follow(rows.tokens_R, rows.positions_R)
        return GreedyResult(tokens_R=tokens_R if rows.logit_rows is None else tokens_R[list(rows.logit_rows)])


class FreeHead:
    """A drafter that counts as one with a model, and says what a text that repeats itself would say."""

    def __init__(self) -> None:
        self.name = self.cost_key = "head"
        self.nodes_per_level, self.levels, self.deepest = 1.0, 16, 16
        self.card_rates: tuple[float, ...] = ()

    def backlog(self, sequence: int, num_tokens: int) -> int:
        """It has read everything."""
        return 0

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """Nothing to remember."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Count on from the last token."""
        lasts = [(request.tokens[-1], request.num_draft_tokens) for request in requests]
        return [Proposal.chain([(t + 1 + i) % PERIOD for i in range(n)], drafter="head") for t, n in lasts]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Nothing to remember."""

    def finish(self, sequence: int) -> None:
        """Nothing to forget."""


class Clocks:
    """Processor time by part; a part that runs inside another is taken out of it."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = defaultdict(int)
        self._running: list[str] = ["other"]
        self._since = time.thread_time_ns()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count every call of ``owner.name`` as this part."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self._turn("")

        setattr(owner, name, timed)

    def reset(self) -> None:
        """Begin anew."""
        self.ns.clear()
        self._since = time.thread_time_ns()

    def stop(self) -> dict[str, int]:
        """What was counted since :meth:`reset`."""
        self._turn("other")
        self._running.pop()
        return dict(self.ns)

    def _turn(self, part: str) -> None:
        now = time.thread_time_ns()
        self.ns[self._running[-1]] += now - self._since
        self._since = now
        if part:
            self._running.append(part)
        else:
            self._running.pop()


def make_engine(cell: Cell) -> Engine:
    """An engine with all of the cell's requests in it, none of them started."""
    members: dict[str, list[Any]] = {"suffix": [SuffixDrafter()], "head": [FreeHead()]}
    members["both"] = members["suffix"] + members["head"]
    chosen: list[Drafter] = [] if cell.arm == "off" else members[cell.drafter]
    drafter = portfolio_of(chosen, name="both") if len(chosen) > 1 else (chosen or [None])[0]
    config = EngineConfig(
        max_batch_size=cell.batch, num_draft_tokens=cell.num_draft_tokens, num_cached_prefixes=0, cache_memory_gb=4.0
    )
    costs = CostTable(passes=PASSES, drafts={"head": HEAD, "suffix": LOOKUP})
    engine = Engine(FreeTarget(repeats=cell.arm == "adaptive"), drafter=drafter, config=config, costs=costs)
    _tell_costs(engine)
    draw = random.Random(7)
    widest = PERIOD if cell.arm == "adaptive" else VOCAB
    for _ in range(cell.batch):
        prompt = [draw.randrange(widest) for _ in range(cell.context)]
        engine.submit(prompt, SamplingParams(max_tokens=100_000, temperature=0))
    return engine


def _tell_costs(engine: Engine) -> None:
    """Whatever the clocks say, the planner learns that passes and the head took what the table says; lookups are real."""
    live = engine.planner.costs
    learn_pass, learn_draft = live.learn_pass, live.learn_draft

    def told_pass(*, num_sequences: int, rows: int, context: float, verify_ms: float, other_ms: float) -> None:
        learn_pass(
            num_sequences=num_sequences, rows=rows, context=context, verify_ms=PASSES(rows), other_ms=0.01 * rows
        )

    def told_draft(name: str, *, num_sequences: int, depth: int, num_read: int, draft_ms: float) -> None:
        costs = live.table.drafts[name]
        ms = costs(num_sequences, depth) + costs.row * num_read if name == "head" else draft_ms
        learn_draft(name, num_sequences=num_sequences, depth=depth, num_read=num_read, draft_ms=ms)

    object.__setattr__(live, "learn_pass", told_pass)
    object.__setattr__(live, "learn_draft", told_draft)


@contextmanager
def _clocked(engine: Engine) -> Iterator[Clocks]:
    """Clocks around the parts of a step."""
    clocks = Clocks()
    planner, machinery = engine.planner, engine._machinery
    for name in ("open", "ask_models", "prune", "learn", "wants_taps"):
        clocks.wrap(planner, name, "planner")
    for member in getattr(engine.drafter, "parts", [engine.drafter] if engine.drafter else []):
        clocks.wrap(member, "propose", "drafters")
    clocks.wrap(machinery.target, "forward_greedy", "target")
    clocks.wrap(engine._scheduler, "plan", "scheduler")
    before = engine_step.judge, engine_step.commit
    clocks.wrap(engine_step, "judge", "judge")
    clocks.wrap(engine_step, "commit", "commit")
    try:
        yield clocks
    finally:
        setattr(engine_step, "judge", before[0])  # noqa: B010
        setattr(engine_step, "commit", before[1])  # noqa: B010


def measure(cell: Cell, *, steps: int, rounds: int) -> dict[str, Any]:
    """Microseconds a step: the median and the range over rounds of ``steps`` steps, and the parts of one more round."""
    engine = make_engine(cell)
    while engine.stats().running < cell.batch:
        engine.step()
    _run(engine, WARM_UP)
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        before = replace(engine.planner.log.counters)
        times = [_run(engine, steps) for _ in range(rounds)]
        counters = engine.planner.log.counters
        with _clocked(engine) as clocks:
            clocks.reset()
            _run(engine, steps)
            parts = clocks.stop()
    finally:
        if was_enabled:
            gc.enable()
    num_steps = counters.steps - before.steps
    return {
        "arm": cell.arm,
        "batch": cell.batch,
        "context": cell.context,
        "drafter": "none" if cell.arm == "off" else cell.drafter,
        "step_us": round(median(times), 1),
        "least_us": round(min(times), 1),
        "most_us": round(max(times), 1),
        "parts_us": {name: round(parts.get(name, 0) / 1e3 / steps, 1) for name in PARTS},
        "nodes_a_step": round((counters.nodes - before.nodes) / num_steps, 2),
        "tokens_a_step": round((counters.tokens - before.tokens) / num_steps, 2),
    }


def _run(engine: Engine, steps: int) -> float:
    """Microseconds of processor time a step."""
    begun = time.thread_time_ns()
    for _ in range(steps):
        engine.step()
    return (time.thread_time_ns() - begun) / 1e3 / steps


def print_cells(cells: Sequence[dict[str, Any]]) -> None:
    """One line a cell."""
    table = Table(title="microseconds of processor time a step, passes aside", title_justify="left")
    for name in ("arm", "drafter"):
        table.add_column(name)
    for name in ("batch", "context", "nodes", "tokens", "step", "range", "to off", *PARTS):
        table.add_column(name, justify="right")
    plain = {(each["batch"], each["context"]): each["step_us"] for each in cells if each["arm"] == "off"}
    for each in cells:
        off = plain.get((each["batch"], each["context"]))
        numbers = (each["batch"], each["context"], each["nodes_a_step"], each["tokens_a_step"], each["step_us"])
        spread = f"{each['least_us']:.0f}-{each['most_us']:.0f}"
        more = "" if off is None else f"{each['step_us'] - off:+.0f}"
        parts = (f"{each['parts_us'][name]:.0f}" for name in PARTS)
        table.add_row(each["arm"], each["drafter"], *map(str, numbers), spread, more, *parts)
    wide_console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Measure every cell of the grid."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    cells = [
        Cell(arm=arm, batch=batch, context=context, drafter=args.drafter, num_draft_tokens=args.num_draft_tokens)
        for batch in args.batch
        for context in args.context
        for arm in args.arm
    ]
    head = {"kind": "step_overhead", **describe_run("benchmarks.step_overhead", arguments)}
    measured = []
    for cell in cells:
        measured.append(measure(cell, steps=args.steps, rounds=args.rounds))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    stamp = head["started"].replace(":", "").replace("+0000", "")
    path = args.out or RESULTS / f"step_overhead-{stamp}.json"
    write_json(path, {**head, "cells": measured})
    print_cells(measured)
    print(f"result: {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead", description=__doc__)
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[100], help="tokens of each prompt")
    parser.add_argument("--drafter", choices=DRAFTERS, default="suffix")
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/, named by time)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
