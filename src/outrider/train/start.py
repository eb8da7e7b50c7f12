"""Where a head's weights begin: random, with the target's LM head, one of its layers, or as another head ended."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import LoadedHead, read_head
from outrider.drafters.shipped import head_path
from outrider.errors import ConfigError
from outrider.models.llama_weights import WeightSource

__all__ = ["Start", "initialise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """``random``; ``target-head``: LM head and final norm are the target's; ``target-layer:N``: its layer N too; ``head:H``:
    all weights and the draft vocabulary are those of a trained head, given as ``--draft`` takes it.

    Attributes:
        kind: one of these words. layer: N, or -1. head: the trained head.
    """

    kind: str = "target-head"
    layer: int = -1
    head: LoadedHead | None = None

    @staticmethod
    def parse(text: str, num_layers: int) -> Start:
        """Read the command line's form.

        Raises:
            ConfigError: another word, or a layer that the target has not.
        """
        kind, _, number = text.partition(":")
        if kind in ("random", "target-head") and not number:
            return Start(kind=kind)
        if kind == "target-layer" and number.isdecimal() and int(number) < num_layers:
            return Start(kind=kind, layer=int(number))
        if kind == "head" and number:
            return Start(kind=kind, head=read_head(head_path(number) or number))
        raise ConfigError(
            f"--init {text!r} is not possible; allowed: random, target-head, target-layer:0 to "
            f"target-layer:{num_layers - 1}, head:HEAD"
        )

    @property
    def name(self) -> str:
        """For the recipe."""
        if self.head is not None:
            return f"head:{self.head.folder.name}, trained on {self.head.info.training.get('positions', '?')} positions"
        return f"{self.kind}:{self.layer}" if self.layer >= 0 else self.kind


@torch.no_grad()
def initialise(head: EagleHead, draft_ids: tuple[int, ...], source: WeightSource, start: Start, *, seed: int) -> None:
    """Give the head its first weights, its vocabulary and the target's embedding.

    A layer of the target becomes the head's first layer: what it read from the stream it reads from the feature, what it
    is to read from the embedding beside it begins near zero, and the feature begins as the highest tap.

    Raises:
        ConfigError: the head's layer has another shape than the target's, or the head another one than it begins with.
    """
    head.initialise(draft_ids, seed=seed)
    embedding_VD = source.tensor("model.embed_tokens.weight")
    head.attach_embedding(embedding_VD.to(torch.bfloat16))
    if start.kind == "random":
        return
    if start.head is not None:
        head.load_state_dict(start.head.head.state_dict())
        return
    table_VD = embedding_VD if source.config.tie_word_embeddings else source.tensor("lm_head.weight")
    head.lm_head.weight.copy_(table_VD[list(draft_ids)])
    head.norm.weight.copy_(source.tensor("model.norm.weight"))
    if start.kind == "target-layer":
        _copy_layer(head, source, start.layer)


def _copy_layer(head: EagleHead, source: WeightSource, index: int) -> None:
    def read(name: str) -> Tensor:
        return source.tensor(f"model.layers.{index}.{name}.weight").float()

    layer, width = head.midlayer, head.config.hidden_size
    _check_shape(head, source)
    generator = torch.Generator().manual_seed(index)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, width:] = read(f"self_attn.{name}")
        weight[:, :width] = 0.1 * torch.randn(weight[:, :width].shape, generator=generator) / width**0.5
    layer.self_attn.o_proj.weight.copy_(read("self_attn.o_proj"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(read(f"mlp.{name}"))
    layer.post_attention_layernorm.weight.copy_(read("post_attention_layernorm"))
    assert layer.hidden_norm is not None
    layer.hidden_norm.weight.copy_(read("input_layernorm"))
    highest = head.config.tap_layers.index(max(head.config.tap_layers))
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, highest * width : (highest + 1) * width] += torch.eye(width)


def _check_shape(head: EagleHead, source: WeightSource) -> None:
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_width"):
        own, theirs = getattr(head.config, name), getattr(source.config, name)
        if own != theirs:
            raise ConfigError(
                f"--init target-layer copies a layer, but the head's layer has another shape: {name} is {own}, the "
                f"target's {theirs}; give --init target-head, or leave --head {name} out"
            )
