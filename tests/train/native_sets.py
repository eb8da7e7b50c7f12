"""Runs training's pieces on a given instruction set, or without native kernels."""

from __future__ import annotations

import pytest

from outrider.native import training, training_rows
from outrider.native.library import Context, open_context
from outrider.train import attention, losses

__all__ = ["use"]


def use(patch: pytest.MonkeyPatch, kernels: str | None, num_threads: int = 1) -> None:
    """From now on: those kernels with so many threads, or plain products."""

    def chosen() -> Context | None:
        return None if kernels is None else open_context(kernels, num_threads)

    for module in (training, training_rows, attention, losses):
        patch.setattr(module, "training_kernels", chosen)
