"""A head on the native kernels: the trained module's arithmetic, and drafts that depend on nothing but their own text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.device import Placement, Precision
from outrider.drafters.base import DraftRequest
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.eagle_head import EagleHead, UnrolledAttention
from outrider.drafters.eagle_native import NativeEntries
from outrider.drafters.eagle_native_head import GrowthLimits, NativeHead
from outrider.drafters.eagle_reader import DraftWalk, EntryRun
from outrider.drafters.tree import ScoredTree, TreeGrowth, TreeShape
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.native import NativeTarget
from outrider.native.library import KERNELS, Context, is_available, open_context
from outrider.sampling.params import SamplingParams
from outrider.types import Proposal

from .eagle_scratch import NativeScratch
from .heads import CPU, TARGET_CONFIG, VOCAB, tiny_head
from .test_eagle import PROMPTS, SHAPE, Checked, decode
from .test_eagle_head import OPTIONS

PRECISIONS: tuple[Precision, ...] = ("bfloat16", "int8")
TOLERANCE = {"bfloat16": 0.05, "int8": 0.1}
"""Relative error of a row of logits that no rounding makes here; a part left out makes more."""


@pytest.fixture(params=KERNELS)
def context(request: pytest.FixtureRequest) -> Context:
    if not is_available(request.param):
        pytest.skip(f"this processor cannot run the {request.param} kernels")
    return open_context(request.param, 1)


@pytest.fixture(scope="module", params=PRECISIONS)
def target(request: pytest.FixtureRequest) -> NativeTarget:
    if not is_available("portable"):
        pytest.skip("the native library cannot be built here")
    return NativeTarget.random(TARGET_CONFIG, Placement(device=CPU, precision=request.param), seed=5)


Nodes = Sequence[Sequence[tuple[int, int]]]
"""Levels of a tree: token, and place of the parent in the level before."""


def draw_levels(sizes: Sequence[int], seed: int) -> list[list[tuple[int, int]]]:
    noise = torch.Generator().manual_seed(seed)
    levels, above = [], 1
    for size in sizes:
        pairs = torch.stack(
            (torch.randint(VOCAB, (size,), generator=noise), torch.randint(above, (size,), generator=noise))
        )
        levels.append([(token, parent) for token, parent in pairs.t().tolist()])
        above = size
    return levels


def paths_to(levels: Nodes) -> list[list[int]]:
    """Tokens from the root to each node of the last level."""
    paths: list[list[int]] = [[]]
    for level in levels:
        paths = [[*paths[parent], token] for token, parent in level]
    return paths


def step(walk: DraftWalk, levels: Nodes) -> Tensor:
    """Step through one sequence's levels; logits behind the last one's nodes."""
    for level in levels:
        walk.step([[token for token, _ in level]], [[parent for _, parent in level]])
    return walk.logits()


def eager_logits(head: EagleHead, taps_RD: Tensor, tokens: list[int], first: int, drafts: list[int]) -> Tensor:
    """The module's, behind entries and drafts, one pass over all of the path for each draft."""
    hidden, text = head.fuse(taps_RD), [*tokens, *drafts]
    for count in range(len(tokens), len(text) + 1):
        attend = UnrolledAttention(torch.ones(1, count, count).tril().bool())
        places = torch.arange(first, first + count)
        outputs = head(hidden[None], torch.tensor([text[:count]]), places[None], attend)[0]
        hidden = torch.cat((hidden, head.feedback(outputs[-1:])))
    return head.logits(outputs[-1])


def run_of(row: int, taps_RD: Tensor, tokens: list[int], first: int = 0) -> EntryRun:
    return EntryRun(row=row, count=0, position=first, tokens=tokens, taps_RD=taps_RD)


