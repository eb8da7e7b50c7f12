"""One target and one head for all tests of the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.models.base import LoadedTarget

from .ward import open_target, train_head, write_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("doctor") / "target")


@pytest.fixture(scope="session")
def target(target_folder: Path) -> LoadedTarget:
    return open_target(target_folder)


@pytest.fixture(scope="session")
def head(target: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that keeps nearly everything on :func:`ward.prompts`."""
    return train_head(target, tmp_path_factory.mktemp("doctor") / "head")
