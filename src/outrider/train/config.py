"""The recipe of a training run; saved beside the head."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from outrider.errors import ConfigError, nearest
from outrider.train.losses import LOSSES, LossName

__all__ = ["TrainConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a head is trained.

    Attributes:
        num_epochs: passes over the texts. max_positions: loss-masked positions to stop at, if earlier.
        batch_positions: loss-masked positions an update.
        learning_rate: highest rate of AdamW; warmed up over ``warmup_share`` of all updates, then a cosine down to
            ``final_rate_share`` of it. weight_decay: on matrices. clip_norm: most norm of a gradient.
        unroll: steps of training-time test; step_decay: weight of each step relative to the one before.
        loss: see :mod:`outrider.train.losses`. num_law_tokens: likeliest tokens kept of the target's law.
        seed: of start weights and orders.
        evaluate_every: updates between evaluations; 0 takes ten over the run. save_every_s: seconds between checkpoints.
    """

    num_epochs: int = 3
    max_positions: int | None = None
    batch_positions: int = 1024
    learning_rate: float = 1e-3
    warmup_share: float = 0.03
    final_rate_share: float = 0.02
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    unroll: int = 4
    step_decay: float = 0.8
    loss: LossName = "ce"
    num_law_tokens: int = 128
    seed: int = 0
    evaluate_every: int = 0
    save_every_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("num_epochs", "batch_positions", "unroll", "num_law_tokens"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        self._require("unroll", self.unroll <= 16, "1 to 16")
        self._require("max_positions", self.max_positions is None or self.max_positions >= 1, "1 or more")
        for name in ("learning_rate", "clip_norm", "step_decay"):
            self._require(name, getattr(self, name) > 0, "a number above 0")
        for name in ("warmup_share", "final_rate_share"):
            self._require(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        self._require("weight_decay", self.weight_decay >= 0, "0 or more")
        self._require("evaluate_every", self.evaluate_every >= 0, "0 or more")
        if self.loss not in LOSSES:
            raise ConfigError(
                f"loss {self.loss!r} is unknown; allowed: {', '.join(LOSSES)}{nearest(str(self.loss), LOSSES)}"
            )

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"{name} {getattr(self, name)!r} is not possible; allowed: {allowed}")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
