"""The architecture that the Llama runtime runs, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["LlamaConfig", "RopeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, rotate-half form.

    ``linear`` divides positions by ``factor``; ``llama3`` scales low frequencies by ``factor`` and blends between
    ``low_freq_factor`` and ``high_freq_factor`` of ``original_max_positions`` (Llama 3.1).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama decoder: pre-norm, SwiGLU, grouped-query attention, no biases.

    ``head_width`` may differ from ``hidden_size / num_heads``.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rope: RopeConfig = field(default_factory=RopeConfig)
