"""A request's own wishes for speculation; the output does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from outrider.errors import ConfigError, nearest

__all__ = ["DEFAULT_SPECULATION", "SpeculationParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How one request may be drafted for. Honoured, or refused by name when the request is submitted.

    Attributes:
        enabled: False decodes this request plainly.
        num_draft_tokens: most draft tokens a step, at most the engine's own; ``None`` for the engine's own.
        drafter: ask this one alone, by its name; ``None`` leaves the choice to the planner.

    Raises:
        ConfigError: a value of the wrong kind, or wishes that contradict each other.
    """

    enabled: bool = True
    num_draft_tokens: int | None = None
    drafter: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"speculation.enabled {self.enabled!r} is not possible; allowed: true, false")
        count = self.num_draft_tokens
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise ConfigError(f"speculation.num_draft_tokens {count!r} is not possible; allowed: an integer from 0")
        if self.drafter is not None and (not isinstance(self.drafter, str) or not self.drafter):
            raise ConfigError(f"speculation.drafter {self.drafter!r} is not possible; allowed: a drafter's name")
        if not self.enabled and (count or self.drafter is not None):
            raise ConfigError("speculation.enabled is false, but drafts are asked for; leave one of the two out")

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SpeculationParams:
        """Build from named values.

        Raises:
            ConfigError: an unknown name, or a value that is not possible.
        """
        known = [each.name for each in fields(SpeculationParams)]
        for name in values:
            if name not in known:
                raise ConfigError(f"speculation.{name} is unknown{nearest(name, known)}; allowed: {', '.join(known)}")
        return SpeculationParams(**values)

    def check(self, names: Sequence[str], most: int) -> None:
        """Make sure that an engine with these drafters and this limit can do it.

        Raises:
            ConfigError: a drafter that is not there, or more draft tokens than the engine gives.
        """
        if self.drafter is not None and self.drafter not in names:
            allowed = ", ".join(names) if names else "none, since the engine has no drafter"
            raise ConfigError(
                f"speculation.drafter {self.drafter!r} is unknown{nearest(self.drafter, names)}; allowed: {allowed}"
            )
        if self.num_draft_tokens is not None and names and self.num_draft_tokens > most:
            raise ConfigError(
                f"speculation.num_draft_tokens {self.num_draft_tokens} is more than this engine drafts; allowed: 0 to {most}"
            )
        if self.num_draft_tokens and not names:
            raise ConfigError(
                f"speculation.num_draft_tokens is {self.num_draft_tokens}, but the engine has no drafter; leave it out"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


DEFAULT_SPECULATION = SpeculationParams()
"""As the engine sees fit."""
