"""The scheduler on real targets with tiny random weights: on the native path no bit depends on load, chunks or memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.lm import LMDrafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.models.base import LoadedTarget, PackedRows
from outrider.models.native import NativeTarget
from outrider.sampling.params import SamplingParams
from tests.engine.test_heads import SHAPE, make_head, make_target

GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(1, 101, (size,), generator=GENERATOR).tolist() for size in (190, 40, 205, 199)]
PARAMS = [
    SamplingParams(max_tokens=230, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=9, n=2, logprobs=1),
    SamplingParams(max_tokens=220, ignore_eos=True, temperature=0.9, top_p=0.9, seed=4, logprobs=0),
    SamplingParams(max_tokens=200, ignore_eos=True),
]


def drafter_of(kind: str, target: LoadedTarget) -> Drafter | None:
    context = target.context if isinstance(target, NativeTarget) else None
    if kind == "head":
        head = make_head(target, target.checkpoint.config, list(range(0, 101, 3)))
        return EagleDrafter(head, target.placement, tree=SHAPE, context=context)
    return LMDrafter(target.slice_layers(1), name="slice") if kind == "slice" else None


def engine_of(target: LoadedTarget, kind: str, **changes: object) -> Engine:
    values = {"num_draft_tokens": 3, "schedule": "fixed", "num_cached_prefixes": 0, **changes}
    return Engine(target, drafter=drafter_of(kind, target), config=EngineConfig.from_dict(values))


def crowded(engine: Engine) -> list[GenerationResult]:
    """All requests at once; the memory is looked at after every step."""
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.submit(prompt, params)
    results, cache, drafter = [], engine._machinery.cache, engine.drafter
    slack = 1 if engine.target.spec.path.startswith("native") else 2  # idle rows of PyTorch's slabs
    while engine.has_work:
        results += [event.result for event in engine.step() if event.result]
        held = cache.num_bytes() // slack + (drafter.num_bytes() if drafter else 0)  # type: ignore[attr-defined]
        assert held <= engine.cache_bytes_in_use <= engine.cache_bytes_budget
    assert engine.cache_bytes_in_use == 0 == cache.num_bytes()  # type: ignore[attr-defined]
    assert drafter is None or drafter.num_bytes() == 0  # type: ignore[attr-defined]
    return sorted(results, key=lambda result: (result.id, result.index))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("native bfloat16", "plain"),
        ("native int8", "head"),
        ("native bfloat16", "slice"),
        ("pytorch float32", "head"),
        ("pytorch float32", "slice"),
    ],
)
def test_a_crowd_in_little_memory_gives_what_each_gives_alone(path: str, kind: str) -> None:
    target = make_target(path)
    alone = [
        result
        for p, params in zip(PROMPTS, PARAMS, strict=True)
        for result in engine_of(target, "plain").generate([p], params)
    ]
    probe = engine_of(target, kind)._memory
    budget = probe.cost(640) + 3 * probe.cost(256)
    engine = engine_of(target, kind, cache_memory_gb=budget / 1e9, prefill_chunk=96, prefill_while_decoding=23)
    got = crowded(engine)
    is_exact = path.startswith("native")
    if is_exact and kind == "plain":  # the others have memory to spare: what drafters may need is counted generously
        assert engine.stats().num_preemptions > 0, "memory was not scarce: the test is void"
    assert kind == "plain" or sum(result.stats.drafted for result in got) > 100
    for mine, theirs in zip(got, alone, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert not is_exact or mine.logprobs == theirs.logprobs, "the same tokens, but other bits"


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_decoding_rows_and_parts_of_prompts_in_one_pass_have_the_same_bits_as_apart(precision: str) -> None:
    target = make_target(f"native {precision}")
    mixed, apart = target.new_cache(), target.new_cache()
    slots = []
    for prompt in PROMPTS:
        slots.append((mixed.allocate(300), apart.allocate(300)))
        for cache, slot in zip((mixed, apart), slots[-1], strict=True):
            rows = PackedRows.pack([prompt[:30]], slots=[slot], starts=[0], device=torch.device("cpu"))
            target.forward(rows, cache)
    parts = [prompt[30 : 30 + size] for prompt, size in zip(PROMPTS, (1, 4, 67, 133), strict=True)]
    together = PackedRows.pack(
        parts, slots=[slot for slot, _ in slots], starts=[30] * 4, device=torch.device("cpu"), logit_rows=None
    )
    logits_RV = target.forward(together, mixed).logits_RV
    first = 0
    for part, (_, slot) in zip(parts, slots, strict=True):
        for start in range(0, len(part), 50):
            piece = part[start : start + 50]
            rows = PackedRows.pack([piece], slots=[slot], starts=[30 + start], device=torch.device("cpu"))
            assert torch.equal(target.forward(rows, apart).logits_RV, logits_RV[first : first + len(piece)])
            first += len(piece)


def test_all_choices_go_on_from_the_prompt() -> None:
    """Choices that have no choice (top_k 1) are copies of the greedy output."""
    engine = engine_of(make_target("pytorch float32"), "plain")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    [alone] = engine.generate([PROMPTS[0]], params)
    choices = engine.generate([PROMPTS[0]], replace(params, n=3, temperature=1.0, top_k=1))
    assert [choice.token_ids for choice in choices] == [alone.token_ids] * 3
