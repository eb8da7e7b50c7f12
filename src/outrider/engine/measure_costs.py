"""Measuring the cost table of a target and its drafters at start, and keeping it on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.device import synchronize
from outrider.drafters.base import Drafter, DraftRequest, ModelDrafter, TapDrafter
from outrider.engine.costs import CONTEXT, CostTable, DraftCosts, RowCosts
from outrider.engine.taps import joined_taps
from outrider.files import write_json
from outrider.models.base import PackedRows, Target
from outrider.models.cost import PassShape, time_shapes
from outrider.models.fetch import cache_dir
from outrider.sampling.params import SamplingParams
from outrider.types import DraftMode

__all__ = ["cost_file", "keep", "load_or_measure", "measure_costs"]

SECONDS = 1.2
"""About how long the passes of a target may be timed."""
_CHAIN_ROWS = (1, 2, 4, 8, 9, 16, 17)
"""Of one sequence; kernels that work on tiles of 16 rows, some of them with two rows for each of the pass, begin another tile
with the 17th, or the 9th."""
_BATCHED = ((2, 16), (4, 16), (8, 16), (16, 16))
_SINGLES = 16
_LONG = 3
_FEW, _MANY, _SHALLOW, _DEEP = 1, 8, 1, 5
_ROUNDS = 5
_FORMAT = 2
"""Of the file; also to be raised when passes become faster or slower than the kept tables say."""
_WORTH_KEEPING_S = 0.25
"""A table that is measured faster than this is not kept: a tiny model, a table of a test."""


def load_or_measure(target: Target, drafters: Sequence[Drafter]) -> CostTable:
    """The table kept for this target, these drafters and this machine; measured, and kept, if there is none."""
    path = cost_file(target, drafters)
    try:
        return CostTable.from_json(json.loads(path.read_text(encoding="utf-8"))["costs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    began = time.perf_counter()
    table = measure_costs(target, drafters)
    if time.perf_counter() - began > _WORTH_KEEPING_S:
        keep(path, table, target, drafters)
    return table


def keep(path: Path, table: CostTable, target: Target, drafters: Sequence[Drafter]) -> None:
    """Write a table; a cache folder that cannot be written only means that it is measured again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"made_for": _made_for(target, drafters), "costs": table.to_json()})
    except OSError:
        return


