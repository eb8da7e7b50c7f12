"""Every instruction set that this processor has; the others are skipped by name."""

from __future__ import annotations

import pytest

from outrider.native.library import KERNELS, is_available


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not is_available(name):
        pytest.skip(f"this processor cannot run the {name} kernels")
    return name
