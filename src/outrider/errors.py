"""The error tree.

Every user mistake is an :class:`OutriderError`; its text says what was given, what is allowed and what to do.
The command line prints that text as one line and exits with status 2. Broken invariants of our own are
``AssertionError``s and are never caught.

::

    OutriderError
    |- ConfigError          an unknown or contradictory setting
    |  `- SamplingError     a sampling field out of range, or fields that contradict each other
    |- ModelError           a model that cannot be found, read or run
    |  |- ModelNotFound     no such alias, folder, file or hub id
    |  |- WeightsError      truncated, missing, extra, misshapen or hostile weight files
    |  |- UnsupportedModel  an architecture or quantisation this runtime does not run
    |  `- VocabularyMismatch  a drafter whose tokens are not the target's
    |- PromptError          an empty prompt, one longer than the window, a chat the template refuses
    |- DataError            a broken line or file of prompts
    |- MissingExtra         an optional dependency that is not installed
    |- CapacityError        a request that could never fit into the cache's memory
    |- QueueFullError       as many requests wait as may wait
    |- DrainingError        the engine finishes what it has accepted and takes nothing new
    `- Cancelled            the request was cancelled by its owner
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "Cancelled",
    "CapacityError",
    "ConfigError",
    "DataError",
    "DrainingError",
    "MissingExtra",
    "ModelError",
    "ModelNotFound",
    "OutriderError",
    "PromptError",
    "QueueFullError",
    "SamplingError",
    "UnsupportedModel",
    "VocabularyMismatch",
    "WeightsError",
    "nearest",
]


class OutriderError(Exception):
    """Root of all errors a user can cause and mend."""


class ConfigError(OutriderError, ValueError):
    """An unknown or contradictory setting."""


class SamplingError(ConfigError):
    """A sampling field out of range, or fields that contradict each other."""


class ModelError(OutriderError):
    """A model that cannot be found, read or run."""


class ModelNotFound(ModelError):
    """No such alias, folder, file or hub id."""


class WeightsError(ModelError):
    """Truncated, missing, extra, misshapen or hostile weight files."""


class UnsupportedModel(ModelError):
    """An architecture or quantisation that this runtime does not run."""


class VocabularyMismatch(ModelError):
    """A drafter whose tokens are not the target's tokens."""


class PromptError(OutriderError, ValueError):
    """An empty prompt, one longer than the window, or a chat that the template refuses."""


class DataError(OutriderError, ValueError):
    """A broken line or file of prompts."""


class MissingExtra(OutriderError, ImportError):
    """An optional dependency that is not installed; the text names the extra."""


class CapacityError(OutriderError, ValueError):
    """A request whose keys and values could never fit into the cache's memory, even alone."""


class QueueFullError(OutriderError):
    """As many requests wait as may wait; nothing was queued.

    Attributes:
        retry_after_s: when a place should be free, judged by how fast requests end now.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(OutriderError):
    """The engine finishes what it has accepted and takes nothing new."""


class Cancelled(OutriderError):
    """The request was cancelled by its owner."""


_LONGEST_NAME = 80


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint naming the closest allowed name, or the empty string.

    >>> nearest("temprature", ["temperature", "top_p"])
    "; did you mean 'temperature'?"
    """
    if len(name) > _LONGEST_NAME:  # no slip of the finger, and comparing it would take long
        return ""
    found = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
