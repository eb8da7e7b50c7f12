"""Small random worlds in which a verifier's law can be written down completely.

A world has a vocabulary of 3 to 5 tokens, raw logits for every continuation, a request with a prompt, some output and
sampling fields, and the proposals that its drafter may make, each with its probability.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.sampling.grammar import Grammar
from outrider.sampling.laws import ProcessedLaws
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.types import ROOT, Proposal
from outrider.verify.base import Place

__all__ = ["KINDS", "World", "random_world"]

KINDS = ("compare chain", "compare tree", "rejection chain", "seeded compare")
_MAX_NODES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One case of the audit.

    Attributes:
        kind: one of ``KINDS``.
        depth: most draft tokens on a path; laws are compared over ``depth + 1`` tokens.
        logits: raw logits behind every continuation, ``{path: [V]}``, float64.
        proposals: what the drafter may propose, and with which probability.
        prompt, output: history before the step.
        grammar: what the output must match.
    """

    kind: str
    vocab_size: int
    depth: int
    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits: dict[tuple[int, ...], Tensor]
    proposals: tuple[tuple[Proposal, float], ...] = field(default=())
    grammar: Grammar | None = None

    def state(self, path: Sequence[int] = (), seed: int = 0) -> SamplingState:
        """The request's state after ``path`` was committed too."""
        state = SamplingState(
            self.params,
            prompt_tokens=self.prompt,
            vocab_size=self.vocab_size,
            eos_token_ids=(self.vocab_size - 1,),
            seed=seed,
            choice=0,
        )
        if self.grammar is not None:
            state.constrain(GrammarMatcher(self.grammar))
        state.commit((*self.output, *path))
        return state

    def rows_RV(self, proposal: Proposal) -> Tensor:
        """What a target pass over the proposal returns."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return torch.stack([self.logits[path] for path in paths])

    def law_V(self, path: tuple[int, ...]) -> Tensor:
        """Plain decoding's law behind a path."""
        laws = ProcessedLaws(self.logits[path].unsqueeze(0), first_rows=[0], states=[self.state(path)])
        return laws.probs_BV([Place(sequence=0, node=ROOT, path=())])[0]

    def plain_laws_BV(self, num_before: int) -> Tensor:
        """Plain decoding's law behind every path of ``num_before`` tokens, ``[V ** num_before, V]``."""
        paths = list(itertools.product(range(self.vocab_size), repeat=num_before))
        logits_RV = torch.stack([self.logits[path] for path in paths])
        states = [self.state(path) for path in paths]
        laws = ProcessedLaws(logits_RV, first_rows=range(len(paths)), states=states)
        return laws.probs_BV([Place(sequence=row, node=ROOT, path=()) for row in range(len(paths))])


def random_world(kind: str, noise: random.Random) -> World:
    """A world of this kind; all its randomness comes from ``noise``."""
    vocab_size = noise.choice((3, 4, 5) if kind != "rejection chain" else (3, 3, 4))
    depth = noise.choice((1, 2, 3) if vocab_size == 3 else (1, 2))
    paths = [p for n in range(depth + 1) for p in itertools.product(range(vocab_size), repeat=n)]
    world = World(
        kind=kind,
        vocab_size=vocab_size,
        depth=depth,
        params=_random_params(vocab_size, noise, may_be_greedy=kind != "seeded compare"),
        prompt=tuple(noise.choices(range(vocab_size), k=3)),
        output=tuple(noise.choices(range(vocab_size), k=noise.randrange(3))),
        logits={path: _random_logits(vocab_size, noise) for path in paths},
    )
    proposals = _drawn_chains(world, noise) if kind == "rejection chain" else _fixed_proposal(world, noise)
    return World(**{name: getattr(world, name) for name in World.__slots__ if name != "proposals"}, proposals=proposals)


def _random_logits(vocab_size: int, noise: random.Random) -> Tensor:
    """Either smooth or on a coarse grid, so that ties meet the cuts."""
    if noise.random() < 0.3:
        return torch.tensor([float(noise.randrange(3)) for _ in range(vocab_size)], dtype=torch.float64)
    return torch.tensor([noise.gauss(0, 2) for _ in range(vocab_size)], dtype=torch.float64)


