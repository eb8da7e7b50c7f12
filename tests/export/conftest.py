"""A tiny target that is only opened, never loaded, and heads for it on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import HeadInfo, LoadedHead, read_head, save_head
from outrider.models.checkpoint import Checkpoint, MemoryTensors, expected_shapes
from tests.drafters.heads import DRAFT_IDS, TARGET_CONFIG, VOCAB, head_config

MakeHead = Callable[..., LoadedHead]
INFO = HeadInfo(
    target_name="tiny",
    target_fingerprint="f" * 32,
    template_hash="abc",
    data={"rows": 3},
    training={"lr": 0.001},
    hidden_statistics={"mean": [0.5, 1.5]},
    acceptance={"by depth": [0.5, 0.25]},
)


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(size, generator=generator) for name, size in expected_shapes(TARGET_CONFIG).items()}
    return Checkpoint(
        name="tiny",
        config=TARGET_CONFIG,
        fingerprint="f" * 32,
        tokenizer=None,
        source="memory",
        note="",
        tensors=MemoryTensors(tensors),
    )


@pytest.fixture
def make_head(tmp_path: Path) -> MakeHead:
    """``make_head(fc_norm=True)``: a random head with these options, written and read again."""

    def make(
        *,
        dtype: torch.dtype = torch.float32,
        own_embedding: bool = False,
        whole_vocabulary: bool = False,
        **changes: Any,
    ) -> LoadedHead:
        draft_ids = list(range(VOCAB)) if whole_vocabulary else DRAFT_IDS
        config = replace(head_config(**changes), draft_vocab_size=len(draft_ids))
        head = EagleHead(config)
        head.initialise(draft_ids, seed=3)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():  # norms and biases that do something
            for name, parameter in head.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        if own_embedding:
            head.attach_embedding(torch.randn(config.target_vocab_size, config.hidden_size, generator=generator))
        folder = tmp_path / "head"
        save_head(folder, head, INFO, dtype=dtype, with_embedding=own_embedding)
        return read_head(folder)

    return make