def drawn_taps(head: EagleHead, size: int, seed: int) -> tuple[Tensor, list[int]]:
    """Taps with an outlier channel, as real ones have, and the tokens behind them."""
    noise = torch.Generator().manual_seed(seed)
    taps_RD = torch.randn(size, head.config.num_taps * head.config.target_hidden_size, generator=noise)
    taps_RD[:, 3] *= 30
    return taps_RD.bfloat16().float(), torch.randint(VOCAB, (size,), generator=noise).tolist()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_equals_the_trained_module(context: Context, name: str, precision: Precision) -> None:
    @settings(max_examples=4, deadline=None)
    @given(
        size=st.sampled_from([1, 2, 7, 40, 130]),
        sizes=st.lists(st.integers(1, 5), max_size=3),
        groups=st.sampled_from([(6, 3, 4), (2, 1, 64), (4, 4, 34)]),
        inner=st.sampled_from([40, 64, 130]),
        seed=st.integers(0, 2**20),
    )
    def check(size: int, sizes: list[int], groups: tuple[int, int, int], inner: int, seed: int) -> None:
        shape = dict(zip(("num_heads", "num_kv_heads", "head_width"), groups, strict=True))
        head = tiny_head(seed=seed, intermediate_size=inner, **{**shape, **OPTIONS[name]})
        taps_RD, tokens = drawn_taps(head, size, seed)
        levels = draw_levels(sizes, seed)
        entries = NativeEntries(NativeHead(head, precision, context))
        walk = entries.walk([run_of(entries.take_row(), taps_RD, tokens, 9)], levels=len(levels), width=5)
        got_RU = step(walk, levels)
        for row_U, path in zip(got_RU, paths_to(levels), strict=True):
            expected_U = eager_logits(head, taps_RD, tokens, 9, path)
            assert float((row_U - expected_U).norm() / expected_U.norm()) < TOLERANCE[precision]

    check()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("changes", [{}, {"num_layers": 2}], ids=["one layer", "two layers"])
def test_a_row_does_not_depend_on_its_company(context: Context, precision: Precision, changes: dict[str, int]) -> None:
    """Entries one at a time, chains one at a time: the same bits as everything at once."""
    head = tiny_head(**changes)
    native = NativeHead(head, precision, context)
    together = NativeEntries(native)
    texts = [drawn_taps(head, size, seed=size) for size in (3, 129, 20)]
    trees = [draw_levels(sizes, seed=7) for sizes in ((4, 5, 3), (1, 2, 9), (5, 16, 5))]
    runs = [run_of(together.take_row(), *text) for text in texts]
    walk = together.walk(runs, levels=3, width=16)
    for level in range(3):
        nodes = [tree[level] for tree in trees]
        walk.step([[t for t, _ in each] for each in nodes], [[p for _, p in each] for each in nodes])
    alone = NativeScratch(head, native)
    rows = iter(walk.logits().clone())
    for (taps_RD, tokens), tree in zip(texts, trees, strict=True):
        for path in paths_to(tree):
            assert torch.equal(next(rows), alone.logits(taps_RD, [0, *tokens, *path], 0))


