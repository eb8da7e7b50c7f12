"""Targets with a known law and drafters that are always right, always wrong, random, drawn, or trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from outrider.drafters.base import DraftRequest
from outrider.models.table import TableModel
from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.types import NO_DRAFT, DraftMode, Proposal

VOCAB = 7


def table_model(
    seed: int = 0, *, eos: tuple[int, ...] = (), scale: float = 1.5, max_positions: int = 4096
) -> TableModel:
    """A second-order table over seven tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * scale
    return TableModel(logits, eos_token_ids=eos, max_positions=max_positions)


class Scripted:
    """Proposes what a function makes of a request; checks the protocol as it goes."""

    def __init__(self, make: Callable[[DraftRequest], Proposal], name: str = "scripted") -> None:
        self.name = name
        self._make = make
        self.live: dict[int, list[int]] = {}

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        assert sequence not in self.live
        self.live[sequence] = list(tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for request in requests:
            assert self.live[request.sequence] == list(request.tokens), "observed tokens must be the committed ones"
            assert request.num_draft_tokens >= 1
        return [self._make(request) for request in requests]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        self.live[sequence].extend(tokens[len(tokens) - num_new :])
        assert self.live[sequence] == list(tokens)

    def finish(self, sequence: int) -> None:
        del self.live[sequence]


def oracle(reference: Callable[[int], Sequence[int]], *, wrong_at: int | None = None) -> Scripted:
    """Knows the future: ``reference(sequence)`` is the whole text. With ``wrong_at`` it errs at that depth."""

    def make(request: DraftRequest) -> Proposal:
        done = len(request.tokens)
        tokens = list(reference(request.sequence)[done : done + request.num_draft_tokens])
        if wrong_at is not None and wrong_at < len(tokens):
            tokens[wrong_at] = (tokens[wrong_at] + 1) % VOCAB
        return Proposal.chain(tokens, drafter="oracle") if tokens else NO_DRAFT

    return Scripted(make, "oracle")


def right_trees(reference: Callable[[int], Sequence[int]], seed: int) -> Scripted:
    """Knows the future, and hides it: at each level of a tree the right token stands among random siblings, which have
    children too, and now and then it is left out."""
    rng = random.Random(seed)

    def make(request: DraftRequest) -> Proposal:
        done = len(request.tokens)
        tokens: list[int] = []
        parents: list[int] = []
        level = [-1]
        for right in reference(request.sequence)[done : done + request.num_draft_tokens]:
            candidates = [rng.randrange(VOCAB), right if rng.random() < 0.85 else (right + 1) % VOCAB]
            following = []
            for parent in level:
                for token in candidates[:: rng.choice((1, -1))]:
                    following.append(len(tokens))
                    tokens.append(token)
                    parents.append(parent)
            # All that may go on rightly, and one that does not.
            level = [node for node in following if tokens[node] == right][:2] + following[-1:]
        return Proposal(tokens=tuple(tokens), parents=tuple(parents), drafter="right") if tokens else NO_DRAFT

    return Scripted(make, "right")


def random_chains(seed: int) -> Scripted:
    """Random deterministic chains of random length, sometimes none."""
    rng = random.Random(seed)

    def make(request: DraftRequest) -> Proposal:
        size = rng.randint(0, request.num_draft_tokens)
        return Proposal.chain([rng.randrange(VOCAB) for _ in range(size)], drafter="random") if size else NO_DRAFT

    return Scripted(make, "random")


def random_trees(seed: int) -> Scripted:
    """Random trees, duplicate siblings included."""
    rng = random.Random(seed)

    def make(request: DraftRequest) -> Proposal:
        parents: list[int] = []
        depths: list[int] = []
        for node in range(rng.randint(1, 9)):
            options = [-1] + [p for p in range(node) if depths[p] < request.num_draft_tokens]
            parent = rng.choice(options)
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        tokens = tuple(rng.randrange(VOCAB) for _ in parents)
        return Proposal(tokens=tokens, parents=tuple(parents), drafter="trees")

    return Scripted(make, "trees")


def drawn_chains(law: torch.Tensor) -> Scripted:
    """Chains drawn from one fixed law (shared noise for seeded requests), the mode of draft models."""

    def make(request: DraftRequest) -> Proposal:
        tokens: list[int] = []
        for depth in range(request.num_draft_tokens):
            purpose = Purpose.TARGET if request.mode is DraftMode.SHARED else Purpose.DRAFT
            key = noise_key(request.seed, request.choice, len(request.tokens) + depth, purpose)
            noise = 0 if request.mode is DraftMode.GREEDY else gumbel_BV([key], VOCAB)[0]
            tokens.append(int((law.log() + noise).argmax()))
        probs = law.repeat(len(tokens), 1) if request.mode is DraftMode.DRAWN else None
        return Proposal.chain(tokens, drafter="drawn", draft_probs_NV=probs)

    return Scripted(make, "drawn")


def all_drafters() -> dict[str, Callable[[], Scripted]]:
    """Makers of every kind that needs no knowledge of the future."""
    law = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.15, 0.05])
    return {
        "random": lambda: random_chains(1),
        "trees": lambda: random_trees(2),
        "drawn": lambda: drawn_chains(law),
    }
