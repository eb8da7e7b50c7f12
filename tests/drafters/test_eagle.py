"""An EAGLE-3 head as drafter: every draft equals one computed from scratch, whatever was kept before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.device import Placement
from outrider.drafters.base import DraftRequest, TapDrafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.eagle_walk import TorchEntries
from outrider.drafters.tree import TreeShape
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.base import LoadedTarget
from outrider.models.llama import LlamaTarget
from outrider.sampling.params import SamplingParams
from outrider.types import NO_DRAFT, DraftMode, Proposal

from .eagle_scratch import NativeScratch, scratch_chain, scratch_tree, taps_of
from .heads import CPU, VOCAB, tiny_head, tiny_target
from .helpers import wish
from .test_eagle_head import OPTIONS

FLOAT32 = Placement(device=CPU, precision="float32")
SAMPLED = SamplingParams(temperature=0.7, top_k=9, max_tokens=1000)
SHAPE = TreeShape(depth=4, width=3, num_nodes=9)


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def head(target: LlamaTarget) -> EagleHead:
    return tiny_head(target)


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


class Checked(EagleDrafter):
    """Compares every proposal with a naive one."""

    def __init__(
        self,
        target: LoadedTarget,
        head: EagleHead,
        *,
        placement: Placement = FLOAT32,
        scratch: NativeScratch | None = None,
        **options: object,
    ) -> None:
        super().__init__(head, placement, **options)  # type: ignore[arg-type]
        self.target, self.head = target, scratch or head
        self.firsts: dict[int, int] = {}
        self.num_checked = 0

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        self.firsts.setdefault(sequence, start)
        super().absorb(sequence, start, taps_RD)

    def first(self, request: DraftRequest) -> int:
        return self.firsts[request.sequence]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = super().propose(requests)
        for request, proposal in zip(requests, proposals, strict=True):
            self.num_checked += 1
            if self.tree is None:
                self.check_chain(request, proposal)
            else:
                paths = scratch_tree(
                    self.target, self.head, request, self.first(request), shape=self.tree, min_prob=self.min_prob
                )
                assert sorted(paths_of(proposal)) == sorted(paths)
                assert proposal.draft_probs_NV is None
        return proposals

    def check_chain(self, request: DraftRequest, proposal: Proposal) -> None:
        chain, laws = scratch_chain(self.target, self.head, request, self.first(request), min_prob=self.min_prob)
        assert list(proposal.tokens) == chain
        is_drawn = request.mode is DraftMode.DRAWN and bool(chain) and not request.params.is_greedy
        assert (proposal.draft_probs_NV is not None) == is_drawn
        if proposal.draft_probs_NV is not None:
            torch.testing.assert_close(proposal.draft_probs_NV, torch.stack(laws), atol=1e-5, rtol=1e-4)


commits = st.tuples(st.integers(0, 5), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), st.integers(0, 4))


@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=20), min_size=1, max_size=3),
    plan=st.lists(st.lists(commits, min_size=3, max_size=3), min_size=1, max_size=4),
    is_tree=st.booleans(),
    reused=st.integers(0, 6),
)
@settings(max_examples=15, deadline=None)
def test_drafts_equal_those_from_scratch_after_any_commits(
    target: LlamaTarget,
    head: EagleHead,
    prompts: list[list[int]],
    plan: list[list[tuple[int, list[int], int]]],
    is_tree: bool,
    reused: int,
) -> None:
    """Some drafts are kept, some sequences pause, some prompts' first positions were never read."""
    drafter = Checked(target, head, tree=SHAPE if is_tree else None)
    texts = [list(prompt) for prompt in prompts]

    def absorb(sequence: int, start: int) -> None:
        taps = taps_of(target, head, texts[sequence][:-1])
        drafter.absorb(sequence, start, taps[start:])

    for sequence, text in enumerate(texts):
        drafter.start(sequence, text)
        absorb(sequence, min(reused, len(text) - 2))
    last: list[Proposal] = [NO_DRAFT] * len(texts)
    for round_ in plan:
        for sequence, (text, (num_kept, new, _)) in enumerate(zip(texts, round_, strict=False)):
            before = len(text)
            path = max(paths_of(last[sequence]), key=len, default=())[:num_kept]
            text.extend([*path, *new])
            drafter.observe(sequence, text, len(text) - before)
            absorb(sequence, before - 1)
        budgets = [budget for _, _, budget in round_][: len(texts)]
        asked = [sequence for sequence, budget in enumerate(budgets) if budget > 0]
        last = [NO_DRAFT] * len(texts)
        if asked:
            for sequence, proposal in zip(
                asked, drafter.propose([wish(texts[s], budgets[s], sequence=s) for s in asked]), strict=True
            ):
                last[sequence] = proposal


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("tree", [None, SHAPE])
def test_every_option_drafts_as_it_was_trained(target: LlamaTarget, name: str, tree: TreeShape | None) -> None:
    drafter = Checked(target, tiny_head(target, **OPTIONS[name]), tree=tree)
    decode(target, drafter, [[1, 2, 3, 4, 5], [6, 7]], SamplingParams(max_tokens=12))
    assert drafter.num_checked > 8


