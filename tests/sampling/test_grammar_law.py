"""Exact proof in float64 that grammars keep the law: what a step commits follows the masked, renormalised target law.

Small worlds of single letters, whose languages are finite lists of words, so that masks can also be written down without
any parser. Drafts go through the drafters' own masking and through the very wrapper that the engine puts around a drafter.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.audit import law as audit
from outrider.audit.cases import World
from outrider.drafters.base import DraftRequest
from outrider.drafters.choice import DraftVocabulary
from outrider.drafters.constrain import mask_drafts
from outrider.drafters.forced import ForcedDrafter
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import warp_logits
from outrider.types import DraftMode, Proposal
from tests.engine.support import Scripted
from tests.sampling import reference
from tests.sampling.grammars import letter_grammar

LANGUAGES = (
    ("ab", "ac", "abc", "c"),
    ("a", "ab", "abc", "abcb", "b"),
    ("abc", "abb", "cab"),
    ("ca", "cb", "cc", "b", "bc"),
    ("aaa", "ab", "ba", "bb"),
)
EOS = 3
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6, "top_k": 2},
    {"temperature": 1.7, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.3, "repetition_penalty": 1.4},
    {"temperature": 1.0, "logit_bias": {0: 1.5, 2: -1.0}, "presence_penalty": 0.8},
    {"temperature": 0.0},
)
DEPTH = 3


def spelled(path: Sequence[int]) -> str:
    return "".join("abc"[token] for token in path)


def allowed_by_hand(words: Sequence[str], path: Sequence[int]) -> list[int]:
    """Letters that lead on to a word, and the end where a word ends; behind the end, the end."""
    if EOS in path:
        return [EOS]
    text = spelled(path)
    letters = [token for token in range(3) if any(word.startswith(text + "abc"[token]) for word in words)]
    return letters + [EOS] * (text in words)


def possible(words: Sequence[str], path: Sequence[int]) -> bool:
    return all(token in allowed_by_hand(words, path[:index]) for index, token in enumerate(path))


def make_world(seed: int, *, kind: str) -> tuple[World, tuple[str, ...], random.Random]:
    noise = random.Random(seed)
    words = LANGUAGES[seed % len(LANGUAGES)]
    fields = {"temperature": 1.0, **FIELDS[noise.randrange(len(FIELDS))]}
    if kind != "compare tree" and fields["temperature"] == 0:
        fields["temperature"] = 1.3
    paths = [path for size in range(DEPTH + 1) for path in itertools.product(range(4), repeat=size)]
    world = World(
        kind=kind,
        vocab_size=4,
        depth=DEPTH,
        params=SamplingParams(**fields, structured_outputs=StructuredOutputs(choice=words)),
        prompt=(0, 2),
        output=(),
        logits={path: torch.tensor([noise.gauss(0, 2) for _ in range(4)], dtype=torch.float64) for path in paths},
        grammar=letter_grammar(StructuredOutputs(choice=words), 3),
    )
    return world, words, noise


def wish(world: World, mode: DraftMode) -> DraftRequest:
    assert world.grammar is not None
    return DraftRequest(
        sequence=0,
        tokens=list(world.prompt),
        num_draft_tokens=DEPTH,
        mode=mode,
        params=world.params,
        seed=0,
        choice=0,
        grammar=GrammarMatcher(world.grammar),
        most_depth=DEPTH,
    )


def through_the_wrapper(world: World, proposal: Proposal, mode: DraftMode) -> Proposal:
    """What the engine verifies where a drafter proposes this."""
    inner = Scripted(lambda request: proposal)
    inner.start(0, world.prompt)
    [found] = ForcedDrafter(inner).propose([wish(world, mode)])
    return found


def with_proposals(world: World, proposals: Sequence[tuple[Proposal, float]]) -> World:
    values = {name: getattr(world, name) for name in World.__slots__}
    return World(**{**values, "proposals": tuple(proposals)})


def total_variation(world: World) -> float:
    [(_, branches, distance)] = audit._enumerate([world])
    assert branches > 0
    return distance


@pytest.mark.parametrize("seed", range(10))
def test_plain_decoding_follows_the_masked_renormalised_law(seed: int) -> None:
    world, words, _ = make_world(seed, kind="compare chain")
    for path, logits_V in world.logits.items():
        if not possible(words, path):
            continue
        tokens = allowed_by_hand(words, path)
        masked = reference.keep_only(logits_V.tolist(), tokens)
        expected = reference.law(masked, world.params, world.prompt, path, (EOS,))
        assert world.law_V(path).tolist() == pytest.approx(expected, abs=1e-12), (path, words)


def draw_law(world: World, raw: dict[tuple[int, ...], Tensor], path: tuple[int, ...], *, masks: bool) -> Tensor | None:
    """The law that a drafter draws behind ``path``, ``None`` where it stops drafting."""
    logits_1V = raw[path].unsqueeze(0)
    closed: set[int] = set()
    if masks:
        logits_1V, closed = mask_drafts(
            logits_1V, [wish(world, DraftMode.DRAWN)], [path], DraftVocabulary(target_size=4)
        )
    return None if closed else warp_logits(logits_1V, [world.params]).softmax(dim=-1)[0]


def drawn_chains(world: World, noise: random.Random, *, masks: bool) -> list[tuple[Proposal, float]]:
    """All chains that a drafter with a law of its own may draw, each as the engine will see it, with its probability."""
    raw = {path: torch.tensor([noise.gauss(0, 2) for _ in range(4)], dtype=torch.float64) for path in world.logits}
    size = noise.randint(1, DEPTH)
    waiting: list[tuple[tuple[int, ...], list[Tensor], float]] = [((), [], 1.0)]
    found: list[tuple[Proposal, float]] = []
    while waiting:
        path, laws, probability = waiting.pop()
        law_V = draw_law(world, raw, path, masks=masks) if len(path) < size else None
        if law_V is not None:
            waiting += [
                ((*path, token), [*laws, law_V], probability * float(law_V[token]))
                for token in range(4)
                if law_V[token] > 0
            ]
            continue
        chain = Proposal.chain(path, draft_probs_NV=torch.stack(laws) if laws else None)
        found.append((through_the_wrapper(world, chain, DraftMode.DRAWN), probability))
    return found


@pytest.mark.parametrize("masks", [True, False], ids=["masked", "ignorant"])
@pytest.mark.parametrize("seed", range(8))
def test_rejection_of_drawn_chains_keeps_the_law(seed: int, masks: bool) -> None:
    """A drafter that does not know the grammar wastes drafts, but what it drew stays, so it biases nothing."""
    world, _, noise = make_world(seed, kind="rejection chain")
    proposals = drawn_chains(world, noise, masks=masks)
    assert abs(sum(probability for _, probability in proposals) - 1) < 1e-12
    assert total_variation(with_proposals(world, proposals)) < audit.TOLERANCE


def random_tree(noise: random.Random) -> Proposal:
    parents: list[int] = []
    depths: list[int] = []
    for node in range(noise.randint(1, 7)):
        parent = noise.choice([-1, *(p for p in range(node) if depths[p] < DEPTH)])
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return Proposal(tokens=tuple(noise.randrange(4) for _ in parents), parents=tuple(parents))


@pytest.mark.parametrize("seed", range(12))
def test_trees_and_forced_tokens_keep_the_law(seed: int) -> None:
    world, words, noise = make_world(seed, kind="compare tree")
    tree = random_tree(noise)
    proposal = through_the_wrapper(world, tree, DraftMode.GREEDY)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    assert all(possible(words, path) for path in paths), "deterministic candidates are cut where they are forbidden"
    assert total_variation(with_proposals(world, [(proposal, 1.0)])) < audit.TOLERANCE
    assert total_variation(with_proposals(world, [(tree, 1.0)])) < audit.TOLERANCE, "uncut, too"


@pytest.mark.parametrize("seed", range(5))
def test_seeded_runs_equal_plain_ones(seed: int) -> None:
    world, _, noise = make_world(seed, kind="seeded compare")
    proposal = through_the_wrapper(world, random_tree(noise), DraftMode.SHARED)
    _, _, share = audit._compare_seeded(with_proposals(world, [(proposal, 1.0)]), noise)
    assert share == 0


def test_a_drawn_chain_that_was_cut_at_a_forbidden_token_would_be_biased() -> None:
    """The enumeration is sharp: cutting after the draw, which other engines do, shows."""
    distances = []
    for seed in range(5):
        world, words, noise = make_world(seed, kind="rejection chain")
        proposals = []
        for proposal, probability in drawn_chains(world, noise, masks=False):
            is_possible = [possible(words, proposal.tokens[: index + 1]) for index in range(len(proposal))]
            proposals.append((proposal.truncate([*is_possible, False].index(False)), probability))
        distances.append(total_variation(with_proposals(world, proposals)))
    assert max(distances) > 1e-2
