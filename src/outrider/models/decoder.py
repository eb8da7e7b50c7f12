"""What every Llama target does alike, whoever runs its passes: its spec, its window, its slices."""

from __future__ import annotations

from outrider.device import Placement
from outrider.errors import ConfigError, PromptError
from outrider.models.base import TargetSpec
from outrider.models.config import LlamaConfig
from outrider.models.llama_weights import WeightSource

__all__ = ["check_slice", "check_window", "describe"]


def describe(checkpoint: WeightSource, config: LlamaConfig, placement: Placement, *, path: str) -> TargetSpec:
    """The spec of a target made of the first ``config.num_layers`` layers of a checkpoint."""
    part = "" if config.num_layers == checkpoint.config.num_layers else f"[:{config.num_layers}]"
    return TargetSpec(
        name=checkpoint.name + part,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_width=config.head_width,
        max_positions=config.max_positions,
        eos_token_ids=config.eos_token_ids,
        precision=placement.precision,
        device=placement.device,
        fingerprint=checkpoint.fingerprint + part,
        path=path,
    )


def check_slice(num_layers: int, config: LlamaConfig) -> None:
    """Refuse a slice that the target does not have.

    Raises:
        ConfigError: not between 1 and the target's number of layers.
    """
    if not 1 <= num_layers <= config.num_layers:
        raise ConfigError(f"slice:{num_layers} is not possible; give 1 to {config.num_layers} layers")


def check_window(end: int, config: LlamaConfig) -> None:
    """Refuse a pass whose rows end past the window.

    Raises:
        PromptError: ``end`` tokens are more than the model was made for.
    """
    if end > config.max_positions:
        raise PromptError(
            f"{end} tokens do not fit into the model's window of {config.max_positions}; "
            "give a shorter prompt or fewer new tokens"
        )
