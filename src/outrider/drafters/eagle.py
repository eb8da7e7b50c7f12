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
from outrider.drafters.base import MOST_DRAFTS, DraftRequest
from outrider.drafters.choice import DraftVocabulary, choose_tokens, largest_probs, tree_law
from outrider.drafters.constrain import open_drafts
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.eagle_native import NativeEntries
from outrider.drafters.eagle_native_head import GrowthLimits, NativeHead
from outrider.drafters.eagle_pass import EaglePass
from outrider.drafters.eagle_reader import DraftWalk, EagleReader
from outrider.drafters.eagle_walk import TorchEntries
from outrider.drafters.tree import ScoredTree, TreeGrowth, TreeShape
from outrider.errors import ConfigError
from outrider.native.library import Context
from outrider.types import NO_DRAFT, Proposal

__all__ = ["EagleDrafter"]

MAX_CHAIN = 1 << 20
"""No engine asks for more."""


class EagleDrafter:
    """A :class:`outrider.drafters.base.TapDrafter`.

    Args:
        head: with the target's embedding attached.
        placement: where it runs, and how. Without ``context`` every precision but float32 runs as bfloat16.
        context: the native target's threads; the head's passes then are native ones, in bfloat16 or int8.
        card_rates: see :class:`outrider.drafters.base.ModelDrafter`.
        name: for reports.
        tree: shape of the trees; ``None`` drafts chains.
        min_prob: drafts less likely than this to be kept are left out, as above.
        window: most positions looked back at; the length that the head was trained on if not given.

    Attributes:
        path: which code runs the head's passes, and in which precision.

    Raises:
        ConfigError: ``min_prob`` or ``window`` out of range, or a precision that the native pass of a head does not run.
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
        context: Context | None = None,
        card_rates: tuple[float, ...] = (),
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
            self._entries, self.path = _make_entries(head, placement, context)
        self.cost_key = f"head {head.config.to_json()} {self.path} {tree}"
        self.nodes_per_level = 1.0 if tree is None else tree.num_nodes / tree.depth
        self.deepest = self.levels = 1 << 10 if tree is None else tree.depth
        self.card_rates = card_rates
        self._min_score = math.log(min_prob) if min_prob else -math.inf
        self._window = window
        self._tap_bytes = len(self.taps) * head.config.target_hidden_size * placement.activation_dtype.itemsize
        self._reader = EagleReader(self._entries, window)
        ids_U = head.target_ids()
        self._ids: list[int] = ids_U.tolist()
        self.vocabulary = DraftVocabulary(target_size=head.config.target_vocab_size, ids_U=ids_U.to(placement.device))
        self.is_start_free = False  # past its first token a chain is drafted from the head's own outputs

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence begins; its prompt's taps follow."""
        self._reader.open(sequence)

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        """Hidden states of committed tokens; see :class:`outrider.drafters.base.TapDrafter`."""
        self._reader.absorb(sequence, start, taps_RD)

    def backlog(self, sequence: int, num_tokens: int) -> int:
        """Positions whose taps wait, as far as they are still kept."""
        return self._reader.backlog(sequence)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """A chain or tree for each request."""
        if self.tree is None:
            return self._draft_chains(requests)
        return [tree.proposal(self.tree.num_nodes, self.name) for tree in self.grow(requests, self.tree)]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Nothing: the request brings the tokens, and :meth:`absorb` their hidden states."""

    def finish(self, sequence: int) -> None:
        """Forget the sequence."""
        self._reader.finish(sequence)

    def memory_bytes(self, num_tokens: int) -> int:
        """Most bytes that a sequence takes: entries, a walk's nodes, and hidden states that wait to become entries."""
        nodes = MOST_DRAFTS if self.tree is None else self.tree.depth * self.tree.width
        entries = self._entries.most_bytes(num_tokens, self._window, nodes)
        return entries + min(num_tokens, 2 * self._window) * self._tap_bytes

    def suspend(self, sequence: int) -> None:
        """Give the sequence's memory back."""
        self._reader.finish(sequence)

    def resume(self, sequence: int, tokens: Sequence[int]) -> None:
        """Its hidden states follow anew."""
        self._reader.open(sequence)

    def num_bytes(self) -> int:
        """Bytes held by all sequences."""
        return self._entries.num_bytes() + self._reader.waiting_bytes()

    @torch.inference_mode()
    def grow(self, requests: Sequence[DraftRequest], shape: TreeShape) -> list[ScoredTree]:
        """All candidates of a tree for each request, with their scores."""
        depths = [min(request.num_draft_tokens, shape.depth) for request in requests]
        if self._can_grow_at_once(requests):
            limits = GrowthLimits(width=shape.width, min_score=self._min_score, min_level=shape.min_level)
            return self._grow_at_once(requests, depths, limits)
        return [growth.candidates() for growth in self._grow_by_levels(requests, depths, shape)]

    def _can_grow_at_once(self, requests: Sequence[DraftRequest]) -> bool:
        return isinstance(self._entries, NativeEntries) and self._entries.can_grow and _takes_best(requests)

    def _grow_at_once(
        self, requests: Sequence[DraftRequest], depths: Sequence[int], limits: GrowthLimits
    ) -> list[ScoredTree]:
        """Where the head's own estimates decide alone, the kernels need nobody between the levels."""
        assert isinstance(self._entries, NativeEntries)
        trees = [ScoredTree((), (), ()) for _ in requests]
        walkers = [index for index, depth in enumerate(depths) if depth > 0]
        if walkers:
            runs = self._reader.take_runs([(requests[index].sequence, requests[index].tokens) for index in walkers])
            found = self._entries.grow(runs, [depths[index] for index in walkers], limits)
            for index, tree in zip(walkers, found, strict=True):
                trees[index] = tree
        return trees

    def _grow_by_levels(
        self, requests: Sequence[DraftRequest], depths: Sequence[int], shape: TreeShape
    ) -> list[TreeGrowth]:
        growths = [TreeGrowth(shape=shape, min_score=self._min_score) for _ in requests]
        walkers = growing = [g for g, depth in enumerate(depths) if depth > 0]
        if not walkers:
            return growths
        walk = self._walk([requests[g] for g in walkers], max(depths) - 1, shape.width)
        above: list[list[int]] = []
        for level in range(max(depths)):
            growing = [g for g in growing if depths[g] > level and growths[g].frontier]
            if not growing:
                break
            if level > 0:
                growths_here = [growths[g] if g in growing else None for g in walkers]
                walk.step(*_frontiers(growths_here, above))
            above = [growths[g].frontier for g in walkers]
            self._expand(walk, requests, growths, growing, level)
        return growths

    def most_drafts(self, num_tokens: int) -> int:
        """As many as are asked for: what lies too far back is forgotten."""
        return MAX_CHAIN

    @torch.inference_mode()
    def logits_along(self, requests: Sequence[DraftRequest], continuations: Sequence[Sequence[int]]) -> list[Tensor]:
        """See :class:`outrider.drafters.base.LawDrafter`; one step of the walk for each token, all requests together."""
        going = [index for index, tokens in enumerate(continuations) if tokens]
        rows: list[list[Tensor]] = [[] for _ in requests]
        if not going:
            return [torch.empty(0, len(self._ids)) for _ in requests]
        walkers, deepest = going, max(map(len, continuations))
        walk = self._walk([requests[index] for index in walkers], deepest - 1, 1)
        for depth in range(deepest):
            going = [index for index in walkers if len(continuations[index]) > depth]
            if depth > 0:
                last = [[continuations[index][depth - 1]] if index in going else [] for index in walkers]
                walk.step(last, [[0] * len(tokens) for tokens in last])
            for index, row_U in zip(going, walk.logits().clone(), strict=True):
                rows[index].append(row_U)
        return [torch.stack(each) if each else torch.empty(0, len(self._ids)) for each in rows]

    def _expand(
        self,
        walk: DraftWalk,
        requests: Sequence[DraftRequest],
        growths: Sequence[TreeGrowth],
        growing: Sequence[int],
        level: int,
    ) -> None:
        """Give every frontier node of the growing trees its likeliest children: one search for all of them."""
        wishes = [requests[g] for g in growing]
        sizes = [len(growths[g].frontier) for g in growing]
        if _takes_best(wishes):
            columns, logprobs = walk.best()
        else:
            paths = [growths[g].path(node) for g in growing for node in growths[g].frontier]
            law_RU = tree_law(walk.logits(), wishes, sizes, level, self.vocabulary, paths)
            best = law_RU.topk(min(growths[growing[0]].shape.width, law_RU.shape[1]), dim=-1)
            columns, logprobs = best.indices.tolist(), best.values.tolist()
        tokens = [[self._ids[column] for column in row] for row in columns]
        first = 0
        for g, size in zip(growing, sizes, strict=True):
            growths[g].expand_into(tokens[first : first + size], logprobs[first : first + size])
            first += size

    def _walk(self, requests: Sequence[DraftRequest], levels: int, width: int) -> DraftWalk:
        return self._reader.catch_up([(r.sequence, r.tokens) for r in requests], levels=levels, width=width)

    def _draft_chains(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        budgets = [request.num_draft_tokens for request in requests]
        if self._can_grow_at_once(requests):
            trees = self._grow_at_once(requests, budgets, GrowthLimits(width=1, min_score=self._min_score))
            return [self._chain(tree.tokens, ()) for tree in trees]
        walkers = going = [index for index, budget in enumerate(budgets) if budget > 0]
        chains: list[list[int]] = [[] for _ in requests]
        laws: list[list[Tensor]] = [[] for _ in requests]
        confidences = [1.0] * len(requests)
        walk = self._walk([requests[index] for index in walkers], max(budgets) - 1, 1) if walkers else None
        for depth in range(max(budgets)):
            going = [index for index in going if budgets[index] > depth]
            if walk is None or not going:
                break
            if depth > 0:
                last = [[chains[index][-1]] if index in going else [] for index in walkers]
                walk.step(last, [[0] * len(tokens) for tokens in last])
            going, tokens, probs = self._choose(walk, going, requests, chains, confidences)
            for index, token, probs_V in zip(going, tokens, probs, strict=True):
                chains[index].append(token)
                if probs_V is not None:
                    laws[index].append(probs_V)
        return [self._chain(chain, law) for chain, law in zip(chains, laws, strict=True)]

    def _choose(
        self,
        walk: DraftWalk,
        going: Sequence[int],
        requests: Sequence[DraftRequest],
        chains: Sequence[Sequence[int]],
        confidences: list[float],
    ) -> tuple[list[int], list[int], list[Tensor | None]]:
        """Of the chains that the walk's rows belong to those that go on, the next token of each, and its law if drawn."""
        wishes, depth = [requests[index] for index in going], len(chains[going[0]])
        if _takes_best(wishes):
            columns, logprobs = walk.best()
            peaks = [math.exp(values[0]) for values in logprobs]
            rows = self._confident(going, peaks, confidences)
            tokens = self.vocabulary.tokens([columns[row][0] for row in rows])
            return [going[row] for row in rows], tokens, [None] * len(rows)
        logits_BU, rows = open_drafts(walk.logits(), wishes, [chains[index] for index in going], self.vocabulary)
        going, wishes = [going[row] for row in rows], [wishes[row] for row in rows]
        peaks = largest_probs(logits_BU, wishes) if self.min_prob and rows else [1.0] * len(going)
        rows = self._confident(going, peaks, confidences)
        if not rows:
            return [], [], []
        tokens, laws = choose_tokens(logits_BU[rows], [wishes[row] for row in rows], depth, self.vocabulary)
        return [going[row] for row in rows], tokens, laws

    def _confident(self, going: Sequence[int], peaks: Sequence[float], confidences: list[float]) -> list[int]:
        """Rows of those chains that go on, judged before their next token is chosen."""
        if not self.min_prob:
            return list(range(len(going)))
        for index, peak in zip(going, peaks, strict=True):
            confidences[index] *= peak
        return [row for row, index in enumerate(going) if confidences[index] >= self.min_prob]

    def _chain(self, chain: Sequence[int], law: Sequence[Tensor]) -> Proposal:
        if not chain:
            return NO_DRAFT
        return Proposal.chain(chain, drafter=self.name, draft_probs_NV=torch.stack(list(law)) if law else None)


def _make_entries(
    head: EagleHead, placement: Placement, context: Context | None
) -> tuple[TorchEntries | NativeEntries, str]:
    if context is None:
        packed = EaglePass(head, placement)
        return TorchEntries(packed), f"pytorch {str(packed.dtype).removeprefix('torch.')}"
    native = NativeHead(head, placement.precision, context)
    return NativeEntries(native), f"native-{context.kernels} {placement.precision}"


def _takes_best(wishes: Sequence[DraftRequest]) -> bool:
    """True if all take the head's likeliest tokens as they are, which need not be looked for among logits."""
    return all(wish.params.is_greedy and wish.grammar is None for wish in wishes)


def _frontiers(
    growths: Sequence[TreeGrowth | None], above: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the trees' frontiers, and the place of each node's parent in the frontier before; ``None`` stands still."""
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    for growth, before in zip(growths, above, strict=True):
        nodes = [] if growth is None else growth.frontier
        places = {node: place for place, node in enumerate(before)}
        tokens.append([growth.tokens[node] for node in nodes] if growth else [])
        parents.append([places[growth.parents[node]] for node in nodes] if growth else [])
    return tokens, parents
