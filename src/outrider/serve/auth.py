"""API keys: read from a file or the environment, compared in constant time, each with a scope of its own."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError

__all__ = ["KEY_VARIABLE", "OPEN_SCOPE", "KeyRing", "read_keys"]

KEY_VARIABLE = "OUTRIDER_API_KEYS"
"""Environment variable with keys, separated by commas."""
OPEN_SCOPE = "open"
"""Scope of everybody on a server without keys."""
SHORTEST_KEY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    digest: bytes
    scope: str


class KeyRing:
    """The keys that open the server. Only their digests are held.

    Args:
        keys: pairs of scope name and key; empty leaves the server open.
    """

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._keys = tuple(_Key(digest=_digest(key), scope=scope) for scope, key in keys)

    @property
    def is_open(self) -> bool:
        """True if no key is asked for."""
        return not self._keys

    def scope_of(self, authorization: str | None) -> str | None:
        """Scope of the key in an ``Authorization`` header, ``None`` if it is none of ours.

        Every stored key is compared, all of each: how long it takes says nothing about them.
        """
        if self.is_open:
            return OPEN_SCOPE
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip() if scheme.lower() == "bearer" else "")
        found: str | None = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key.scope
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path | None) -> KeyRing:
    """Keys of a file (one a line, ``KEY`` or ``NAME KEY``, ``#`` begins a comment) and of the environment variable.

    Raises:
        ConfigError: a file that cannot be read or holds no key, a key that is too short, a name or key given twice.
    """
    pairs: list[tuple[str, str]] = []
    if path is not None:
        pairs += _keys_of_file(path)
        if not pairs:
            raise ConfigError(f"key file {path} holds no key; write one a line, or leave the file out")
    for text in os.environ.get(KEY_VARIABLE, "").split(","):
        if text.strip():
            pairs.append((f"key-{len(pairs) + 1}", text.strip()))
    _check(pairs)
    return KeyRing(pairs)


def _keys_of_file(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {path} cannot be read: {error}") from None
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if len(words) > 2:
            raise ConfigError(f"key file {path}, line {number}: allowed are KEY, or NAME KEY")
        if words:
            pairs.append((words[0] if len(words) == 2 else f"key-{len(pairs) + 1}", words[-1]))
    return pairs


def _check(pairs: list[tuple[str, str]]) -> None:
    for index, (scope, key) in enumerate(pairs):
        if len(key) < SHORTEST_KEY:
            raise ConfigError(f"API key {scope!r} has {len(key)} characters; give at least {SHORTEST_KEY}")
        if any(scope == other or key == same for other, same in pairs[:index]):
            raise ConfigError(
                f"API key {scope!r} is given twice (the same name or the same key); names and keys differ"
            )