def test_threads_do_not_change_a_bit() -> None:
    head = tiny_head(num_kv_heads=1)
    taps_RD, tokens = drawn_taps(head, 140, seed=1)
    found = []
    for num_threads in (1, 3):
        entries = NativeEntries(NativeHead(head, "int8", open_context("auto", num_threads)))
        walk = entries.walk([run_of(entries.take_row(), taps_RD, tokens)], levels=2, width=12)
        found.append((step(walk, draw_levels((12, 11), seed=3)), walk.best()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("width", [1, 4, 24, 64])
def test_the_likeliest_tokens(context: Context, width: int) -> None:
    """In order, of equals the lowest id, with their log-probabilities over the whole draft vocabulary."""
    head = tiny_head()
    head.lm_head.weight[20] = head.lm_head.weight[4]
    head.lm_head.weight[17:19] = head.lm_head.weight[9]
    entries = NativeEntries(NativeHead(head, "bfloat16", context))
    taps_RD, tokens = drawn_taps(head, 5, seed=2)
    walk = entries.walk([run_of(entries.take_row(), taps_RD, tokens)], levels=1, width=width)
    logits_RU = step(walk, draw_levels((6,), seed=1))
    ids, logprobs = walk.best()
    law_RU = logits_RU.log_softmax(-1)
    for row, (mine, values) in enumerate(zip(ids, logprobs, strict=True)):
        order = sorted(range(24), key=lambda column: (-float(logits_RU[row, column]), column))
        assert mine == order[:width]
        torch.testing.assert_close(torch.tensor(values), law_RU[row, mine], atol=2e-6, rtol=1e-5)


def grown_by_levels(
    entries: NativeEntries, runs: Sequence[EntryRun], depths: Sequence[int], limits: GrowthLimits, ids: list[int]
) -> list[ScoredTree]:
    """Trees along a walk: one pass a level, expanded and reranked in Python."""
    shape = TreeShape(depth=8, width=limits.width, min_level=limits.min_level)
    growths = [TreeGrowth(shape=shape, min_score=limits.min_score) for _ in runs]
    walk = entries.walk(runs, levels=max(depths), width=limits.width)
    above: list[list[int]] = []
    for level in range(max(depths)):
        going = [growth if depth > level else None for growth, depth in zip(growths, depths, strict=True)]
        if level > 0:
            nodes = [growth.frontier if growth else [] for growth in going]
            if not any(nodes):
                break
            tokens = [[growths[g].tokens[node] for node in each] for g, each in enumerate(nodes)]
            parents = [[above[g].index(growths[g].parents[node]) for node in each] for g, each in enumerate(nodes)]
            walk.step(tokens, parents)
        above = [list(growth.frontier) for growth in growths]
        columns, logprobs = walk.best()
        rows = iter(zip(columns, logprobs, strict=True))
        for growth in going:
            found = [next(rows) for _ in growth.frontier] if growth else []
            if growth:
                growth.expand_into([[ids[c] for c in row] for row, _ in found], [values for _, values in found])
    return [growth.candidates() for growth in growths]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("width", "depths", "min_prob", "min_level"),
    [
        (1, (1, 7, 3), 0.0, 0.0),
        (3, (3, 3, 3), 0.0, 0.0),
        (4, (5, 1, 2), 0.002, 0.0),
        (24, (2, 3, 1), 0.0, 0.0),
        (2, (4, 4, 4), 0.9, 0.0),
        (3, (6, 6, 6), 0.0, 0.05),
    ],
)
def test_trees_grown_in_one_call_equal_those_grown_by_levels(
    context: Context, precision: Precision, width: int, depths: tuple[int, ...], min_prob: float, min_level: float
) -> None:
    """Candidates, their order, parents and scores, to the last bit; equal logits included."""
    head = tiny_head()
    head.lm_head.weight[17:19] = head.lm_head.weight[9]
    native = NativeHead(head, precision, context)
    texts = [drawn_taps(head, size, seed=size) for size in (3, 129, 20)]
    min_score = math.log(min_prob) if min_prob else -math.inf
    limits = GrowthLimits(width=width, min_score=min_score, min_level=min_level)
    found = []
    for is_at_once in (True, False):
        entries = NativeEntries(native)
        runs = [run_of(entries.take_row(), *text, first=5) for text in texts]
        if is_at_once:
            found.append(entries.grow(runs, depths, limits))
        else:
            ids = head.target_ids().tolist()
            found.append(grown_by_levels(entries, runs, depths, limits, ids))
    for mine, expected in zip(*found, strict=True):
        assert mine.tokens == expected.tokens and mine.parents == expected.parents and mine.scores == expected.scores
    assert min_prob > 0.5 or all(tree.tokens for tree in found[0])
    if min_level:
        assert all(3 < len(tree.tokens) < 3 + 5 * 9 for tree in found[0]), "some levels are read, and not all"


@pytest.mark.parametrize("min_prob", [0.0, 0.003])
def test_chains_drafted_in_one_call_equal_those_drafted_by_levels(
    target: NativeTarget, min_prob: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed: list[list[Proposal]] = []
    for is_at_once in (True, False):
        if not is_at_once:
            monkeypatch.setattr(EagleDrafter, "_can_grow_at_once", lambda drafter, requests: False)
        drafter = EagleDrafter(tiny_head(), target.placement, context=target.context, min_prob=min_prob)
        propose, seen = drafter.propose, []

        def noted(
            requests: Sequence[DraftRequest],
            propose: Callable[[Sequence[DraftRequest]], list[Proposal]] = propose,
            seen: list[Proposal] = seen,
        ) -> list[Proposal]:
            seen += (found := propose(requests))
            return found

        monkeypatch.setattr(drafter, "propose", noted)
        decode(target, drafter, PROMPTS, SamplingParams(max_tokens=12))
        proposed.append(seen)
    assert proposed[0] == proposed[1]
    sizes = [len(proposal) for proposal in proposed[0]]
    assert max(sizes) > 1 and (not min_prob or min(sizes) < max(sizes))


def test_a_head_that_norms_its_outputs_grows_by_levels(target: NativeTarget) -> None:
    drafters = [checked(target, tiny_head(norm_output=norms), tree=SHAPE) for norms in (False, True)]
    for drafter in drafters:
        decode(target, drafter, PROMPTS, SamplingParams(max_tokens=12))
        assert drafter.num_checked >= 8


@pytest.mark.parametrize("tree", [None, SHAPE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=16),
        SamplingParams(max_tokens=12, temperature=1.3, seed=4, n=2),
        SamplingParams(max_tokens=16, temperature=1.0),
    ],
    ids=["greedy", "seeded", "unseeded"],
)
def test_drafts_in_the_engine_equal_those_from_scratch(
    target: NativeTarget, tree: TreeShape | None, params: SamplingParams
) -> None:
    drafter = checked(target, tiny_head(), tree=tree)
    got = decode(target, drafter, PROMPTS, params, prefill_chunk=16)
    assert drafter.num_checked >= 8
    if params.is_greedy or params.seed is not None:
        assert got == decode(target, None, PROMPTS, params)


def checked(target: NativeTarget, head: EagleHead, **options: object) -> Checked:
    placement = target.placement
    scratch = NativeScratch(head, NativeHead(head, placement.precision, target.context))
    return Checked(target, head, placement=placement, scratch=scratch, context=target.context, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_drafts_as_from_scratch(target: NativeTarget, name: str) -> None:
    for tree in (None, SHAPE):
        drafter = checked(target, tiny_head(**OPTIONS[name]), tree=tree)
        decode(target, drafter, PROMPTS[:2], SamplingParams(max_tokens=8))
        assert drafter.num_checked > 4


def test_past_the_window_the_older_half_is_forgotten(target: NativeTarget) -> None:
    class Windowed(Checked):
        def first(self, request: object) -> int:
            return self._reader._texts[request.sequence].first  # type: ignore[attr-defined,no-any-return]

    head = tiny_head()
    scratch = NativeScratch(head, NativeHead(head, target.placement.precision, target.context))
    drafter = Windowed(
        target, head, placement=target.placement, scratch=scratch, context=target.context, window=16, tree=SHAPE
    )
    decode(target, drafter, [[1, 2, 3] * 10, [4, 5]], SamplingParams(max_tokens=40, temperature=1.2, seed=8))
    assert drafter.num_checked > 20


def test_memory_is_given_back_and_the_path_recorded(target: NativeTarget) -> None:
    drafter = checked(target, tiny_head())
    decode(target, drafter, PROMPTS, SamplingParams(max_tokens=8))
    entries = drafter._reader._entries
    assert isinstance(entries, NativeEntries) and entries._cache.num_bytes() == 0 and not drafter._reader._texts
    engine = Engine(target, drafter=drafter)
    path = f"native-{target.context.kernels} {target.placement.precision}"
    assert engine.settings(SamplingParams())["drafter_path"] == drafter.path == path


def test_other_precisions_are_refused_by_name(target: NativeTarget) -> None:
    placement = replace(target.placement, precision="float32")
    with pytest.raises(ConfigError, match="does not run float32; allowed: bfloat16, int8"):
        EagleDrafter(tiny_head(), placement, context=target.context)
