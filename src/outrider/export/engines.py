"""What an engine expects of an EAGLE-3 head in the authors' layout, and what it does with each key.

Every engine that reads this layout builds the same layers; they differ in how taps are numbered, which options they know,
and what they do when something is missing: mostly nothing at all. So every key is written out, options that an engine
would pass over are refused, and :mod:`outrider.export.check` goes over the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.drafters.eagle_config import EagleConfig

__all__ = ["ENGINE_KEYS", "OWN_KEY", "Engine", "Refusals", "shared_refusals"]

OWN_KEY = "outrider"
"""The key of the exported config under which everything stands that is for Outrider and for people."""

ENGINE_KEYS = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "bias",
    "tie_word_embeddings",
    "torch_dtype",
    "num_aux_hidden_states",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config.use_aux_hidden_state",
    "eagle_config.eagle_aux_hidden_state_layer_ids",
    "eagle_config.norm_before_fc",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
"""Keys of an exported config besides ``OWN_KEY``; a dot leads into an object. All of them are always written."""

Refusals = Callable[[EagleConfig, int, bool], Iterator[str]]
"""Reasons why an engine cannot run a head: its shape, the target's number of layers, whether it brings an embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine, in one version.

    Attributes:
        name: as ``--to`` takes it. version: whose source the tables follow.
        was_run: heads written for this version were decoded with in the engine itself, and compared.
        tap_shift: added to our index of a tap (the residual stream *before* that layer) for the engine's index.
        ignored: keys that it does not read, or reads without effect, and why; all other ``ENGINE_KEYS`` it uses.
        effects: what it does with a key where the name does not tell.
        refusals: see :data:`Refusals`.
        drops_full_vocabulary: it has no place for ``d2t`` where the draft vocabulary is the whole one.
    """

    name: str
    version: str
    was_run: bool
    tap_shift: int
    ignored: Mapping[str, str]
    effects: Mapping[str, str]
    refusals: Refusals
    drops_full_vocabulary: bool

    @property
    def label(self) -> str:
        """Name and version, and whether it was tried."""
        return f"{self.name} {self.version}" + ("" if self.was_run else " (from its source; not tried in the engine)")

    def tap_ids(self, config: EagleConfig) -> list[int]:
        """The taps as this engine numbers them."""
        return [tap + self.tap_shift for tap in config.tap_layers]

    def use_of(self, key: str, value: Any) -> tuple[bool, str]:
        """Whether the engine uses a key, and how."""
        if key in self.ignored:
            return False, self.ignored[key]
        if key.partition(".")[0] == OWN_KEY:
            return False, "for Outrider and for people"
        if key not in ENGINE_KEYS:
            return False, "not a key of this layout"
        return True, self.effects.get(key, "")


def shared_refusals(config: EagleConfig, num_target_layers: int) -> Iterator[str]:
    """What no engine of this layout can do: taps are concatenated in the order of the layers, whatever the list says."""
    taps = list(config.tap_layers)
    if taps != sorted(taps):
        yield f"tap_layers is {taps}; allowed: ascending, since the engine concatenates taps in the order of the layers"
    beyond = [tap for tap in taps if tap > num_target_layers]
    if beyond:
        yield f"tap_layers holds {beyond[0]}, but the target has {num_target_layers} layers"