def decode(
    target: LoadedTarget,
    drafter: EagleDrafter | None,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    engine: Engine | None = None,
    **config: object,
) -> list[tuple[int, ...]]:
    settings = EngineConfig(num_draft_tokens=5, schedule="fixed", **config)  # type: ignore[arg-type]
    engine = engine or Engine(target, drafter=drafter, config=settings)
    results = engine.generate(prompts, params)
    if drafter is not None and not params.is_greedy and params.seed is not None:
        # With shared noise even a random head is often right: rejected and kept drafts both occur.
        assert sum(r.stats.accepted for r in results) > 0.15 * sum(r.stats.steps for r in results)
    return [result.token_ids for result in results]


PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11] * 8]


@pytest.mark.parametrize("tree", [None, SHAPE])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=16),
        SamplingParams(max_tokens=16, temperature=1.3, seed=4),
        SamplingParams(max_tokens=12, temperature=1.5, top_k=30, top_p=0.97, seed=4, n=2),
        SamplingParams(max_tokens=16, temperature=1.0),
    ],
    ids=["greedy", "seeded", "choices", "unseeded"],
)
def test_drafts_in_the_engine_equal_those_from_scratch(
    target: LlamaTarget, head: EagleHead, tree: TreeShape | None, params: SamplingParams
) -> None:
    drafter = Checked(target, head, tree=tree)
    got = decode(target, drafter, PROMPTS, params, prefill_chunk=16)
    assert drafter.num_checked >= 8  # an unseeded request may end early, or keep many drafts a step
    if params.is_greedy or params.seed is not None:
        assert got == decode(target, None, PROMPTS, params)


@pytest.mark.parametrize("tree", [None, SHAPE])
def test_reused_prefixes_are_drafted_from_what_is_known(
    target: LlamaTarget, head: EagleHead, tree: TreeShape | None
) -> None:
    drafter = Checked(target, head, tree=tree)
    engine = Engine(target, drafter=drafter, config=EngineConfig(num_draft_tokens=5, schedule="fixed"))
    params = SamplingParams(max_tokens=20, temperature=1.2, seed=8)
    [first] = engine.generate([[1, 2, 3, 4]], params)
    prompt = [1, 2, 3, 4, *first.token_ids, 5, 6, 7]
    again = decode(target, drafter, [prompt], params, engine=engine)
    assert drafter.firsts[1] >= 20, "the cache was not taken over: the test is void"
    assert again == decode(target, None, [prompt], params)


def test_past_the_window_the_older_half_is_forgotten(target: LlamaTarget, head: EagleHead) -> None:
    class Windowed(Checked):
        def first(self, request: DraftRequest) -> int:
            return self._reader._texts[request.sequence].first

    drafter = Windowed(target, head, window=16)
    decode(target, drafter, [[1, 2, 3] * 10, [4, 5]], SamplingParams(max_tokens=40, temperature=1.2, seed=8))
    assert drafter.num_checked > 20


def test_taps_of_idle_tokens_are_bounded(target: LlamaTarget, head: EagleHead) -> None:
    drafter = EagleDrafter(head, FLOAT32, window=8)
    tokens = [index % VOCAB for index in range(60)]
    taps = taps_of(target, head, tokens[:-1])
    drafter.start(0, tokens)
    for start in range(0, 59, 2):
        drafter.absorb(0, start, taps[start : start + 2])
    assert drafter._reader._texts[0].num_waiting <= 9
    [proposal] = drafter.propose([wish(tokens, 3)])
    assert list(proposal.tokens) == scratch_chain(target, head, wish(tokens, 3), 59 - 8)[0]


def test_asking_twice_gives_the_same_drafts(target: LlamaTarget, head: EagleHead) -> None:
    tokens = [3, 1, 4, 1, 5]
    for tree in (None, SHAPE):
        drafter = EagleDrafter(head, FLOAT32, tree=tree)
        drafter.start(0, tokens)
        drafter.absorb(0, 0, taps_of(target, head, tokens[:-1]))
        assert drafter.propose([wish(tokens, 4)]) == drafter.propose([wish(tokens, 4)])


def test_long_prompts_are_read_by_themselves(target: LlamaTarget, head: EagleHead) -> None:
    for changes in ({}, {"num_layers": 2}):
        long, short = [index * 7 % VOCAB for index in range(650)], [1, 2, 3]
        each = tiny_head(target, **changes)
        drafter = Checked(target, each)
        for sequence, tokens in enumerate((long, short)):
            drafter.start(sequence, tokens)
            drafter.absorb(sequence, 0, taps_of(target, each, tokens[:-1]))
        drafter.propose([wish(long, 2, sequence=0), wish(short, 4, sequence=1)])


