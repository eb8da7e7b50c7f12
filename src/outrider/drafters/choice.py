"""How drafters with a law of their own choose: laws 5 to 7 in one place, for chains and for trees.

Logits have one column for each token of the draft vocabulary, which may be all of the target's tokens, the first of them,
or any ascending choice; noise is always that of the *target's* token ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.base import DraftRequest
from outrider.drafters.constrain import mask_drafts
from outrider.rng import Purpose, gumbel_at_BK, gumbel_BV, noise_key
from outrider.sampling.draw import argmax_tokens, draw_logits
from outrider.sampling.warp import warp_logits
from outrider.types import DraftMode

__all__ = ["DraftVocabulary", "choose_tokens", "largest_probs", "tree_law"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """Which of the target's tokens the columns of draft logits are.

    Attributes:
        target_size: V.
        ids_U: target id of each column, ascending; ``None`` if column i is token i (there may be fewer columns than V).
    """

    target_size: int
    ids_U: Tensor | None = None

    def noise_BU(self, keys: Sequence[int], num_columns: int, device: torch.device) -> Tensor:
        """Each key's Gumbel noise of the columns' tokens, float64."""
        if self.ids_U is None:
            return gumbel_BV(keys, num_columns, device)
        return gumbel_at_BK(keys, self.ids_U.expand(len(keys), -1))

    def tokens(self, columns: Sequence[int]) -> list[int]:
        """Target ids of some columns."""
        return list(columns) if self.ids_U is None else self.ids_U[list(columns)].tolist()

    def spread(self, probs_BU: Tensor) -> Tensor:
        """The same law over all of the target's tokens; those without a column are never drawn: probability 0."""
        missing = self.target_size - probs_BU.shape[1]
        if self.ids_U is None:
            return torch.nn.functional.pad(probs_BU, (0, missing)) if missing else probs_BU
        return probs_BU.new_zeros(probs_BU.shape[0], self.target_size).index_copy_(1, self.ids_U, probs_BU)


def choose_tokens(
    logits_BU: Tensor, requests: Sequence[DraftRequest], depth: int, vocabulary: DraftVocabulary
) -> tuple[list[int], list[Tensor | None]]:
    """One token for each request, as its mode asks, and the law ``[V]`` it was drawn from if it was drawn."""
    columns = argmax_tokens(logits_BU)
    laws: list[Tensor | None] = [None] * len(requests)
    drawn = [index for index, request in enumerate(requests) if needs_noise(request)]
    if not drawn:
        return vocabulary.tokens(columns), laws
    wishes = [requests[index] for index in drawn]
    warped_BU = warp_logits(logits_BU[drawn], [r.params for r in wishes])
    noise_BU = vocabulary.noise_BU([_key(r, depth) for r in wishes], warped_BU.shape[1], warped_BU.device)
    probs_BV = vocabulary.spread(warped_BU.softmax(dim=-1))
    for row, (index, column) in enumerate(zip(drawn, draw_logits(warped_BU, noise_BU), strict=True)):
        columns[index] = column
        if requests[index].mode is DraftMode.DRAWN:
            laws[index] = probs_BV[row]
    return vocabulary.tokens(columns), laws


def largest_probs(logits_BU: Tensor, requests: Sequence[DraftRequest]) -> list[float]:
    """Probability of the likeliest token under each request's draft law: a confidence that knows no draw."""
    sampled = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if sampled:
        warped_BU = warp_logits(logits_BU[sampled], [requests[row].params for row in sampled])
        logits_BU = logits_BU.index_copy(0, torch.tensor(sampled, device=logits_BU.device), warped_BU)
    peaks: list[float] = (logits_BU.amax(dim=-1) - logits_BU.logsumexp(dim=-1)).exp().tolist()
    return peaks


def tree_law(
    logits_RU: Tensor,
    requests: Sequence[DraftRequest],
    sizes: Sequence[int],
    level: int,
    vocabulary: DraftVocabulary,
    paths: Sequence[Sequence[int]],
) -> Tensor:
    """Log-probabilities that rank a level's candidates; request i owns the next ``sizes[i]`` rows.

    What a request's grammar forbids behind a row's path is -inf; where its output ends, everything is.

    Above temperature 0 the law carries the very noise that verification will use (unless the mode is ``GREEDY``): what is
    chosen there is a fixed function of the target's law and that noise, so knowing it tells which tokens are worth a node.
    """
    owners = [request for request, size in zip(requests, sizes, strict=True) for _ in range(size)]
    logits_RU, closed = mask_drafts(logits_RU, owners, paths, vocabulary)
    sampled = [row for row, owner in enumerate(owners) if not owner.params.is_greedy]
    if sampled:
        warped_RU = warp_logits(logits_RU[sampled], [owners[row].params for row in sampled])
        logits_RU = logits_RU.index_copy(0, torch.tensor(sampled, device=logits_RU.device), warped_RU)
    noised = [request for request in requests if needs_noise(request)]
    if noised:
        # Nodes of a level share their position, and so their noise: one row a request.
        keys = [noise_key(r.seed, r.choice, len(r.tokens) + level, Purpose.TARGET) for r in noised]
        noise_BU = vocabulary.noise_BU(keys, logits_RU.shape[1], logits_RU.device).to(logits_RU.dtype)
        noises = iter(noise_BU)
        for request, rows_NU in zip(requests, torch.split(logits_RU, list(sizes)), strict=True):
            if needs_noise(request):
                rows_NU += next(noises)  # a view of the copy made above
    law_RU = logits_RU.log_softmax(dim=-1)
    if closed:
        law_RU[sorted(closed)] = -math.inf
    return law_RU


def needs_noise(request: DraftRequest) -> bool:
    """True if the request's drafts are drawn, with whatever noise."""
    return request.mode is not DraftMode.GREEDY and not request.params.is_greedy


def _key(request: DraftRequest, depth: int) -> int:
    purpose = Purpose.DRAFT if request.mode is DraftMode.DRAWN else Purpose.TARGET
    return noise_key(request.seed, request.choice, len(request.tokens) + depth, purpose)
