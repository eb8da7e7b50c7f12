"""Heads in the engine: identity with every kind of target, and the exact law with drawn chains."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

from outrider.device import Placement, Precision
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.tree import TreeShape
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.models.base import LoadedTarget, PackedRows
from outrider.models.config import LlamaConfig
from outrider.models.llama import LlamaTarget
from outrider.models.native import NativeTarget
from outrider.native.library import is_available
from outrider.sampling.params import SamplingParams

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    norm_eps=1e-5,
    max_positions=512,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)
SHAPE = TreeShape(depth=3, width=3, num_nodes=7)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [3] * 20]


def make_target(kind: str, config: LlamaConfig = CONFIG) -> LoadedTarget:
    backend, precision = kind.split()
    precisions: dict[str, Precision] = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8"}
    placement = Placement(device=CPU, precision=precisions[precision])
    if backend == "pytorch":
        return LlamaTarget.random(config, placement, seed=2)
    if not is_available("portable"):
        pytest.skip("the native library cannot be built here")
    return NativeTarget.random(config, placement, seed=2)


def make_head(target: LoadedTarget, config: LlamaConfig, draft_ids: list[int]) -> EagleHead:
    head = EagleHead(EagleConfig.for_target(config, draft_vocab_size=len(draft_ids)))
    head.initialise(draft_ids, seed=1)
    head.attach_embedding(target.checkpoint.tensor("model.embed_tokens.weight"))
    return head.requires_grad_(False)


@pytest.mark.parametrize("kind", ["pytorch float32", "native bfloat16", "native int8"])
@pytest.mark.parametrize("tree", [None, SHAPE], ids=["chain", "tree"])
def test_output_is_plain_output(kind: str, tree: TreeShape | None) -> None:
    target = make_target(kind)
    precision: Precision = "float32" if kind.endswith("float32") else "bfloat16"
    head = make_head(target, CONFIG, list(range(1, 100, 2)))
    for params in (
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, frequency_penalty=0.6),
        SamplingParams(max_tokens=24, temperature=1.4, seed=6),
        SamplingParams(max_tokens=24, temperature=1.2, top_k=30, top_p=0.95, seed=6, n=2),
    ):
        config = EngineConfig(num_draft_tokens=4, schedule="fixed", prefill_chunk=8)
        drafter = EagleDrafter(head, Placement(device=CPU, precision=precision), tree=tree)
        plain = Engine(target, config=config).generate(PROMPTS, params)
        got = Engine(target, drafter=drafter, config=config).generate(PROMPTS, params)
        assert [r.token_ids for r in got] == [r.token_ids for r in plain]
        assert sum(r.stats.drafted for r in got) > 100
    assert sum(r.stats.accepted for r in got) > 0, "no draft was ever kept: half of the test is void"


NUM_REQUESTS, NUM_TOKENS, VOCAB = 2000, 3, 6
SMALL = replace(CONFIG, vocab_size=VOCAB, num_layers=2, eos_token_ids=())
PROMPT = [1, 2]


def exact_law(target: LoadedTarget, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every three-token output, by reading every text alone."""
    law: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        cache = target.new_cache()
        rows = PackedRows.pack([[*PROMPT, *tokens]], slots=[cache.allocate(5)], starts=[0], device=CPU)
        logits = target.forward(rows, cache).logits_RV.double()[1 : 1 + NUM_TOKENS] / params.temperature
        law[tokens] = math.exp(
            sum(float(row[token]) for row, token in zip(logits.log_softmax(-1), tokens, strict=True))
        )
    return law


@pytest.mark.parametrize(("tree", "min_prob"), [(None, 0.0), (None, 0.3), (SHAPE, 0.0)])
def test_output_follows_the_law(tree: TreeShape | None, min_prob: float) -> None:
    """Requests carry no seed, so chains are drawn and verified by rejection; the engine's entropy is fixed instead."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9)
    target = make_target("pytorch float32", SMALL)
    head = make_head(target, SMALL, [0, 2, 3, 5])
    drafter = EagleDrafter(head, Placement(device=CPU, precision="float32"), tree=tree, min_prob=min_prob)
    seeds = itertools.count(999)
    config = EngineConfig(num_draft_tokens=3, schedule="fixed", num_cached_prefixes=0, max_batch_size=250)
    engine = Engine(target, drafter=drafter, config=config, entropy=lambda: next(seeds))
    results = engine.generate([PROMPT] * NUM_REQUESTS, params)
    assert (
        sum(r.stats.accepted for r in results) > 200 and sum(r.stats.drafted > r.stats.accepted for r in results) > 200
    )
    counts = Counter(r.token_ids for r in results)
    law = exact_law(target, params)
    cells = [(counts[tokens], NUM_REQUESTS * p) for tokens, p in law.items() if NUM_REQUESTS * p >= 8]
    cells.append((NUM_REQUESTS - sum(c for c, _ in cells), NUM_REQUESTS - sum(e for _, e in cells)))
    g = 2 * sum(seen * math.log(seen / expected) for seen, expected in cells if seen)
    assert len(cells) > 20 and float(chi2.sf(g, df=len(cells) - 1)) > 1e-4
