"""Two drafters in one tree: duplicates folded, the likeliest nodes kept, output unchanged."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.device import Placement
from outrider.drafters.base import TapDrafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.merge import MergedDrafter, merge_trees
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.tree import ScoredTree, TreeShape
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.models.llama import LlamaTarget
from outrider.sampling.params import SamplingParams
from outrider.types import NO_DRAFT, Proposal

from .heads import CPU, tiny_head, tiny_target

SHAPE = TreeShape(depth=3, width=3, num_nodes=8)
PROMPTS = [[1, 2, 3, 4, 5, 6] * 3, [7, 8], [9, 10, 11] * 8]


def paths_of(tokens: list[int] | tuple[int, ...], parents: list[int] | tuple[int, ...]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@st.composite
def trees(draw: st.DrawFn) -> ScoredTree:
    size = draw(st.integers(0, 10))
    tokens = [draw(st.integers(0, 2)) for _ in range(size)]
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    scores: list[float] = []
    for parent in parents:
        above = 0.0 if parent < 0 else scores[parent]
        scores.append(above - draw(st.floats(0, 3)))
    return ScoredTree(tokens, parents, scores)


@given(left=trees(), right=trees(), num_nodes=st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_the_likeliest_paths_of_both_make_the_tree(left: ScoredTree, right: ScoredTree, num_nodes: int) -> None:
    best: dict[tuple[int, ...], float] = {}
    for tree in (left, right):
        for path, score in zip(paths_of(list(tree.tokens), list(tree.parents)), tree.scores, strict=True):
            best[path] = max(best.get(path, -math.inf), score)
    proposal = merge_trees([left, right], num_nodes, drafter="m")
    got = paths_of(proposal.tokens, proposal.parents)
    assert len(set(got)) == len(got) == min(num_nodes, len(best))
    expected = sorted(best.values(), reverse=True)[:num_nodes]
    assert sorted((best[path] for path in got), reverse=True) == expected


def test_nothing_from_both_is_no_draft() -> None:
    empty = ScoredTree([], [], [])
    assert merge_trees([empty, empty], 4, drafter="m") is NO_DRAFT


def test_one_path_of_two_drafters_is_one_node_with_the_larger_estimate() -> None:
    head = ScoredTree([5, 6, 7], [-1, -1, 0], [-0.5, -1.0, -2.0])
    suffix = ScoredTree([5, 7, 8], [-1, 0, 1], [-0.1, -0.2, -0.3])
    found = merge_trees([head, suffix], 3, drafter="m")
    assert found == Proposal(tokens=(5, 7, 8), parents=(-1, 0, 1), drafter="m")
    assert found.scores == (-0.1, -0.2, -0.3)


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return tiny_target()


def merged(target: LlamaTarget) -> MergedDrafter:
    head = EagleDrafter(tiny_head(target), Placement(device=CPU, precision="float32"))
    return MergedDrafter(SuffixDrafter(), head, shape=SHAPE)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=1.3, seed=4),
        SamplingParams(max_tokens=30, temperature=1.3, seed=4, n=2),
    ],
    ids=["greedy", "seeded", "choices"],
)
def test_output_is_plain_output(target: LlamaTarget, params: SamplingParams) -> None:
    config = EngineConfig(num_draft_tokens=6, schedule="fixed")
    plain = Engine(target, config=config).generate(PROMPTS, params)
    got = Engine(target, drafter=merged(target), config=config).generate(PROMPTS, params)
    assert [r.token_ids for r in got] == [r.token_ids for r in plain]
    drafted = [step.drafted for r in got for step in r.steps if not step.is_prefill]
    assert max(drafted) == SHAPE.num_nodes
    assert any(len(step.reached) > SHAPE.depth for r in got for step in r.steps), "the suffix reaches past the head"


def test_both_give_nodes_and_a_chain_of_the_suffix_stays_together(target: LlamaTarget) -> None:
    drafter = merged(target)
    assert isinstance(drafter, TapDrafter) and drafter.taps == (1, 2, 4)
    engine = Engine(target, drafter=drafter, config=EngineConfig(num_draft_tokens=6, schedule="fixed"))
    seen: list[Proposal] = []
    propose = drafter.propose
    drafter.propose = lambda requests: [seen.append(p) or p for p in propose(requests)]  # type: ignore[method-assign, func-returns-value]
    engine.generate([[1, 2, 3, 4, 5, 6] * 3], SamplingParams(max_tokens=4))
    for proposal in seen:
        assert proposal.draft_probs_NV is None and len(set(paths_of(proposal.tokens, proposal.parents))) == len(
            proposal
        )
        assert all(parent < node for node, parent in enumerate(proposal.parents))
    assert any(not p.is_chain for p in seen)
    assert all(first is not second for first, second in pairwise(seen))
