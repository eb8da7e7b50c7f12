"""How good a head is: by the real engine on held-out prompts, and position by position on held-out texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.device import Precision, one_torch_thread
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.eagle_head import EagleHead
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.metrics import SpeculationStats
from outrider.models.base import LoadedTarget, Target
from outrider.models.native import NativeTarget
from outrider.sampling.params import SamplingParams
from outrider.train.corpus import Text
from outrider.train.packing import TrainBatch
from outrider.train.unroll import UnrolledHead

__all__ = ["Acceptance", "decode_held_out", "forced_agreement", "head_drafter", "prompt_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What the engine measured: pooled over held-out prompts, greedy, chains."""

    stats: SpeculationStats
    num_prompts: int
    num_draft_tokens: int

    @property
    def tokens_per_pass(self) -> float:
        """Committed tokens a decode pass; 1.0 is plain decoding."""
        return self.stats.tokens_per_pass or 1.0

    @property
    def rates(self) -> list[float]:
        """For each depth, kept of all steps."""
        return [kept / max(self.stats.steps, 1) for kept in self.stats.kept]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for logs and the head's folder."""
        return {
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "accepted_length": None if self.stats.accepted_length is None else round(self.stats.accepted_length, 4),
            "kept_at_depth": [round(rate, 4) for rate in self.rates],
            "reached": list(self.stats.reached),
            "kept": list(self.stats.kept),
            "prompts": self.num_prompts,
            "passes": self.stats.passes,
            "draft": f"chain of {self.num_draft_tokens}, greedy",
        }


def prompt_tokens(text: Text) -> list[int]:
    """A text up to its last answer."""
    end = len(text.tokens)
    while end > 0 and text.trained[end - 1]:
        end -= 1
    return list(text.tokens[:end])


def head_drafter(head: EagleHead, target: LoadedTarget) -> EagleDrafter:
    """The head with the weights of this moment, in bfloat16 or float32 as served: natively beside a native target."""
    is_exact = target.placement.precision == "float32"
    precision: Precision = "float32" if is_exact else "bfloat16"
    context = target.context if isinstance(target, NativeTarget) and not is_exact else None
    return EagleDrafter(head, replace(target.placement, precision=precision), context=context)


def decode_held_out(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, max_tokens: int, num_draft_tokens: int = 4
) -> Acceptance:
    """Decode prompts greedily with the head as the engine's drafter, a chain of so many tokens in every pass."""
    config = EngineConfig(num_draft_tokens=num_draft_tokens, schedule="fixed", max_batch_size=16, num_cached_prefixes=0)
    engine = Engine(target, drafter=drafter, config=config)
    with one_torch_thread(target.spec.path.startswith("native")):
        results = engine.generate([list(prompt) for prompt in prompts], SamplingParams(max_tokens=max_tokens))
    return Acceptance(
        stats=SpeculationStats.pooled(result.stats for result in results),
        num_prompts=len(prompts),
        num_draft_tokens=num_draft_tokens,
    )


@torch.no_grad()
def forced_agreement(unrolled: UnrolledHead, batch: TrainBatch, num_steps: int) -> list[float]:
    """Share of positions whose most likely draft token is the target's, step by step along the texts as they are.

    A step counts where all before it agreed, so that ``1 + sum`` is the accepted length of a greedy chain that started
    at every position of the texts, had their tokens been the target's own choices.
    """
    hidden_NQD, head_UD = unrolled(batch, num_steps)
    head_UD = head_UD.to(hidden_NQD.dtype)
    num_queries = batch.num_queries
    says_Q = batch.law_ids_QK.gather(1, batch.law_probs_QK.argmax(dim=-1, keepdim=True)).squeeze(1)
    agrees_Q = torch.ones(num_queries, dtype=torch.bool)
    shares: list[float] = []
    for step in range(num_steps):
        best_Q = torch.cat(
            [(piece @ head_UD.T).argmax(dim=-1) for piece in torch.split(hidden_NQD[step, :num_queries], 1024)]
        )
        later_Q = torch.cat((says_Q[step:], says_Q.new_full((step,), -1)))
        agrees_Q &= (best_Q == later_Q) & batch.is_live_NQ[step, :num_queries]
        live = int(batch.is_live_NQ[step].sum())
        shares.append(int(agrees_Q.sum()) / max(live, 1))
    return shares
