"""The page at ``/``: one file, nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib import resources

__all__ = ["PAGE_HEADERS", "page"]

PAGE_HEADERS = {
    # The page may run its own script and talk to this server; nothing else.
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def page() -> str:
    """The page's HTML."""
    return resources.files("outrider.serve").joinpath("page.html").read_text(encoding="utf-8")
