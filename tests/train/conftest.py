"""A tiny target and texts to train on."""

from __future__ import annotations

import pytest
import torch

from outrider.models.llama import LlamaTarget
from outrider.native.library import KERNELS, is_available
from outrider.train.corpus import Text
from tests.drafters.heads import VOCAB, tiny_target
from tests.train.native_sets import use


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set of this processor, and training's native pieces running on it."""
    name: str = request.param
    if not is_available(name):
        pytest.skip(f"this processor cannot run the {name} kernels")
    use(monkeypatch, name)
    return name


@pytest.fixture(scope="session")
def target() -> LlamaTarget:
    return tiny_target()


@pytest.fixture(scope="session")
def texts() -> list[Text]:
    """Twelve random texts of different lengths, each with one or two answers."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for index in range(12):
        length = 12 + 3 * index
        tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        trained = [5 <= place < 9 or place >= 10 for place in range(length)]
        made.append(Text(id=f"text-{index}", line=index + 1, tokens=tuple(tokens), trained=tuple(trained)))
    return made