def cost_file(target: Target, drafters: Sequence[Drafter]) -> Path:
    """Where the table of this target, these drafters and this machine is kept."""
    text = json.dumps(_made_for(target, drafters), sort_keys=True)
    return cache_dir() / "costs" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def measure_costs(target: Target, drafters: Sequence[Drafter] = (), *, seconds: float = SECONDS) -> CostTable:
    """Time passes and drafts on this machine, now.

    Args:
        target: what to time.
        drafters: those that run models are timed, too, on sequences of their own.
        seconds: about how long the passes may take.
    """
    context = max(2, min(CONTEXT, target.spec.max_positions // 4))
    shapes = _Shapes(context=context, most=target.spec.max_positions)
    timed = time_shapes(target, shapes.all, seconds=seconds, num_needed=len(_CHAIN_ROWS))
    return CostTable(
        passes=RowCosts.fastest({shape.rows: timed[shape] for shape in shapes.curve if shape in timed}),
        sequence_ms=shapes.sequence_ms(timed),
        attended_ms=shapes.attended_ms(timed),
        drafts={
            drafter.name: _measure_drafter(drafter, target, context)
            for drafter in drafters
            if isinstance(drafter, ModelDrafter)
        },
    )


def _made_for(target: Target, drafters: Sequence[Drafter]) -> dict[str, Any]:
    spec = target.spec
    timed = {drafter.name: drafter.cost_key for drafter in drafters if isinstance(drafter, ModelDrafter)}
    return {
        "target": [spec.fingerprint, spec.num_layers, spec.precision, spec.path, str(spec.device)],
        "drafters": timed,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "machine": [platform.machine(), platform.processor(), _processor()],
        "versions": [_FORMAT, torch.__version__],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """Which passes are timed: chains of one sequence, batches, and what tells the cost of sequences and contexts."""

    context: int
    most: int

    @property
    def curve(self) -> list[PassShape]:
        chains = [self._shape(1, rows) for rows in _CHAIN_ROWS]
        return [*chains, *(self._shape(*each) for each in _BATCHED)]

    @property
    def singles(self) -> PassShape:
        return self._shape(_SINGLES, 1)

    @property
    def far(self) -> PassShape:
        return PassShape(num_sequences=_MANY, rows_each=1, num_cached=min(_LONG * self.context, self.most - 1))

    @property
    def near(self) -> PassShape:
        return self._shape(_MANY, 1)

    @property
    def all(self) -> list[PassShape]:
        """In the order of their worth; shapes past the window are left out."""
        first = len(_CHAIN_ROWS) + 1
        wanted = [*self.curve[:first], self.singles, self.curve[first], self.near, self.far, *self.curve[first + 1 :]]
        return [shape for shape in dict.fromkeys(wanted) if shape.num_cached + shape.rows_each <= self.most]

    def sequence_ms(self, timed: dict[PassShape, float]) -> float:
        """As many rows in one sequence and in sequences of one row each."""
        together, apart = self._shape(1, _SINGLES), self.singles
        if together not in timed or apart not in timed:
            return 0.0
        return max(0.0, (timed[apart] - timed[together]) / (_SINGLES - 1))

    def attended_ms(self, timed: dict[PassShape, float]) -> float:
        """The same pass behind short and long contexts."""
        if self.near not in timed or self.far not in timed or self.far.num_cached == self.near.num_cached:
            return 0.0
        more = (self.far.num_cached - self.near.num_cached) * _MANY
        return max(0.0, (timed[self.far] - timed[self.near]) / more)

    def _shape(self, num_sequences: int, rows_each: int) -> PassShape:
        return PassShape(num_sequences=num_sequences, rows_each=rows_each, num_cached=self.context)


def _measure_drafter(drafter: Drafter, target: Target, context: int) -> DraftCosts:
    """Four kinds of calls give four of the numbers, and the first call of a sequence that of reading."""
    tokens = [1 + index % (target.spec.vocab_size - 1) for index in range(context)]
    keys = [-1 - index for index in range(_MANY)]
    deep = min(_DEEP, drafter.levels) if isinstance(drafter, ModelDrafter) else _DEEP
    taps_RD = _real_taps(drafter, target, tokens[:-1])
    for key in keys:
        drafter.start(key, tokens)
        if taps_RD is not None and isinstance(drafter, TapDrafter):
            drafter.absorb(key, 0, taps_RD)
    try:
        _time_call(drafter, target, keys[:1], tokens, _SHALLOW)  # warm up
        reading = _time_call(drafter, target, keys[1:2], tokens, _SHALLOW)
        _time_call(drafter, target, keys, tokens, _SHALLOW)
        best: dict[tuple[int, int], float] = {}
        for _ in range(_ROUNDS):
            for size, depth in itertools.product((_FEW, _MANY), (_SHALLOW, deep)):
                ms = _time_call(drafter, target, keys[:size], tokens, depth)
                best[size, depth] = min(best.get((size, depth), ms), ms)
    finally:
        for key in keys:
            drafter.finish(key)
    return _solved(best, reading, context, deep)


def _solved(best: dict[tuple[int, int], float], reading: float, context: int, depth: int) -> DraftCosts:
    least, deep = best[_FEW, _SHALLOW], best[_FEW, depth]
    wide, both = best[_MANY, _SHALLOW], best[_MANY, depth]
    more, levels = _MANY - _FEW, max(1, depth - _SHALLOW)
    node = max(0.0, (both - wide - deep + least) / (more * levels))
    level = max(0.0, (deep - least) / levels - node)
    sequence = max(0.0, (wide - least) / more - node)
    return DraftCosts(
        fixed=max(0.0, least - level - sequence - node),
        level=level,
        sequence=sequence,
        node=node,
        row=max(0.0, (reading - least) / context),
    )


def _real_taps(drafter: Drafter, target: Target, tokens: Sequence[int]) -> Tensor | None:
    if not isinstance(drafter, TapDrafter):
        return None
    cache = target.new_cache()
    slot = cache.allocate(len(tokens))
    rows = PackedRows.pack([tokens], slots=[slot], starts=[0], device=target.spec.device, logit_rows=(0,))
    return joined_taps(target.forward(rows, cache, taps=drafter.taps).taps, drafter.taps)


def _time_call(drafter: Drafter, target: Target, keys: Sequence[int], tokens: Sequence[int], depth: int) -> float:
    requests = [
        DraftRequest(
            sequence=key,
            tokens=tokens,
            num_draft_tokens=depth,
            mode=DraftMode.GREEDY,
            params=SamplingParams(max_tokens=depth + 1),
            seed=0,
            choice=0,
        )
        for key in keys
    ]
    synchronize(target.spec.device)
    began = time.perf_counter()
    drafter.propose(requests)
    synchronize(target.spec.device)
    return (time.perf_counter() - began) * 1e3
