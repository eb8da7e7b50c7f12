"""Servers that tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

from outrider.drafters.build import make_drafter
from outrider.models.load import load_target
from tests.models import _files
from tests.serve.support import LiveServer, ScriptedModel, serving


@pytest.fixture(scope="package")
def scripted() -> Iterator[LiveServer]:
    """Known answers, drafted by suffix decoding, which remembers what was answered before."""
    target: Any = ScriptedModel()
    with serving(target, make_drafter("suffix", target)) as server:
        yield server


@pytest.fixture(scope="package")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer."""
    shape = _files.config(max_positions=512)
    path = tmp_path_factory.mktemp("serve") / "tiny.gguf"
    return _files.write_gguf(path, shape, _files.random_tensors(shape), kind=gguf.GGMLQuantizationType.F32)


@pytest.fixture(scope="package")
def tiny_target(tiny_path: Path) -> Any:
    return load_target(tiny_path, dtype="float32", device="cpu", tool_rendering="system")


@pytest.fixture(scope="package")
def off(tiny_target: Any) -> Iterator[LiveServer]:
    """The tiny model without speculation."""
    with serving(tiny_target) as server:
        yield server


@pytest.fixture(scope="package")
def on(tiny_target: Any) -> Iterator[LiveServer]:
    """The same model, drafted by an int8 copy of itself."""
    with serving(tiny_target, make_drafter("self", tiny_target)) as server:
        yield server
