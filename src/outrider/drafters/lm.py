"""A small language model with the target's tokens as drafter: chains, or top-k trees.

Chains obey the request's :class:`outrider.types.DraftMode`. Trees are never drawn from the draft law: they hold candidates
for draw-and-compare. Above temperature 0 they are the likeliest tokens of the draft law *with the very Gumbel noise that
verification will use at their position* (unless the mode is ``GREEDY``): what verification chooses there is a fixed function
of the target's law and that noise, so knowing the noise tells which tokens are worth a node, and cannot change the output.

Cost: a chain of k tokens takes k passes of the draft model over one row a sequence, the first of which also reads what
was committed since. A tree takes one pass a level; a pass reads the level's frontier, its ancestors and the root again
(at most 1 + width * level rows), because a pass knows relations only between its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.base import MOST_DRAFTS, DraftRequest
from outrider.drafters.choice import DraftVocabulary, choose_tokens, tree_law
from outrider.drafters.constrain import open_drafts
from outrider.drafters.reader import DraftReader
from outrider.drafters.tree import TreeGrowth, TreeShape
from outrider.models.base import Target
from outrider.types import NO_DRAFT, Proposal

__all__ = ["LMDrafter"]


class LMDrafter:
    """Drafts with a language model.

    Args:
        model: the draft model. Its tokens must be the target's (:func:`outrider.drafters.build.make_drafter` checks it);
            its vocabulary may be padded to another size.
        name: for reports.
        tree: shape of the trees; ``None`` drafts chains.
        vocab_size: of the target; the draft model's own if not given. Ids past it are never proposed.
    """

    def __init__(
        self, model: Target, *, name: str, tree: TreeShape | None = None, vocab_size: int | None = None
    ) -> None:
        self.name = name
        self.tree = tree
        self.model = model
        spec = model.spec
        shape = f"{spec.num_layers}x{spec.hidden_size} {spec.vocab_size} {spec.num_heads}/{spec.num_kv_heads}"
        self.cost_key = f"model {spec.fingerprint} {shape} {spec.precision} {spec.path} {tree}"
        self.nodes_per_level = 1.0 if tree is None else tree.num_nodes / tree.depth
        self.deepest = self.levels = 1 << 10 if tree is None else tree.depth
        self.card_rates: tuple[float, ...] = ()
        size = model.spec.vocab_size if vocab_size is None else vocab_size
        self.vocabulary = DraftVocabulary(target_size=size)
        self.is_start_free = True
        self._reader = DraftReader(model, size)

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """Nothing yet: the prompt is read when the first draft is asked for."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """A chain or tree for each request; ``NO_DRAFT`` past the draft model's window."""
        budgets = [min(r.num_draft_tokens, self._reader.deepest(len(r.tokens))) for r in requests]
        able = [index for index, budget in enumerate(budgets) if budget > 0]
        proposals = [NO_DRAFT] * len(requests)
        if able:
            draft = self._draft_chains if self.tree is None else self._draft_trees
            drafted = draft([requests[index] for index in able], [budgets[index] for index in able])
            for index, proposal in zip(able, drafted, strict=True):
                proposals[index] = proposal
        return proposals

    def most_drafts(self, num_tokens: int) -> int:
        """Up to the end of the draft model's window."""
        return self._reader.deepest(num_tokens)

    @torch.inference_mode()
    def logits_along(self, requests: Sequence[DraftRequest], continuations: Sequence[Sequence[int]]) -> list[Tensor]:
        """See :class:`outrider.drafters.base.LawDrafter`; a continuation is read in one pass."""
        found = []
        for request, continuation in zip(requests, continuations, strict=True):
            num_laws = min(len(continuation), self._reader.deepest(len(request.tokens)))
            if num_laws == 0:
                found.append(torch.empty(0, self._reader.vocab_size))
                continue
            first_BV = self._reader.catch_up([(request.sequence, request.tokens)])
            rest = continuation[: num_laws - 1]
            rows = [first_BV, self._reader.read_run(request.sequence, rest)] if rest else [first_BV]
            found.append(torch.cat(rows))
        return found

    def backlog(self, sequence: int, num_tokens: int) -> int:
        """Committed tokens that the draft model has not read."""
        return self._reader.backlog(sequence, num_tokens)

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Forget the drafts that were refused."""
        self._reader.settle(sequence, tokens)

    def finish(self, sequence: int) -> None:
        """Free the sequence's cache."""
        self._reader.finish(sequence)

    def memory_bytes(self, num_tokens: int) -> int:
        """Most bytes that a sequence takes: its text's keys and values, with drafts or one tree behind them."""
        drafts = MOST_DRAFTS if self.tree is None else 1 + self.tree.depth * self.tree.width
        return self._reader.memory_bytes(num_tokens, drafts)

    def suspend(self, sequence: int) -> None:
        """Free the sequence's cache."""
        self._reader.finish(sequence)

    def resume(self, sequence: int, tokens: Sequence[int]) -> None:
        """Nothing yet: the text is read when the next draft is asked for."""

    def num_bytes(self) -> int:
        """Bytes held by all sequences."""
        return self._reader.num_bytes()

    def _draft_chains(self, requests: Sequence[DraftRequest], budgets: Sequence[int]) -> list[Proposal]:
        chains: list[list[int]] = [[] for _ in requests]
        laws: list[list[Tensor]] = [[] for _ in requests]
        logits_BV = self._reader.catch_up([(r.sequence, r.tokens) for r in requests])
        active = list(range(len(requests)))
        for depth in range(max(budgets)):
            if depth > 0:
                active = [index for index in active if budgets[index] > depth]
            if not active:
                break
            if depth > 0:
                last = [chains[index][-1] for index in active]
                logits_BV = self._reader.read_drafts([requests[index].sequence for index in active], last)
            paths = [chains[index] for index in active]
            logits_BV, rows = open_drafts(logits_BV, [requests[i] for i in active], paths, self.vocabulary)
            active = [active[row] for row in rows]
            if not active:
                break
            tokens, probs = choose_tokens(logits_BV, [requests[i] for i in active], depth, self.vocabulary)
            for index, token, probs_V in zip(active, tokens, probs, strict=True):
                chains[index].append(token)
                if probs_V is not None:
                    laws[index].append(probs_V)
        return [
            Proposal.chain(chain, drafter=self.name, draft_probs_NV=torch.stack(law) if law else None)
            if chain
            else NO_DRAFT
            for chain, law in zip(chains, laws, strict=True)
        ]

    def _draft_trees(self, requests: Sequence[DraftRequest], budgets: Sequence[int]) -> list[Proposal]:
        assert self.tree is not None
        growths = [TreeGrowth(shape=self.tree) for _ in requests]
        logits_RV = self._reader.catch_up([(r.sequence, r.tokens) for r in requests])
        depths = [min(budget, self.tree.depth) for budget in budgets]
        active = list(range(len(requests)))
        for level in range(max(depths)):
            if level > 0:
                active = [index for index in active if depths[index] > level and growths[index].frontier]
                if not active:
                    break
                logits_RV = self._read_frontiers([requests[i] for i in active], [growths[i] for i in active])
            sizes = [len(growths[index].frontier) for index in active]
            paths = [growths[index].path(node) for index in active for node in growths[index].frontier]
            laws_RV = tree_law(logits_RV, [requests[i] for i in active], sizes, level, self.vocabulary, paths)
            for index, logprobs_NV in zip(active, torch.split(laws_RV, sizes), strict=True):
                growths[index].expand(logprobs_NV)
        return [growth.proposal(self.name) for growth in growths]

    def _read_frontiers(self, requests: Sequence[DraftRequest], growths: Sequence[TreeGrowth]) -> Tensor:
        return self._reader.read_trees(
            [r.sequence for r in requests],
            [r.tokens[-1] for r in requests],
            [growth.unread() for growth in growths],
            [len(growth.frontier) for growth in growths],
        )
