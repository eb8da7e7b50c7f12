"""Server settings are checked when they are given."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import ConfigError
from outrider.serve.config import ServeConfig


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prot": 1}, "did you mean 'port'"),
        ({"port": 70000}, "65535"),
        ({"port": -1}, "0 or more"),
        ({"port": True}, "integer"),
        ({"max_waiting": 0}, "1 or more"),
        ({"request_timeout_s": "5"}, "number"),
        ({"request_timeout_s": 0}, "0.1 or more"),
        ({"max_body_bytes": 10}, "1024"),
        ({"tool_format": "hermse"}, "did you mean 'hermes'"),
        ({"allowed_hosts": "x"}, "list of texts"),
        ({"allowed_hosts": [1]}, "list of texts"),
        ({"host": 5}, "text"),
    ],
)
def test_mistakes(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeConfig.from_dict(values)


def test_what_is_loopback() -> None:
    for host, expected in {
        "127.0.0.1": True,
        "localhost": True,
        "::1": True,
        "0.0.0.0": False,
        "10.0.0.1": False,
    }.items():
        assert ServeConfig(host=host).is_loopback is expected
    assert ServeConfig().is_loopback, "loopback unless chosen otherwise"
    assert ServeConfig.from_dict({"request_timeout_s": 5, "allowed_hosts": ["a"]}).allowed_hosts == ("a",)