def _random_params(vocab_size: int, noise: random.Random, *, may_be_greedy: bool) -> SamplingParams:
    def sometimes(value: float, neutral: float) -> float:
        return value if noise.random() < 0.25 else neutral

    can_ban = vocab_size > 3
    return SamplingParams(
        temperature=noise.choice((0.0, 0.5, 0.8, 1.0, 1.0, 1.3, 1.7, 3.0) if may_be_greedy else (0.5, 1.0, 1.7)),
        top_k=int(sometimes(noise.randrange(1, vocab_size), 0)),
        top_p=sometimes(noise.uniform(0.3, 0.99), 1.0),
        min_p=sometimes(noise.uniform(0.01, 0.5), 0.0),
        repetition_penalty=sometimes(noise.uniform(0.7, 1.8), 1.0),
        presence_penalty=sometimes(noise.uniform(-1, 1), 0.0),
        frequency_penalty=sometimes(noise.uniform(-1, 1), 0.0),
        logit_bias={noise.randrange(vocab_size): noise.uniform(-2, 2)} if noise.random() < 0.3 else {},
        bad_words_token_ids=(noise.choices(range(vocab_size), k=2),) if can_ban and noise.random() < 0.4 else (),
        min_tokens=noise.randrange(4) if can_ban else 0,
    )


def _drawn_chains(world: World, noise: random.Random) -> tuple[tuple[Proposal, float], ...]:
    """Every chain that a drafter with a random law of its own may draw."""
    is_float32 = noise.random() < 0.3
    laws = {
        path: _random_law(world, path, noise, may_copy=not is_float32)
        for path in world.logits
        if len(path) < world.depth
    }
    proposals: list[tuple[Proposal, float]] = []
    for tokens in itertools.product(range(world.vocab_size), repeat=world.depth):
        rows = [laws[tokens[:level]] for level in range(world.depth)]
        probability = 1.0
        for law, token in zip(rows, tokens, strict=True):
            probability *= float(law[token])
        if probability > 0:
            draft_probs_NV = torch.stack(rows).to(torch.float32 if is_float32 else torch.float64)
            proposals.append((Proposal.chain(tokens, draft_probs_NV=draft_probs_NV), probability))
    return tuple(proposals)


def _random_law(world: World, path: tuple[int, ...], noise: random.Random, *, may_copy: bool) -> Tensor:
    """A drafter's law: in sixty-fourths (exact in either precision), zeros among them; or the target's own law."""
    if may_copy and noise.random() < 0.15:
        return world.law_V(path)
    cuts = sorted(noise.choices(range(65), k=world.vocab_size - 1))
    parts = [b - a for a, b in itertools.pairwise([0, *cuts, 64])]
    if noise.random() < 0.2:
        parts = [64 if part == max(parts) else 0 for part in parts] if parts.count(max(parts)) == 1 else parts
    return torch.tensor([part / 64 for part in parts], dtype=torch.float64)


def _fixed_proposal(world: World, noise: random.Random) -> tuple[tuple[Proposal, float], ...]:
    if world.kind == "compare tree":
        return ((_random_tree(world, noise), 1.0),)
    length = max(noise.randrange(world.depth + 1), noise.randrange(world.depth + 1))
    return ((Proposal.chain(noise.choices(range(world.vocab_size), k=length)), 1.0),)


def _random_tree(world: World, noise: random.Random) -> Proposal:
    """A tree of up to six nodes; siblings may carry the same token."""
    parents: list[int] = []
    depths: list[int] = []
    for _ in range(_MAX_NODES):
        parent = noise.choice([ROOT, *(node for node, depth in enumerate(depths) if depth < world.depth)])
        parents.append(parent)
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return Proposal(tokens=tuple(noise.choices(range(world.vocab_size), k=len(parents))), parents=tuple(parents))