def test_modes_and_budgets_may_be_mixed(target: LlamaTarget, head: EagleHead) -> None:
    for tree in (None, SHAPE):
        drafter = Checked(target, head, tree=tree)
        tokens = [7, 7, 8, 20]
        for sequence in range(5):
            drafter.start(sequence, tokens)
            drafter.absorb(sequence, 0, taps_of(target, head, tokens[:-1]))
        modes = [DraftMode.GREEDY, DraftMode.SHARED, DraftMode.DRAWN, DraftMode.SHARED, DraftMode.DRAWN]
        params = [SAMPLED, SAMPLED, SAMPLED, SamplingParams(), SamplingParams(temperature=2.0)]
        drafter.propose(
            [
                wish(tokens, 1 + s, sequence=s, mode=mode, params=fields, seed=40 + s)
                for s, (mode, fields) in enumerate(zip(modes, params, strict=True))
            ]
        )


@pytest.mark.parametrize("tree", [None, SHAPE])
@pytest.mark.parametrize("min_prob", [0.02, 0.08, 0.3])
def test_confidence_ends_drafts_early(
    target: LlamaTarget, head: EagleHead, tree: TreeShape | None, min_prob: float
) -> None:
    sizes = set()
    for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.6)):
        drafter = Checked(target, head, tree=tree, min_prob=min_prob)
        engine = Engine(target, drafter=drafter, config=EngineConfig(num_draft_tokens=5, schedule="fixed"))
        for result in engine.generate(PROMPTS, params):
            sizes |= {step.drafted for step in result.steps}
    assert len(sizes) > 1


def test_confidence_does_not_look_at_the_drawn_token(target: LlamaTarget, head: EagleHead) -> None:
    """Whatever is drawn first, whether it is proposed depends on its law alone."""
    tokens = [3, 1, 4, 1, 5]
    params = SamplingParams(temperature=1.0)
    law = scratch_chain(target, head, wish(tokens, 1, params=params), 0)[1][0]
    for min_prob, size in ((float(law.max()) * 0.99, 1), (float(law.max()) * 1.01, 0)):
        drafter = EagleDrafter(head, FLOAT32, min_prob=min_prob)
        for sequence in range(60):
            drafter.start(sequence, tokens)
            drafter.absorb(sequence, 0, taps_of(target, head, tokens[:-1]))
        wishes = [wish(tokens, 1, sequence=s, mode=DraftMode.DRAWN, params=params, seed=s) for s in range(60)]
        proposals = drafter.propose(wishes)
        assert {len(proposal) for proposal in proposals} == {size}
        assert size == 0 or len({proposal.tokens for proposal in proposals}) > 3


def test_memory_is_given_back(target: LlamaTarget, head: EagleHead) -> None:
    drafter = EagleDrafter(head, FLOAT32)
    decode(target, drafter, PROMPTS, SamplingParams(max_tokens=8))
    entries = drafter._reader._entries
    assert isinstance(entries, TorchEntries)
    assert entries._memory.slab.shape[2] == 0 and not drafter._reader._texts


def test_bfloat16_runs_the_packed_matrices(target: LlamaTarget, head: EagleHead) -> None:
    """Laws stay near float32's; the output is the target's whatever the head's precision."""
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    drafter = EagleDrafter(head, Placement(device=CPU, precision="bfloat16"))
    drafter.start(0, tokens)
    drafter.absorb(0, 0, taps_of(target, head, tokens[:-1]))
    request = wish(tokens, 1, mode=DraftMode.DRAWN, params=SamplingParams(temperature=1.0))
    [proposal] = drafter.propose([request])
    law = scratch_chain(target, head, request, 0)[1][0]
    assert proposal.draft_probs_NV is not None
    assert 0.5 * float((proposal.draft_probs_NV[0] - law).abs().sum()) < 0.03
    params = SamplingParams(max_tokens=16)
    bf16 = EagleDrafter(head, Placement(device=CPU, precision="bfloat16"), tree=SHAPE)
    assert decode(target, bf16, PROMPTS, params) == decode(target, None, PROMPTS, params)


def test_it_is_a_tap_drafter_with_checked_options(head: EagleHead) -> None:
    drafter = EagleDrafter(head, FLOAT32)
    assert isinstance(drafter, TapDrafter) and drafter.taps == (1, 2, 4)
    for options in ({"min_prob": 1.5}, {"min_prob": -0.1}, {"window": 1}):
        with pytest.raises(ConfigError, match="is not possible"):
            EagleDrafter(head, FLOAT32, **options)  # type: ignore[arg-type]
