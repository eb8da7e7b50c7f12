"""The engine's sampled output follows the target's law: G-test against a table that is known exactly.

Requests carry no seed, so that rejection verification runs; the test fixes the engine's entropy instead.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from scipy.stats import chi2

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import warp_logits
from tests.engine.support import VOCAB, Scripted, drawn_chains, random_chains, random_trees, table_model

NUM_REQUESTS = 2000
NUM_TOKENS = 3
PROMPT = [1, 2]
DRAFT_LAW = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.15, 0.05])


def exact_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every three-token output."""
    logits = table_model(3)._logits.double()
    law: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        history, probability = list(PROMPT), 1.0
        for token in tokens:
            row = logits[history[-2], history[-1]].unsqueeze(0)
            probability *= float(warp_logits(row, [params]).softmax(-1)[0, token])
            history.append(token)
        law[tokens] = probability
    return law


def sampled(params: SamplingParams, drafter: Scripted | None, verification: str = "auto") -> Counter[tuple[int, ...]]:
    seeds = itertools.count(12345)
    config = EngineConfig(
        num_draft_tokens=3, schedule="fixed", verification=verification, num_cached_prefixes=0, max_batch_size=500
    )
    engine = Engine(table_model(3), drafter=drafter, config=config, entropy=lambda: next(seeds))
    results = engine.generate([PROMPT] * NUM_REQUESTS, params)
    assert drafter is None or sum(r.stats.accepted for r in results) > 100, "hardly any draft was kept: test void"
    return Counter(result.token_ids for result in results)


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """G-test with rare cells pooled; an impossible outcome gives 0."""
    if any(law[tokens] == 0 for tokens in counts):
        return 0.0
    total = sum(counts.values())
    cells: list[tuple[float, float]] = []
    rest_seen = rest_expected = 0.0
    for tokens, probability in law.items():
        expected, seen = total * probability, counts[tokens]
        if expected >= 10:
            cells.append((seen, expected))
        else:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
    if rest_expected > 0:
        cells.append((rest_seen, rest_expected))
    g = 2 * sum(seen * math.log(seen / expected) for seen, expected in cells if seen)
    return float(chi2.sf(g, df=len(cells) - 1))


PARAMS = {
    "T1": SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS),
    "T1.3-top_k": SamplingParams(temperature=1.3, top_k=3, max_tokens=NUM_TOKENS),
    "T0.8-top_p": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, max_tokens=NUM_TOKENS),
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("kind", ["plain", "rejection", "compare", "random", "trees"])
def test_output_follows_the_law(name: str, kind: str) -> None:
    drafters = {
        "plain": None,
        "rejection": drawn_chains(DRAFT_LAW),
        "compare": drawn_chains(DRAFT_LAW),
        "random": random_chains(1),
        "trees": random_trees(2),
    }
    counts = sampled(PARAMS[name], drafters[kind], "compare" if kind == "compare" else "auto")
    assert p_value(counts, exact_law(PARAMS[name])) > 1e-4


def test_the_test_sees_a_wrong_temperature() -> None:
    counts = sampled(PARAMS["T1"], drawn_chains(DRAFT_LAW))
    wrong = SamplingParams(temperature=1.3, max_tokens=NUM_TOKENS)
    assert p_value(counts, exact_law(wrong)) < 1e-6
