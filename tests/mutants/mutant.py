"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault.

    Attributes:
        name: what the faulty code does.
        file: under ``src/outrider``.
        old, new: text that occurs exactly once in the file, and what replaces it.
        tests: test files or node ids, at least one of which must fail.
        why: what is wrong with it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
