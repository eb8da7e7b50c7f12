"""Settings of an engine; ``auto`` is resolved into a new object that is saved with every result."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from outrider.errors import ConfigError, nearest

__all__ = ["MAX_DRAFT_TOKENS", "EngineConfig"]

MAX_DRAFT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine speculates and batches.

    Attributes:
        num_draft_tokens: most draft tokens a step and sequence; 0 loads the drafter but never drafts.
        schedule: ``adaptive`` stops drafting for a request while it does not pay and tries again later; ``fixed`` always
            drafts ``num_draft_tokens``.
        verification: ``auto`` (rejection for drawn drafts of requests without a seed, else draw-and-compare) or
            ``compare`` (draw-and-compare for every request).
        max_batch_size: sequences decoded together.
        prefill_chunk: most prompt tokens read in one pass while nothing decodes.
        prefill_while_decoding: the same while other sequences decode: each such pass takes so much longer for them.
        num_cached_prefixes: caches of finished sequences kept for later turns of the same chat; 0 keeps none.
        cache_memory_gb: budget of all keys and values (target, drafter, cached prefixes) in 10^9 bytes; ``auto`` is half
            of the memory that is free when the engine is made, resolved into a number that is saved with the results.
        max_waiting: most requests that may wait to be started; 0 does not bound them.
    """

    num_draft_tokens: int = 8
    schedule: Literal["adaptive", "fixed"] = "adaptive"
    verification: Literal["auto", "compare"] = "auto"
    max_batch_size: int = 64
    prefill_chunk: int = 512
    prefill_while_decoding: int = 128
    num_cached_prefixes: int = 4
    cache_memory_gb: float | Literal["auto"] = "auto"
    max_waiting: int = 0

    def __post_init__(self) -> None:
        _require_int("num_draft_tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        _require_int("max_batch_size", self.max_batch_size, 1, 4096)
        _require_int("prefill_chunk", self.prefill_chunk, 1, 65536)
        _require_int("prefill_while_decoding", self.prefill_while_decoding, 1, 65536)
        _require_int("num_cached_prefixes", self.num_cached_prefixes, 0, 4096)
        _require_int("max_waiting", self.max_waiting, 0, 1_000_000)
        _require_gigabytes("cache_memory_gb", self.cache_memory_gb)
        _require_word("schedule", self.schedule, ("adaptive", "fixed"))
        _require_word("verification", self.verification, ("auto", "compare"))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> EngineConfig:
        """Build from named values; an unknown key is an error that names the nearest valid one."""
        known = [f.name for f in fields(EngineConfig)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"engine setting {name!r} is unknown{nearest(name, known)}; allowed: {', '.join(known)}"
                )
        return EngineConfig(**values)

    @staticmethod
    def from_toml(path: Path, **overrides: Any) -> EngineConfig:
        """Read a TOML file; ``overrides`` (flags given by the user) win over it."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not TOML: {error}") from None
        return EngineConfig.from_dict({**values, **overrides})

    def to_json(self) -> dict[str, Any]:
        """Plain values, for results and logs."""
        return asdict(self)


def _require_int(name: str, given: object, low: int, high: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
        raise ConfigError(f"{name} {given!r} is not possible; allowed: an integer from {low} to {high}")


def _require_gigabytes(name: str, given: object) -> None:
    if given == "auto" or (isinstance(given, int | float) and not isinstance(given, bool) and 0 < given <= 1e6):
        return
    raise ConfigError(f"{name} {given!r} is not possible; allowed: auto, or gigabytes of more than 0")


def _require_word(name: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"{name} {given!r} is unknown; allowed: {', '.join(allowed)}{nearest(str(given), allowed)}")
