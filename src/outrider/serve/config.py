"""Settings of the server; each is checked when it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from outrider.errors import ConfigError, nearest

__all__ = ["TOOL_FORMATS", "ServeConfig", "ToolFormat"]

ToolFormat = Literal["auto", "hermes", "qwen", "smollm", "llama"]
TOOL_FORMATS: tuple[str, ...] = get_args(ToolFormat)

_LOWEST: dict[str, float] = {
    "port": 0,
    "max_waiting": 1,
    "max_body_bytes": 1024,
    "max_choices": 1,
    "request_timeout_s": 0.1,
    "drain_timeout_s": 0.1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where the server listens and what it takes.

    Attributes:
        host: address to listen on; loopback unless chosen otherwise.
        port: TCP port; 0 takes a free one.
        model_name: name that requests give as ``model``; the target's own name if empty.
        max_waiting: requests that may wait for their turn; one more is refused with 429.
        request_timeout_s: most seconds that a request may take, waiting included.
        drain_timeout_s: most seconds that running requests get after SIGTERM.
        max_body_bytes: largest request body.
        max_prompt_tokens: longest prompt; 0 leaves it to the model's window.
        max_choices: most outputs of one request (prompts x ``n``).
        tool_format: how the model writes tool calls; ``auto`` goes by its chat template.
        allowed_hosts: further names that the ``Host`` header may carry while the server listens on loopback without
            keys; web pages could reach it through a name of their own otherwise (DNS rebinding).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = ""
    max_waiting: int = 256
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 60.0
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompt_tokens: int = 0
    max_choices: int = 128
    tool_format: ToolFormat = "auto"
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f.default)
        if self.port > 65535:
            raise ConfigError(f"port {self.port} is not possible; allowed: 0 to 65535")
        if self.tool_format not in TOOL_FORMATS:
            hint = nearest(str(self.tool_format), TOOL_FORMATS)
            raise ConfigError(f"tool_format {self.tool_format!r} is unknown; allowed: {', '.join(TOOL_FORMATS)}{hint}")
        object.__setattr__(self, "allowed_hosts", tuple(self.allowed_hosts))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ServeConfig:
        """Build from named values; an unknown key is an error that names the nearest valid one."""
        known = [f.name for f in fields(ServeConfig)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"server setting {name!r} is unknown{nearest(name, known)}; allowed: {', '.join(known)}"
                )
        return ServeConfig(**values)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for logs and the status page."""
        return asdict(self)


def _check(name: str, given: object, default: object) -> None:
    kinds: dict[type, tuple[type | tuple[type, ...], str]] = {
        str: (str, "a text"),
        int: (int, "an integer"),
        float: ((int, float), "a number"),
        tuple: ((list, tuple), "a list of texts"),
    }
    allowed, words = kinds[type(default)]
    lowest = _LOWEST.get(name, 0)
    holds = isinstance(given, allowed) and not isinstance(given, bool)
    if holds and isinstance(given, list | tuple):
        holds = all(isinstance(part, str) for part in given)
    if holds and isinstance(given, int | float):
        holds, words = given >= lowest, f"{words} of {lowest:g} or more"
    if not holds:
        raise ConfigError(f"{name} {given!r} is not possible; allowed: {words}")
