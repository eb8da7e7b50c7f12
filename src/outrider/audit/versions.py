"""Which software an audit ran on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from outrider import __version__

__all__ = ["describe_versions"]

_PACKAGES = ("torch", "numpy", "tokenizers")


def describe_versions() -> dict[str, str]:
    """Versions of the packages that matter, of Python, and the kind of processor."""
    found = {"outrider": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
