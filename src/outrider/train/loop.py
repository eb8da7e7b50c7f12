"""The training loop: a batch, its loss, an update. Everything random in it is a fixed function of (seed, update)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.eagle_head import EagleHead
from outrider.errors import DataError
from outrider.train.capture import StateSource
from outrider.train.config import TrainConfig
from outrider.train.corpus import Text
from outrider.train.data import Schedule, to_draft_ids
from outrider.train.functions import take_rows
from outrider.train.losses import lean_loss, step_weights
from outrider.train.packing import TrainBatch, pack_batch
from outrider.train.unroll import UnrolledHead

__all__ = ["Trainer", "UpdateReport", "load_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one update did.

    Attributes:
        update: its number, from 1. epoch: from 0. loss: weighted over steps, a position's mean.
        step_losses: mean loss of each unroll step. gradient_norm: before clipping. learning_rate: used.
        num_queries: loss-masked positions; num_keys: positions processed.
        states_s: seconds spent on the target's taps and laws; compute_s: on everything else.
        num_flop: floating-point operations of the head's matrices, forward and backward.
    """

    update: int
    epoch: int
    loss: float
    step_losses: tuple[float, ...]
    gradient_norm: float
    learning_rate: float
    num_queries: int
    num_keys: int
    states_s: float
    compute_s: float
    num_flop: float


def load_batch(
    texts: Sequence[Text],
    source: StateSource,
    draft_index_V: Tensor,
    *,
    num_steps: int,
    dtype: torch.dtype = torch.float32,
) -> TrainBatch:
    """The packed batch of some texts, laws in draft ids; ``dtype`` is that of the laws' probabilities."""
    states = [to_draft_ids(state, draft_index_V, dtype=dtype) for state in source.states(texts)]
    return pack_batch(texts, states, num_steps=num_steps)


class Trainer:
    """Trains a head, one update at a time.

    Args:
        head: float32 parameters, embedding attached.
        schedule: batches of all updates.
        source: what the target says of texts.
        draft_index_V: draft id of each target id.
        config: the recipe.
        dtype: of activations; products are made in it, sums of products and parameters stay float32.
    """

    def __init__(
        self,
        head: EagleHead,
        schedule: Schedule,
        *,
        source: StateSource,
        draft_index_V: Tensor,
        config: TrainConfig,
        dtype: torch.dtype,
    ) -> None:
        self.head, self.schedule, self.config = head.requires_grad_(True), schedule, config
        self.update = 0
        self._source, self._draft_index_V = source, draft_index_V
        self.unrolled = UnrolledHead(head, dtype=dtype)
        self._weights_N = torch.tensor(step_weights(config.unroll, config.step_decay))
        matrices = [p for p in head.parameters() if p.dim() == 2]
        vectors = [p for p in head.parameters() if p.dim() != 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=True,
        )

    @property
    def is_done(self) -> bool:
        """True after the last update."""
        return self.update >= len(self.schedule)

    def step(self) -> UpdateReport:
        """Do the next update.

        Raises:
            DataError: the loss or its gradient is not finite; the text to blame is named, and the head is as before.
        """
        begun = time.perf_counter()
        texts = self.schedule.batch(self.update)
        batch = load_batch(texts, self._source, self._draft_index_V, num_steps=self.config.unroll)
        loaded = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss, rows_NR = self.loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        total = torch.nn.utils.get_total_norm(
            [p.grad for p in self.head.parameters() if p.grad is not None], foreach=True
        )
        mean, norm = float(loss.detach()), float(total)
        if not math.isfinite(mean) or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise self._blame(batch, rows_NR)
        # A gradient within the norm would be multiplied by 1.
        if norm + 2e-6 > 0.999 * self.config.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.head.parameters(), self.config.clip_norm, total, foreach=True)
        rate = self.learning_rate(self.update)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        report = UpdateReport(
            update=self.update + 1,
            epoch=self.schedule.epoch(self.update),
            loss=mean,
            step_losses=_step_means(rows_NR, batch.is_live_NQ),
            gradient_norm=norm,
            learning_rate=rate,
            num_queries=batch.num_queries,
            num_keys=batch.num_keys,
            states_s=loaded - begun,
            compute_s=time.perf_counter() - loaded,
            num_flop=self.unrolled.num_flop(batch.num_keys, batch.num_queries, self.config.unroll),
        )
        self.update += 1
        return report

    def loss_of(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Weighted loss of a batch, a position's mean, and the losses of all rows ``[N, Q]``."""
        hidden_NQD, head_UD = self.unrolled(batch, self.config.unroll)
        steps_R, queries_R = batch.is_live_NQ.nonzero(as_tuple=True)
        laws = batch.law_ids_QK[queries_R + steps_R], batch.law_probs_QK[queries_R + steps_R]
        weights_R = self._weights_N[steps_R] / batch.num_queries
        hidden_RD = take_rows(hidden_NQD.flatten(0, 1), steps_R * hidden_NQD.shape[1] + queries_R)
        total, losses_R = lean_loss(hidden_RD, head_UD, laws, weights_R, name=self.config.loss)
        rows_NQ = torch.zeros(batch.is_live_NQ.shape)
        rows_NQ[batch.is_live_NQ] = losses_R
        return total, rows_NQ

    def learning_rate(self, update: int) -> float:
        """Rate of an update, counted from 0: linear warm-up, then a cosine down to the final share."""
        config, total = self.config, len(self.schedule)
        warmup = max(1, round(config.warmup_share * total))
        if update < warmup:
            return config.learning_rate * (update + 1) / warmup
        progress = (update - warmup) / max(1, total - warmup)
        low = config.final_rate_share
        return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))

    def state(self) -> dict[str, Any]:
        """Everything that a later process needs to go on exactly: weights, optimiser, position."""
        return {"update": self.update, "head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.update = int(state["update"])
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _blame(self, batch: TrainBatch, rows_NR: Tensor) -> DataError:
        for index, id in enumerate(batch.ids):
            first = sum(num_keys for num_keys, _ in batch.plan_texts[:index])
            taps = batch.taps_RD[first : first + batch.plan_texts[index][0]]
            if not bool(taps.isfinite().all()):
                return DataError(f"row {id!r}: the target's hidden states are not finite; leave the row out")
        for index, id in enumerate(batch.ids):
            if not bool(rows_NR[:, batch.text_of_Q == index].isfinite().all()):
                return DataError(f"row {id!r}: its loss is not finite at update {self.update + 1}; {_WAY_OUT}")
        ids = ", ".join(batch.ids[:5])
        return DataError(f"the gradient of update {self.update + 1} (rows {ids}) is not finite; {_WAY_OUT}")


_WAY_OUT = "no checkpoint was overwritten: leave the row out, or give a lower --lr, and go on with --resume"


def _step_means(rows_NR: Tensor, is_live_NR: Tensor) -> tuple[float, ...]:
    sums_N, counts_N = (rows_NR * is_live_NR).sum(dim=1), is_live_NR.sum(dim=1).clamp_min(1)
    return tuple((sums_N / counts_N).tolist())
