"""Drafting with an EAGLE-3 head: chains, or trees by expand and rerank (EAGLE-2, arXiv 2406.16858).

After every verdict the entries of kept tokens are made from the target's taps; whatever the head made of its own outputs
is gone (:mod:`outrider.drafters.eagle_reader`). Chains obey the request's :class:`outrider.types.DraftMode`. Trees hold
deterministic candidates for draw-and-compare, above temperature 0 ranked with the verifier's own noise.

``min_prob`` ends drafts early without bias (law 5). Of a chain, a token is drafted only while the product, over the chain
so far and this token's place, of the *largest* probability of each draft law stays above it: what is known before the
token is drawn, never the probability of the token that was drawn. Trees are not drawn at all, so there nodes are left out
by their own estimated probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.device import Placement
from outrider.drafters.base import DraftRequest
from outrider.drafters.choice import DraftVocabulary, choose_tokens, largest_probs, tree_law
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.eagle_pass import EaglePass
from outrider.drafters.eagle_reader import DraftWalk, EagleReader
from outrider.drafters.tree import TreeGrowth, TreeShape
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT, Proposal

__all__ = ["EagleDrafter"]


class EagleDrafter:
    """A :class:`outrider.drafters.base.TapDrafter`.

    Args:
        head: with the target's embedding attached.
        placement: where it runs; int8 runs as bfloat16.
        name: for reports.
        tree: shape of the trees; ``None`` drafts chains.
        min_prob: drafts less likely than this to be kept are left out, as above.
        window: most positions looked back at; the length that the head was trained on if not given.

    Raises:
        ConfigError: ``min_prob`` or ``window`` out of range.
    """

    def __init__(
        self,
        head: EagleHead,
        placement: Placement,
        *,
        name: str = "eagle3",
        tree: TreeShape | None = None,
        min_prob: float = 0.0,
        window: int | None = None,
    ) -> None:
        if not 0 <= min_prob <= 1:
            raise ConfigError(f"drafter {name}: min_prob {min_prob} is not possible; allowed: 0 to 1")
        window = head.config.max_positions if window is None else window
        if not 2 <= window <= 1 << 20:
            raise ConfigError(f"drafter {name}: window {window} is not possible; allowed: 2 to {1 << 20}")
        self.name = name
        self.tree = tree
        self.min_prob = min_prob
        self.taps = head.config.tap_layers
        with torch.inference_mode():
            self._head = EaglePass(head, placement)
        self._reader = EagleReader(self._head, window)
        ids_U = self._head.target_ids_U
        self._vocabulary = DraftVocabulary(target_size=head.config.target_vocab_size, ids_U=ids_U)

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence begins; its prompt's taps follow."""
        self._reader.open(sequence)

    @torch.inference_mode()
    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        """Hidden states of committed tokens; see :class:`outrider.drafters.base.TapDrafter`."""
        self._reader.absorb(sequence, start, taps_RD)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """A chain or tree for each request."""
        if self.tree is None:
            return self._draft_chains(requests)
        return [growth.proposal(self.name) for growth in self.grow(requests, self.tree)]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Nothing: the request brings the tokens, and :meth:`absorb` their hidden states."""

    def finish(self, sequence: int) -> None:
        """Forget the sequence."""
        self._reader.finish(sequence)

    @torch.inference_mode()
    def grow(self, requests: Sequence[DraftRequest], shape: TreeShape) -> list[TreeGrowth]:
        """All candidates of a tree for each request, with their scores."""
        min_score = math.log(self.min_prob) if self.min_prob else -math.inf
        growths = [TreeGrowth(shape=shape, min_score=min_score) for _ in requests]
        depths = [min(request.num_draft_tokens, shape.depth) for request in requests]
        walk = self._walk(requests, max(depths) - 1, shape.width)
        above: list[list[int]] = [[] for _ in requests]
        for level in range(max(depths)):
            growing = [g for g, depth in enumerate(depths) if depth > level and growths[g].frontier]
            if not growing:
                break
            if level > 0:
                walk.step(*self._frontier_tensors(growths, above, growing))
            above = [growth.frontier for growth in growths]
            self._expand(walk.logits(), requests, growths, growing, level)
        return growths

    def _expand(
        self,
        logits_BTU: Tensor,
        requests: Sequence[DraftRequest],
        growths: Sequence[TreeGrowth],
        growing: Sequence[int],
        level: int,
    ) -> None:
        """Give every frontier node of the growing trees its likeliest children: one search for all of them."""
        sizes = [len(growths[g].frontier) for g in growing]
        logits_RU = torch.cat([logits_BTU[g, :size] for g, size in zip(growing, sizes, strict=True)])
        law_RU = tree_law(logits_RU, [requests[g] for g in growing], sizes, level, self._vocabulary)
        best = law_RU.topk(min(growths[growing[0]].shape.width, law_RU.shape[1]), dim=-1)
        tokens = self._head.target_ids_U[best.indices].tolist()
        logprobs = best.values.tolist()
        first = 0
        for g, size in zip(growing, sizes, strict=True):
            growths[g].expand_into(tokens[first : first + size], logprobs[first : first + size])
            first += size

    def _frontier_tensors(
        self, growths: Sequence[TreeGrowth], above: Sequence[Sequence[int]], growing: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Tokens of the growing trees' frontiers and the place of each node's parent in the frontier before, padded."""
        size = max(len(growths[g].frontier) for g in growing)
        tokens = [[0] * size for _ in growths]
        parents = [[0] * size for _ in growths]
        for g in growing:
            places = {node: place for place, node in enumerate(above[g])}
            for index, node in enumerate(growths[g].frontier):
                tokens[g][index] = growths[g].tokens[node]
                parents[g][index] = places[growths[g].parents[node]]
        device = self._head.device
        return torch.tensor(tokens, device=device), torch.tensor(parents, device=device)

    def _walk(self, requests: Sequence[DraftRequest], levels: int, width: int) -> DraftWalk:
        return self._reader.catch_up([(r.sequence, r.tokens) for r in requests], levels=levels, width=width)

    def _draft_chains(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        budgets = [request.num_draft_tokens for request in requests]
        walk = self._walk(requests, max(budgets) - 1, 1)
        chains: list[list[int]] = [[] for _ in requests]
        laws: list[list[Tensor]] = [[] for _ in requests]
        confidences = [1.0] * len(requests)
        going = list(range(len(requests)))
        for depth in range(max(budgets)):
            if depth > 0:
                last = torch.tensor([[chain[-1] if chain else 0] for chain in chains], device=self._head.device)
                walk.step(last, torch.zeros_like(last))
            going = [index for index in going if budgets[index] > depth]
            logits_BU = walk.logits()[going, 0]
            going, logits_BU = self._confident(going, logits_BU, requests, confidences)
            if not going:
                break
            tokens, probs = choose_tokens(logits_BU, [requests[index] for index in going], depth, self._vocabulary)
            for index, token, probs_V in zip(going, tokens, probs, strict=True):
                chains[index].append(token)
                if probs_V is not None:
                    laws[index].append(probs_V)
        return [self._chain(chain, law) for chain, law in zip(chains, laws, strict=True)]

    def _confident(
        self, going: list[int], logits_BU: Tensor, requests: Sequence[DraftRequest], confidences: list[float]
    ) -> tuple[list[int], Tensor]:
        """Those chains that go on, judged before their next token is chosen, and their rows."""
        if not self.min_prob:
            return going, logits_BU
        peaks = largest_probs(logits_BU, [requests[index] for index in going])
        for index, peak in zip(going, peaks, strict=True):
            confidences[index] *= peak
        rows = [row for row, index in enumerate(going) if confidences[index] >= self.min_prob]
        return [going[row] for row in rows], logits_BU[rows]

    def _chain(self, chain: Sequence[int], law: Sequence[Tensor]) -> Proposal:
        if not chain:
            return NO_DRAFT
        return Proposal.chain(chain, drafter=self.name, draft_probs_NV=torch.stack(list(law)) if law else None)
