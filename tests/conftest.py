"""Fixtures shared by all tests. The real model comes through the same code that a user's command uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


@pytest.fixture(autouse=True)
def _fixed_entropy() -> None:
    """What a test draws from torch's own generator is the same in every run and order."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def real_target_f32() -> Any:
    """SmolLM2-135M-Instruct in float32."""
    from outrider.models.load import load_target

    return load_target("smollm2-135m-instruct", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def real_target_bf16() -> Any:
    """SmolLM2-135M-Instruct in bfloat16, PyTorch passes."""
    from outrider.models.load import load_target

    return load_target("smollm2-135m-instruct", dtype="bfloat16", device="cpu", backend="pytorch")
