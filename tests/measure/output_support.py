"""Made-up measurements with known rates, for tests of what is computed from records and shown of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.measure.record import (
    Arm,
    Counts,
    MeasureResult,
    PassCosts,
    Piece,
    RequestRecord,
    Sample,
    SkippedRow,
)

COSTS_ROWS, COSTS_MS = (1, 2, 4, 8, 16), (10.0, 10.1, 10.3, 10.6, 17.0)
CATEGORIES = {"rag": 0.8, "math": 0.65, "chat": 0.35}
"""Chance that a draft token is kept, by category, for the best drafter."""


def chain(drafter: str, k: int, **others: Any) -> Arm:
    return Arm(drafter=drafter, shape=f"chain {k}", num_draft_tokens=k, **others)


def tree(drafter: str, depth: int) -> Arm:
    return Arm(drafter=drafter, shape=f"tree depth={depth} width=3 num_nodes=8", num_draft_tokens=depth)


def counts(
    noise: np.random.Generator,
    *,
    rate: float,
    k: int,
    passes: int = 60,
    draft_rate: float = 1.0,
    nodes: int | None = None,
) -> Counts:
    """A request whose draft tokens are kept with chance ``rate`` each, up to ``k`` of them in ``draft_rate`` of passes."""
    steps = int(noise.binomial(passes, draft_rate))
    kept = np.minimum(noise.geometric(max(1e-9, 1 - rate), size=steps) - 1, k)
    by_depth = [int((kept >= depth).sum()) for depth in range(1, k + 1)]
    accepted = int(kept.sum())
    return Counts(
        passes=passes,
        steps=steps,
        committed=passes + accepted,
        drafted=steps * (nodes or k),
        accepted=accepted,
        reached=tuple(map(float, [steps, *by_depth[:-1]])) if steps else (),
        kept=tuple(map(float, by_depth)) if steps else (),
    )


def record(
    arm: Arm, line: int, given: Counts, *, labels: Mapping[str, str] | None = None, **others: Any
) -> RequestRecord:
    fields = {"id": f"request-{line}", "source": "replay", "num_prompt_tokens": 40, "num_output_tokens": 90, **others}
    return RequestRecord(line=line, labels=labels or {}, arm=arm, counts=given, **fields)


ARMS: tuple[tuple[Arm, float, float, int | None], ...] = (
    *((chain("suffix", k), 1.0, 0.7, None) for k in (1, 2, 4, 8)),
    *((chain("ngram", k), 0.8, 0.5, None) for k in (1, 2, 4, 8)),
    *((chain("heads/tool-head", k), 0.9, 1.0, None) for k in (1, 2, 4, 8)),
    (tree("merged:heads/tool-head", 4), 1.05, 1.0, 8),
    (chain("random", 4), 0.0, 1.0, None),
)
"""(arm, quality beside the category's rate, share of passes with drafts, nodes of a tree)."""


def made_up(
    num_lines: int = 60,
    *,
    seed: int = 0,
    arms: Sequence[tuple[Arm, float, float, int | None]] = ARMS,
    settings: Mapping[str, Any] | None = None,
) -> MeasureResult:
    """A whole result: several drafters, three categories, skipped lines, samples and times."""
    noise = np.random.default_rng(seed)
    names = list(CATEGORIES)
    records = []
    for line in range(1, num_lines + 1):
        category = names[line % len(names)]
        labels = {"category": category, "context": ("0-255", "256-1023")[line % 2], "turn": str(1 + line % 2)}
        for arm, quality, draft_rate, nodes in arms:
            rate = min(0.95, CATEGORIES[category] * quality)
            given = counts(noise, rate=rate, k=arm.num_draft_tokens, draft_rate=draft_rate, nodes=nodes)
            records.append(record(arm, line, given, labels=labels))
    return MeasureResult(
        arms=tuple(arm for arm, *_ in arms),
        records=tuple(records),
        samples=(_sample(arms[0][0], "request-1"), _sample(arms[-1][0], "request-2")),
        skipped=(SkippedRow(line=num_lines + 1, reason="not JSON"), SkippedRow(line=num_lines + 3, reason="empty")),
        num_rows=num_lines + 2,
        settings={
            "target": "models/small-chat",
            "fingerprint": "0123456789abcdef",
            "precision": "int8",
            "device": "cpu",
            "traffic": "/home/somebody/traffic/week-12.jsonl",
            "versions": {"outrider": "0.1", "torch": "2.13"},
            **(settings or {}),
        },
        costs=made_up_costs([arm for arm, *_ in arms]),
    )


def made_up_costs(arms: Sequence[Arm]) -> PassCosts:
    """Cheap lookups, heads at half a millisecond a level, and a random drafter that costs much."""
    per_level = {"suffix": 0.02, "ngram": 0.02, "random": 2.0}
    draft_ms = {arm.name: per_level.get(arm.drafter, 0.5) * arm.num_draft_tokens for arm in arms}
    return PassCosts(rows=COSTS_ROWS, pass_ms=COSTS_MS, draft_ms=draft_ms, num_cached=256)


def _sample(arm: Arm, id: str) -> Sample:
    pieces = [("def ", "target"), ("add(a, b):\n    return ", "kept"), ("c", "refused"), ("a", "target")]
    pieces += [(" + b", "kept"), ("\n", "refused"), (" # the sum", "target")]
    return Sample(id=id, arm=arm, pieces=tuple(Piece(text=text, kind=kind) for text, kind in pieces))  # type: ignore[arg-type]
