"""Drafts of a head computed from scratch: no cache, no batch, one text at a time.

By the module that is trained, or by the native pass with one row at a time in an empty cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.base import DraftRequest
from outrider.drafters.choice import needs_noise
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead, UnrolledAttention
from outrider.drafters.eagle_native import NativeEntries
from outrider.drafters.eagle_native_head import NativeHead
from outrider.drafters.eagle_reader import EntryRun
from outrider.drafters.tree import TreeShape
from outrider.models.base import PackedRows, Target
from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.sampling.warp import warp_logits
from outrider.types import DraftMode


class NativeScratch:
    """A head that the scratch functions run natively."""

    def __init__(self, head: EagleHead, native: NativeHead) -> None:
        self.config: EagleConfig = head.config
        self.target_ids = head.target_ids
        self._native = native

    def logits(self, taps_RD: Tensor, text: Sequence[int], first: int) -> Tensor:
        """Behind ``text``, whose positions ``first`` and on have these taps; the rest are drafts."""
        entries = NativeEntries(self._native)
        row, last = entries.take_row(), first + len(taps_RD) - 1
        runs = [
            EntryRun(row=row, count=index, position=first + index, tokens=[text[first + index + 1]], taps_RD=tap_RD)
            for index, tap_RD in enumerate(taps_RD.split(1))
        ]
        for run in runs[:-1]:
            entries.extend([run])
        drafts = text[last + 2 :]
        walk = entries.walk(runs[-1:], levels=len(drafts), width=1)
        for draft in drafts:
            walk.step([[draft]], [[0]])
        return walk.logits()[0].clone()


Head = EagleHead | NativeScratch


def taps_of(target: Target, head: Head, tokens: Sequence[int]) -> Tensor:
    """Taps of every token, read into an empty cache, ``[R, A * D]``."""
    cache = target.new_cache()
    slot = cache.allocate(len(tokens))
    rows = PackedRows.pack([tokens], slots=[slot], starts=[0], device=target.spec.device)
    taps = target.forward(rows, cache, taps=head.config.tap_layers).taps
    return torch.cat([taps[layer] for layer in head.config.tap_layers], dim=-1)


def draft_logits(target: Target, head: Head, tokens: Sequence[int], drafts: Sequence[int], first: int) -> Tensor:
    """Draft logits ``[U]`` behind committed tokens and drafts, made from the taps of positions ``first`` and on."""
    taps_RD, text = taps_of(target, head, tokens[:-1]), [*tokens, *drafts]
    if isinstance(head, NativeScratch):
        return head.logits(taps_RD[first:], text, first)
    hidden = head.fuse(taps_RD)[first:]
    for count in range(len(tokens) - 1, len(text)):
        size = count - first
        attend = UnrolledAttention(torch.ones(1, size, size).tril().bool())
        places = torch.arange(first, count)
        outputs = head(hidden[None], torch.tensor([text[first + 1 : count + 1]]), places[None], attend)[0]
        hidden = torch.cat((hidden, head.feedback(outputs[-1:])))
    return head.logits(outputs[-1])


def law_behind(
    target: Target, head: Head, request: DraftRequest, drafts: Sequence[int], first: int
) -> tuple[Tensor, Tensor]:
    """Scores over the target's vocabulary that choose the next draft token, and the law itself."""
    position = len(request.tokens) + len(drafts)
    logits = torch.full((1, target.spec.vocab_size), -math.inf)
    logits[0, head.target_ids()] = draft_logits(target, head, request.tokens, drafts, first)
    if request.params.is_greedy:
        return logits[0], logits[0].softmax(-1)
    warped = warp_logits(logits, [request.params])
    law = warped[0].softmax(-1)
    if not needs_noise(request):
        return warped[0], law
    purpose = Purpose.DRAFT if request.mode is DraftMode.DRAWN else Purpose.TARGET
    noise = gumbel_BV([noise_key(request.seed, request.choice, position, purpose)], logits.shape[1])
    return warped[0] + noise[0], law


def scratch_chain(
    target: Target, head: Head, request: DraftRequest, first: int, *, min_prob: float = 0.0
) -> tuple[list[int], list[Tensor]]:
    """The chain and the laws that its tokens have."""
    chain: list[int] = []
    laws: list[Tensor] = []
    confidence = 1.0
    while len(chain) < request.num_draft_tokens:
        scores, law = law_behind(target, head, request, chain, first)
        if request.params.is_greedy or request.mode is DraftMode.GREEDY:
            scores = law.log()
        confidence *= float(law.max())
        if confidence < min_prob:
            break
        chain.append(int(scores.argmax()))
        laws.append(law)
    return chain, laws


def scratch_tree(
    target: Target,
    head: Head,
    request: DraftRequest,
    first: int,
    *,
    shape: TreeShape,
    min_prob: float = 0.0,
) -> list[tuple[int, ...]]:
    """Paths of the tree's nodes, best first: expand and rerank by brute force."""
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    noised = needs_noise(request)
    for depth in range(min(shape.depth, request.num_draft_tokens)):
        level: list[tuple[tuple[int, ...], float]] = []
        for path, score in frontier:
            logits = torch.full((1, target.spec.vocab_size), -math.inf)
            logits[0, head.target_ids()] = draft_logits(target, head, request.tokens, path, first)
            if not request.params.is_greedy:
                logits = warp_logits(logits, [request.params])
            if noised:
                key = noise_key(request.seed, request.choice, len(request.tokens) + depth, Purpose.TARGET)
                logits = logits + gumbel_BV([key], logits.shape[1]).float()
            law = logits.log_softmax(-1)[0]
            order = sorted(range(len(law)), key=lambda token: -float(law[token]))[: shape.width]
            children = [((*path, token), score + float(law[token])) for token in order]
            level += [(p, s) for p, s in children if s > -math.inf and math.exp(s) >= min_prob]
        candidates += level
        frontier = sorted(level, key=lambda node: -node[1])[: shape.width]
    return [path for path, _ in sorted(candidates, key=lambda node: -node[1])[: shape.num_nodes]]
