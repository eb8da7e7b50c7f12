"""A live server of known answers for tests of load scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.drafters.build import make_drafter
from tests.serve.support import LiveServer, ScriptedModel, serving


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    target: Any = ScriptedModel()
    with serving(target, make_drafter("suffix", target)) as live:
        yield live
