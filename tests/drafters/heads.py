"""Small random heads, and the targets they read."""

from __future__ import annotations

from typing import Any

import torch

from outrider.device import Placement
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import HeadInfo
from outrider.models.config import LlamaConfig
from outrider.models.llama import LlamaTarget

CPU = torch.device("cpu")
VOCAB = 40
DRAFT_IDS = [1, 2, 3, 5, 6, 8, 9, 10, 13, 14, 17, 18, 20, 21, 22, 25, 27, 30, 31, 32, 33, 36, 38, 39]
TARGET_CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    norm_eps=1e-5,
    max_positions=700,
    tie_word_embeddings=False,
    eos_token_ids=(0,),
)


def tiny_target(seed: int = 5) -> LlamaTarget:
    """A random target in float32."""
    return LlamaTarget.random(TARGET_CONFIG, Placement(device=CPU, precision="float32"), seed)


def head_config(**changes: Any) -> EagleConfig:
    """A head of another shape than the target's layers, so that no width can be taken for another."""
    values = {"num_heads": 6, "num_kv_heads": 3, "head_width": 4, "intermediate_size": 40, "tap_layers": (1, 2, 4)}
    return EagleConfig.for_target(TARGET_CONFIG, draft_vocab_size=len(DRAFT_IDS), **{**values, **changes})


def tiny_head(target: LlamaTarget | None = None, *, seed: int = 3, **changes: Any) -> EagleHead:
    """A random head with the target's embedding."""
    head = EagleHead(head_config(**changes))
    head.initialise(DRAFT_IDS, seed=seed)
    with torch.no_grad():  # norms that do something
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in head.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    head.attach_embedding((target or tiny_target()).checkpoint.tensor("model.embed_tokens.weight"))
    return head.requires_grad_(False)


def tiny_info(target: LlamaTarget) -> HeadInfo:
    """What is known of it."""
    return HeadInfo.for_target(target, data={"rows": 3}, acceptance={"tau": 1.25, "by depth": [0.5, 0.25]})
