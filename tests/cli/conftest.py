"""A tiny model file and a way to run the command line inside this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest

from outrider.cli.main import main
from tests.models import _files


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Standard output as JSON Lines."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, a byte-level tokenizer, a window of 256 tokens and a chat template that ignores tools."""
    return _write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", max_positions=256)


@pytest.fixture(scope="session")
def wide_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for the bundled prompts, byte by byte."""
    return _write_tiny(tmp_path_factory.mktemp("wide") / "wide.gguf", max_positions=4096)


def _write_tiny(path: Path, *, max_positions: int) -> Path:
    shape = _files.config(max_positions=max_positions)
    return _files.write_gguf(path, shape, _files.random_tensors(shape), kind=gguf.GGMLQuantizationType.F32)


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """``run("generate", "Hello", stdin="...")``."""

    def call(*argv: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        capfdbinary.readouterr()
        status = main([str(argument) for argument in argv])
        out, err = capfdbinary.readouterr()
        return Ran(status, out.decode(), err.decode())

    return call
