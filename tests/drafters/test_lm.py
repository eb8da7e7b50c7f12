"""A language model as drafter: every draft equals a computation from scratch, whatever was committed before."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.device import Placement
from outrider.drafters.lm import LMDrafter
from outrider.drafters.tree import TreeShape
from outrider.models.base import PackedRows, Target
from outrider.models.config import LlamaConfig
from outrider.models.llama import LlamaTarget
from outrider.models.table import TableModel
from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import warp_logits
from outrider.types import NO_DRAFT, DraftMode, Proposal

from .helpers import wish

CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    norm_eps=1e-5,
    max_positions=700,
    tie_word_embeddings=False,
    eos_token_ids=(0,),
)
SAMPLED = SamplingParams(temperature=0.7, top_k=9, max_tokens=1000)


@pytest.fixture(scope="module")
def llama() -> LlamaTarget:
    return LlamaTarget.random(CONFIG, Placement(device=torch.device("cpu"), precision="float32"), seed=5)


def logits_behind(model: Target, tokens: Sequence[int]) -> Tensor:
    """Logits behind the last token, read into an empty cache, ``[1, V]``."""
    cache = model.new_cache()
    slot = cache.allocate(len(tokens))
    rows = PackedRows.pack([tokens], slots=[slot], starts=[0], device=model.spec.device, logit_rows=(len(tokens) - 1,))
    return model.forward(rows, cache).logits_RV.clone()


def greedy_chain(model: Target, tokens: Sequence[int], count: int) -> list[int]:
    text = list(tokens)
    for _ in range(count):
        text.append(int(logits_behind(model, text).argmax()))
    return text[len(tokens) :]


def shared_chain(model: Target, tokens: Sequence[int], count: int, params: SamplingParams, seed: int) -> list[int]:
    text = list(tokens)
    for _ in range(count):
        logits = warp_logits(logits_behind(model, text), [params])
        noise = gumbel_BV([noise_key(seed, 0, len(text), Purpose.TARGET)], logits.shape[1])
        text.append(int((logits + noise).argmax()))
    return text[len(tokens) :]


commits = st.tuples(st.integers(0, 6), st.lists(st.integers(0, 23), min_size=1, max_size=3), st.integers(0, 5))


@given(
    prompts=st.lists(st.lists(st.integers(0, 23), min_size=1, max_size=40), min_size=1, max_size=3),
    plan=st.lists(st.lists(commits, min_size=3, max_size=3), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_drafts_equal_those_from_scratch_after_any_commits(
    llama: LlamaTarget, prompts: list[list[int]], plan: list[list[tuple[int, list[int], int]]]
) -> None:
    drafter = LMDrafter(llama, name="draft")
    texts = [list(prompt) for prompt in prompts]
    for sequence, text in enumerate(texts):
        drafter.start(sequence, text)
    last: list[Proposal] = [NO_DRAFT] * len(texts)
    for round_ in plan:
        for sequence, (text, (num_kept, new, _)) in enumerate(zip(texts, round_, strict=False)):
            tokens = [*last[sequence].tokens[:num_kept], *new]  # some kept drafts, then tokens of the target's own
            text.extend(tokens)
            drafter.observe(sequence, text, len(tokens))
        budgets = [budget for _, _, budget in round_][: len(texts)]
        asked = [sequence for sequence, budget in enumerate(budgets) if budget > 0]  # the others pause
        proposals = drafter.propose([wish(texts[s], budgets[s], sequence=s) for s in asked])
        last = [NO_DRAFT] * len(texts)
        for sequence, proposal in zip(asked, proposals, strict=True):
            assert list(proposal.tokens) == greedy_chain(llama, texts[sequence], budgets[sequence])
            last[sequence] = proposal


def test_kept_drafts_are_not_read_again(llama: LlamaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = LMDrafter(llama, name="draft")
    tokens = [3, 1, 4, 1, 5]
    drafter.start(0, tokens)
    drafts = drafter.propose([wish(tokens, 4)])[0].tokens
    tokens.extend([*drafts[:2], 23 - drafts[2]])
    drafter.observe(0, tokens, 3)
    read: list[list[int]] = []
    forward = llama.forward

    def spy(rows: PackedRows, cache: object, **options: object) -> object:
        read.append(rows.tokens_R.tolist())
        return forward(rows, cache, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(llama, "forward", spy)
    drafter.propose([wish(tokens, 1)])
    assert read == [[tokens[-1]]]


def test_nothing_is_drafted_behind_refused_drafts(llama: LlamaTarget) -> None:
    """More tokens follow at once than were refused, so that no later cut could hide a wrong one."""
    drafter = LMDrafter(llama, name="draft")
    tokens = [3, 1, 4, 1, 5]
    drafter.start(0, tokens)
    drafts = drafter.propose([wish(tokens, 6)])[0].tokens
    new = [drafts[0], 23 - drafts[1], 7, 8, 9, 2, 6, 11]
    tokens.extend(new)
    drafter.observe(0, tokens, len(new))
    assert list(drafter.propose([wish(tokens, 4)])[0].tokens) == greedy_chain(llama, tokens, 4)


def test_long_prompts_are_read_in_chunks(llama: LlamaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    tokens = [draw.randrange(24) for _ in range(600)]
    expected = greedy_chain(llama, tokens, 2)
    sizes: list[int] = []
    forward = llama.forward

    def spy(rows: PackedRows, cache: object, **options: object) -> object:
        sizes.append(len(rows.tokens_R))
        return forward(rows, cache, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(llama, "forward", spy)
    drafter = LMDrafter(llama, name="draft")
    drafter.start(0, tokens)
    assert list(drafter.propose([wish(tokens, 2)])[0].tokens) == expected
    assert sizes == [512, 87, 1, 1]


def test_asking_twice_gives_the_same_drafts(llama: LlamaTarget) -> None:
    drafter = LMDrafter(llama, name="draft")
    tokens = [1, 2, 3]
    drafter.start(0, tokens)
    first = drafter.propose([wish(tokens, 5)])
    assert drafter.propose([wish(tokens, 5)]) == first
    assert first[0].drafter == "draft"


def test_the_draft_models_window_ends_drafting(llama: LlamaTarget) -> None:
    drafter = LMDrafter(llama, name="draft")
    tokens = [index % 24 for index in range(CONFIG.max_positions - 1)]
    drafter.start(0, tokens)
    assert len(drafter.propose([wish(tokens, 5)])[0]) == 2
    tokens.extend([1, 2])
    drafter.observe(0, tokens, 2)
    assert drafter.propose([wish(tokens, 5)]) == [NO_DRAFT]


def test_slots_are_given_back(llama: LlamaTarget) -> None:
    drafter = LMDrafter(llama, name="draft")
    cache = drafter._reader._cache
    for sequence in range(5):
        drafter.start(sequence, [1, 2])
        drafter.propose([wish([1, 2], 2, sequence=sequence)])
        drafter.finish(sequence)
        assert cache.allocate(1) == 0
        cache.free(0)
    drafter.start(9, [1])
    drafter.finish(9)  # never asked for a draft


@given(prompt=st.lists(st.integers(0, 23), min_size=1, max_size=10), seed=st.integers(-5, 2**40))
@settings(max_examples=15, deadline=None)
def test_shared_drafts_use_the_verifiers_noise(llama: LlamaTarget, prompt: list[int], seed: int) -> None:
    drafter = LMDrafter(llama, name="draft")
    drafter.start(0, prompt)
    [proposal] = drafter.propose([wish(prompt, 4, mode=DraftMode.SHARED, params=SAMPLED, seed=seed)])
    assert list(proposal.tokens) == shared_chain(llama, prompt, 4, SAMPLED, seed)
    assert proposal.draft_probs_NV is None


def test_modes_may_be_mixed_in_one_batch(llama: LlamaTarget) -> None:
    drafter = LMDrafter(llama, name="draft")
    prompt = [7, 7, 8]
    for sequence in range(4):
        drafter.start(sequence, prompt)
    greedy, shared, drawn, cold = drafter.propose(
        [
            wish(prompt, 3, sequence=0),
            wish(prompt, 3, sequence=1, mode=DraftMode.SHARED, params=SAMPLED, seed=4),
            wish(prompt, 2, sequence=2, mode=DraftMode.DRAWN, params=SAMPLED, seed=4),
            wish(prompt, 3, sequence=3, mode=DraftMode.SHARED),
        ]
    )
    assert list(greedy.tokens) == list(cold.tokens) == greedy_chain(llama, prompt, 3)
    assert list(shared.tokens) == shared_chain(llama, prompt, 3, SAMPLED, 4)
    assert drawn.draft_probs_NV is not None and drawn.draft_probs_NV.shape == (2, 24)
    assert greedy.draft_probs_NV is shared.draft_probs_NV is cold.draft_probs_NV is None


def test_handed_over_laws_are_those_that_were_drawn_from() -> None:
    table = TableModel(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    params = SamplingParams(temperature=0.8, top_p=0.95)
    drafter = LMDrafter(table, name="draft")
    num_draws = 1500
    wishes = []
    for sequence in range(num_draws):
        drafter.start(sequence, [2])
        wishes.append(wish([2], 2, sequence=sequence, mode=DraftMode.DRAWN, params=params, seed=sequence))
    proposals = drafter.propose(wishes)
    expected = warp_logits(logits_behind(table, [2]), [params]).softmax(dim=-1)[0]
    laws_behind = [warp_logits(logits_behind(table, [token]), [params]).softmax(dim=-1)[0] for token in range(6)]
    counts = torch.zeros(6)
    for proposal in proposals:
        laws = proposal.draft_probs_NV
        assert laws is not None
        assert torch.allclose(laws[0], expected)
        assert torch.allclose(laws[1], laws_behind[proposal.tokens[0]])
        assert torch.allclose(laws.sum(dim=-1), torch.ones(2))
        assert laws[0][proposal.tokens[0]] > 0 and laws[1][proposal.tokens[1]] > 0
        counts[proposal.tokens[0]] += 1
    live = expected > 0
    assert counts[~live].sum() == 0
    g = 2 * float((counts[live] * (counts[live] / (num_draws * expected[live])).log()).nansum())
    assert g < 25  # chi-square with at most 5 degrees of freedom: p about 1e-4; the seeds are fixed


def test_drafting_noise_is_not_the_verifiers() -> None:
    table = TableModel(torch.zeros(64, 64))
    params = SamplingParams(temperature=1.0)
    drafter = LMDrafter(table, name="draft")
    for sequence in range(40):
        drafter.start(sequence, [0])
    wishes = [wish([0], 1, sequence=s, mode=DraftMode.DRAWN, params=params, seed=s) for s in range(40)]
    drawn = [proposal.tokens[0] for proposal in drafter.propose(wishes)]
    verifier = [int(gumbel_BV([noise_key(s, 0, 1, Purpose.TARGET)], 64).argmax()) for s in range(40)]
    assert sum(left == right for left, right in zip(drawn, verifier, strict=True)) < 6


@pytest.mark.parametrize("mode", list(DraftMode))
def test_padding_of_a_larger_draft_vocabulary_is_never_proposed(mode: DraftMode) -> None:
    logits = torch.zeros(8, 8)
    logits[:, 5:] = 50.0  # rows that the target does not have
    logits[:, 3] = 2.0
    drafter = LMDrafter(TableModel(logits), name="draft", vocab_size=5)
    drafter.start(0, [1])
    params = SamplingParams(temperature=1.0)
    [proposal] = drafter.propose([wish([1], 6, mode=mode, params=params)])
    assert len(proposal) == 6 and max(proposal.tokens) < 5
    if mode is DraftMode.DRAWN:
        assert proposal.draft_probs_NV is not None and proposal.draft_probs_NV.shape == (6, 5)


def test_a_smaller_draft_vocabulary_hands_over_laws_of_the_targets_size() -> None:
    drafter = LMDrafter(TableModel(torch.zeros(5, 5)), name="draft", vocab_size=8)
    drafter.start(0, [1])
    [proposal] = drafter.propose([wish([1], 2, mode=DraftMode.DRAWN, params=SamplingParams(temperature=1.0))])
    assert proposal.draft_probs_NV is not None
    assert proposal.draft_probs_NV[:, 5:].sum() == 0
    torch.testing.assert_close(proposal.draft_probs_NV[:, :5], torch.full((2, 5), 0.2))


def brute_tree(
    model: Target, tokens: Sequence[int], shape: TreeShape, depth: int, params: SamplingParams, seed: int | None
) -> list[tuple[tuple[int, ...], float]]:
    """Paths of the chosen nodes and their scores, best first."""
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    for position in range(len(tokens), len(tokens) + depth):
        level: list[tuple[tuple[int, ...], float]] = []
        for path, score in frontier:
            logits = logits_behind(model, [*tokens, *path])
            if not params.is_greedy:
                logits = warp_logits(logits, [params])
            if seed is not None:
                logits = logits + gumbel_BV([noise_key(seed, 0, position, Purpose.TARGET)], logits.shape[1]).float()
            law = logits.log_softmax(dim=-1)[0]
            order = sorted(range(len(law)), key=lambda token: -float(law[token]))[: shape.width]
            level += [((*path, t), score + float(law[t])) for t in order if float(law[t]) > -math.inf]
        candidates += level
        frontier = sorted(level, key=lambda node: -node[1])[: shape.width]
    return sorted(candidates, key=lambda node: -node[1])[: shape.num_nodes]


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize(
    ("params", "mode", "is_noised"),
    [
        (SamplingParams(), DraftMode.GREEDY, False),
        (SamplingParams(), DraftMode.SHARED, False),
        (SAMPLED, DraftMode.GREEDY, False),
        (SAMPLED, DraftMode.SHARED, True),
        (SAMPLED, DraftMode.DRAWN, True),
        (SamplingParams(temperature=1.0, top_k=2), DraftMode.SHARED, True),
    ],
)
def test_trees_equal_expand_and_rerank_by_brute_force(
    llama: LlamaTarget, params: SamplingParams, mode: DraftMode, is_noised: bool
) -> None:
    draw = random.Random(2)
    shape = TreeShape(depth=4, width=3, num_nodes=12)
    drafter = LMDrafter(llama, name="draft", tree=shape)
    texts = [[draw.randrange(24) for _ in range(size)] for size in (1, 9, 40)]
    for sequence, text in enumerate(texts):
        drafter.start(sequence, text)
    for depths in ((4, 2, 9), (1, 4, 4)):
        wishes = [
            wish(text, depth, sequence=s, params=params, mode=mode, seed=70 + s)
            for s, (text, depth) in enumerate(zip(texts, depths, strict=True))
        ]
        proposals = drafter.propose(wishes)
        for sequence, (text, depth, proposal) in enumerate(zip(texts, depths, proposals, strict=True)):
            seed = 70 + sequence if is_noised else None
            expected = brute_tree(llama, text, shape, min(depth, shape.depth), params, seed)
            assert sorted(paths_of(proposal)) == sorted(path for path, _ in expected)
            assert proposal.draft_probs_NV is None
            scores = dict(expected)
            for node in range(-1, len(proposal)):
                family = [scores[paths_of(proposal)[child]] for child in proposal.children(node)]
                assert family == sorted(family, reverse=True)
        for sequence, (text, proposal) in enumerate(zip(texts, proposals, strict=True)):
            text.extend([proposal.tokens[0], draw.randrange(24)])
            drafter.observe(sequence, text, 2)


def test_a_tree_of_width_one_is_the_greedy_chain(llama: LlamaTarget) -> None:
    tree, chain = (
        LMDrafter(llama, name="draft", tree=shape) for shape in (TreeShape(depth=5, width=1, num_nodes=5), None)
    )
    for drafter in (tree, chain):
        drafter.start(0, [4, 2])
    assert tree.propose([wish([4, 2], 5)]) == chain.propose([wish([4, 2], 5)])


def test_trees_of_requests_with_different_modes_do_not_mix(llama: LlamaTarget) -> None:
    prompt = [5, 9, 5]
    wishes = [
        wish(prompt, 3, sequence=0),
        wish(prompt, 3, sequence=1, params=SAMPLED, mode=DraftMode.SHARED, seed=8),
        wish(prompt, 3, sequence=2, params=SAMPLED),
        wish(prompt, 3, sequence=3, params=SAMPLED, mode=DraftMode.SHARED, seed=9),
    ]
    together = LMDrafter(llama, name="draft", tree=TreeShape(depth=3, width=2, num_nodes=6))
    for sequence in range(4):
        together.start(sequence, prompt)
    proposals = together.propose(wishes)
    assert len(set(proposals)) >= 3  # noise makes a difference
    for request, proposal in zip(wishes, proposals, strict=True):
        alone = LMDrafter(llama, name="draft", tree=together.tree)
        alone.start(request.sequence, prompt)
        assert alone.propose([request]) == [proposal]
