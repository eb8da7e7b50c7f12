"""Keys from file and environment."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.serve import auth
from outrider.serve.auth import KEY_VARIABLE, OPEN_SCOPE, KeyRing, read_keys


def test_names_and_bare_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nann key-of-ann\n\nbare-key-1  # of nobody\n")
    monkeypatch.setenv(KEY_VARIABLE, "from-the-env, another-one")
    keys = read_keys(path)
    scopes = {
        key: keys.scope_of(f"Bearer {key}") for key in ("key-of-ann", "bare-key-1", "from-the-env", "another-one")
    }
    assert scopes == {"key-of-ann": "ann", "bare-key-1": "key-2", "from-the-env": "key-3", "another-one": "key-4"}
    for wrong in (None, "", "Bearer", "Bearer key-of-an", "Basic key-of-ann", "key-of-ann", "Bearer key-of-ann2"):
        assert keys.scope_of(wrong) is None
    assert keys.scope_of("bearer key-of-ann") == "ann"


def test_without_keys_everybody_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_keys(None).is_open and read_keys(None).scope_of(None) == OPEN_SCOPE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("short", "5 characters"),
        ("a b c", "line 1"),
        ("ann long-enough\nann also-long-enough", "twice"),
        ("long-enough\nbob long-enough", "twice"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_keys(path)
    assert "long-enough" not in str(caught.value), "no key in an error"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "missing")


def test_every_key_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    keys = KeyRing([("a", "first-key-of-all"), ("b", "second-key-of-all")])
    compared.clear()
    assert keys.scope_of("Bearer first-key-of-all") == "a"
    assert len(compared) == 2 and all(len(left) == len(right) == 32 for left, right in compared)
