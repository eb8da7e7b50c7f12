"""Acceptance of a head along texts that are there already: one pass of the target, then every wiring of the head on it.

The texts are the target's own greedy answers, so a draft token is kept exactly if it is the text's next token, and a draft
that was right so far has read the very tokens that stand there. So all drafts of all positions are unrolled at once, each
step reading the text::

    committed t[0] .. t[c-1]: the draft of step s stands at index c - 2, reads t[c-1+s], and should say t[c+s]

and decoding is walked along the answer: a pass keeps what was right, adds one token, and the next draft begins there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.device import one_torch_thread
from outrider.drafters.eagle_head import EagleHead
from outrider.metrics import SpeculationStats
from outrider.models.base import PackedRows, Target

__all__ = ["AnsweredText", "draft_ids", "read_texts", "walk"]

_ROWS_A_PASS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredText:
    """A prompt with the target's greedy answer, as the target read it.

    Attributes:
        tokens: prompt and answer. num_prompt: how many are the prompt's.
        taps: hidden states by layer, ``[S, D]`` each: index i is the residual stream before layer i. The last token is
            never read.
    """

    tokens: tuple[int, ...]
    num_prompt: int
    taps: Mapping[int, Tensor]

    @property
    def starts(self) -> range:
        """Numbers of committed tokens at which a draft can begin: behind the answer's first token, before its last."""
        return range(self.num_prompt + 1, len(self.tokens))


def read_texts(
    target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]], layers: Sequence[int]
) -> list[AnsweredText]:
    """Read (prompt, answer) pairs once, keeping the hidden states of these layers."""
    found = []
    with one_torch_thread(target.spec.path.startswith("native")):
        for prompt, answer in texts:
            tokens = (*prompt, *answer)
            taps = _taps(target, tokens[:-1], layers)
            found.append(AnsweredText(tokens=tokens, num_prompt=len(prompt), taps=taps))
    return found


def _taps(target: Target, tokens: Sequence[int], layers: Sequence[int]) -> dict[int, Tensor]:
    cache = target.new_cache()
    slot = cache.allocate(len(tokens))
    pieces: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for start in range(0, len(tokens), _ROWS_A_PASS):
        rows = tokens[start : start + _ROWS_A_PASS]
        packed = PackedRows.pack([rows], slots=[slot], starts=[start], device=target.spec.device, logit_rows=(0,))
        result = target.forward(packed, cache, taps=tuple(layers))
        for layer in layers:
            pieces[layer].append(result.taps[layer].cpu())
    cache.free(slot)
    return {layer: torch.cat(parts) for layer, parts in pieces.items()}


class _AlongText:
    """Attention of drafts that read a known text: entries first, then the rows of one step after another.

    Args:
        entries_SS: which entry each entry sees. starts_Q: the entry at which each draft begins.
    """

    def __init__(self, entries_SS: Tensor, starts_Q: Tensor) -> None:
        self._entries_SS, self._seen_QS = entries_SS, entries_SS[starts_Q]
        self._past: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See :data:`outrider.drafters.eagle_head.Attend`."""
        past = self._past.setdefault(layer, [])
        past.append((keys, values))
        if len(past) == 1:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=self._entries_SS, enable_gqa=True)
            return found[0].transpose(0, 1)
        return self._from_drafts(queries, past)

    def _from_drafts(self, queries: Tensor, past: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """A draft sees the entries up to its start, and its own earlier steps."""
        (keys, values), *own = past
        num_rows, num_heads, width = queries.shape
        groups = keys.shape[1]
        q = queries.view(num_rows, groups, num_heads // groups, width) * width**-0.5
        scores = torch.einsum("qgmc,sgc->qgms", q, keys).masked_fill(~self._seen_QS[:, None, None], -torch.inf)
        steps = [torch.einsum("qgmc,qgc->qgm", q, each).unsqueeze(-1) for each, _ in own]
        shares = torch.cat((scores, *steps), dim=-1).softmax(dim=-1)
        mixed = torch.einsum("qgms,sgc->qgmc", shares[..., : len(keys)], values)
        for step, (_, each) in enumerate(own):
            mixed = mixed + shares[..., len(keys) + step, None] * each.unsqueeze(2)
        return mixed.reshape(num_rows, num_heads, width)


@torch.inference_mode()
def draft_ids(head: EagleHead, text: AnsweredText, *, window: int, num_steps: int) -> Tensor:
    """What a head drafts at every start of a text.

    Args:
        head: float32, its embedding attached; its config says which taps it reads.
        text: read with those taps.
        window: most entries looked back at.
        num_steps: draft tokens of a chain.

    Returns:
        Draft ids ``[num_steps, Q]`` for the Q starts; a step past the answer's end repeats its last token.
    """
    tokens_S = torch.tensor(text.tokens)
    num_entries, last = len(text.tokens) - 2, len(text.tokens) - 1
    features_SD = head.fuse(torch.cat([text.taps[layer][:num_entries].float() for layer in head.config.tap_layers], -1))
    places_S = torch.arange(num_entries)
    gaps_SS = places_S.unsqueeze(1) - places_S
    starts_Q = torch.tensor([start - 2 for start in text.starts])
    attend = _AlongText((gaps_SS >= 0) & (gaps_SS < window), starts_Q)
    outputs = head(features_SD, tokens_S[1 : num_entries + 1], places_S, attend)[starts_Q]
    drafted = [head.logits(outputs).argmax(dim=-1)]
    for step in range(1, num_steps):
        read_Q = tokens_S[(starts_Q + 1 + step).clamp_max(last)]
        outputs = head(head.feedback(outputs), read_Q, starts_Q + step, attend)
        drafted.append(head.logits(outputs).argmax(dim=-1))
    return torch.stack(drafted)


def walk(text: AnsweredText, says_KQ: Tensor) -> SpeculationStats:
    """Decode along the answer with these draft tokens (target ids), as the engine counts it.

    A draft never reaches the last token that is left, which the pass adds anyhow. (Where the engine does not know that an
    answer is about to end, it may count that token as a draft; passes and tokens are the same.)
    """
    answer, size = text.tokens, len(text.tokens)
    says, first = says_KQ.tolist(), text.num_prompt + 1
    stats = SpeculationStats()
    start = first
    while start < size:
        depth = min(len(says), size - start - 1)
        kept = 0
        while kept < depth and says[kept][start - first] == answer[start + kept]:
            kept += 1
        part = SpeculationStats(passes=1, steps=int(depth > 0), committed=kept + 1, drafted=depth, accepted=kept)
        part.reached = [int(level <= kept) for level in range(depth)]
        part.kept = [int(level < kept) for level in range(depth)]
        stats.merge(part)
        start += kept + 1
    return stats
