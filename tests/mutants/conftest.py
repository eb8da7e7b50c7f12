"""What all mutants of one pytest process share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.runner import Judges, copy_package


@pytest.fixture(scope="session")
def judges() -> Iterator[Judges]:
    with Judges() as running:
        yield running


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled copy of the package without a fault."""
    return copy_package(tmp_path_factory.mktemp("pristine"))
