"""What an output must look like: the ``structured_outputs`` field of a request.

Exactly one of a JSON schema, any JSON object, a regular expression, a list of choices, or a grammar. Names are vLLM's.
What can be checked without a tokenizer is checked here; the rest when the grammar is compiled
(:mod:`outrider.sampling.grammar`), which is still before anything is decoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outrider.errors import SamplingError, nearest

__all__ = ["MOST_CHARACTERS", "MOST_CHOICES", "StructuredOutputs"]

MOST_CHARACTERS = 1 << 18
"""Longest schema, expression or grammar. What it may grow into is limited when it is compiled."""
MOST_CHOICES = 10_000

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """One constraint.

    Attributes:
        json: a JSON schema, as a mapping or as text.
        json_object: any JSON object.
        regex: a regular expression in Rust's syntax; the whole output must match it.
        choice: the output is one of these texts.
        grammar: a grammar in llguidance's dialect of Lark, whose start rule is ``start``.
        disable_any_whitespace: JSON without blanks between its parts. Leaves the model fewer choices, so more tokens are
            forced.
        whitespace_pattern: a regular expression for what may stand between the parts of a JSON text.

    Raises:
        SamplingError: none or several of the first five, or one that cannot be right.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, False)
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        object.__setattr__(self, "choice", _texts(self.choice))
        given = [name for name in _KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            what = f"{' and '.join(given)} were given" if given else "nothing was given"
            raise SamplingError(f"structured_outputs: {what}; give exactly one of {', '.join(_KINDS)}")
        self._check_text(given[0])
        self._check_whitespace(given[0])

    @property
    def kind(self) -> str:
        """Which of ``json``, ``json_object``, ``regex``, ``choice`` and ``grammar`` it is."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False, ()))

    @property
    def text(self) -> str:
        """The constraint as text: the JSON schema, the expression, the grammar, or the choices as a JSON list."""
        if self.kind == "json":
            return _schema_text(self.json)
        if self.kind == "json_object":
            return '{"type": "object"}'
        if self.kind == "choice":
            return json.dumps(list(self.choice), ensure_ascii=False)
        return str(getattr(self, self.kind))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> StructuredOutputs:
        """Build from named values; an unknown name is an error that names the nearest valid one.

        Raises:
            SamplingError: an unknown name or a value that is not possible.
        """
        known = [field.name for field in fields(StructuredOutputs)]
        for name in values:
            if name not in known:
                raise SamplingError(
                    f"structured_outputs has no field {name!r}{nearest(str(name), known)}; allowed: {', '.join(known)}"
                )
        return StructuredOutputs(**values)

    def _check_text(self, kind: str) -> None:
        value = getattr(self, kind)
        if kind == "json":
            _require(isinstance(value, str | Mapping), kind, value, "a JSON schema, as an object or as text")
        elif kind != "json_object" and kind != "choice":
            _require(isinstance(value, str) and value != "", kind, value, "a text")
        _require_short(self.text, kind)

    def _check_whitespace(self, kind: str) -> None:
        pattern = self.whitespace_pattern
        _require(
            pattern is None or (isinstance(pattern, str) and pattern != ""), "whitespace_pattern", pattern, "a text"
        )
        if (self.disable_any_whitespace or pattern is not None) and kind not in ("json", "json_object"):
            raise SamplingError(
                f"structured_outputs: disable_any_whitespace and whitespace_pattern are about JSON, not {kind}; "
                "leave them out"
            )
        if self.disable_any_whitespace and pattern is not None:
            raise SamplingError(
                "structured_outputs: disable_any_whitespace contradicts whitespace_pattern; give one of them"
            )
        if pattern is not None:
            _require_short(pattern, "whitespace_pattern")


def _texts(choice: object) -> tuple[str, ...]:
    if choice is None:
        return ()
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        raise SamplingError(f"structured_outputs.choice {choice!r} is not possible; allowed: a list of texts")
    if len(choice) > MOST_CHOICES:
        raise SamplingError(f"structured_outputs.choice has {len(choice)} entries; allowed: at most {MOST_CHOICES}")
    for text in choice:
        _require(isinstance(text, str) and text != "", "choice", text, "non-empty texts")
    return tuple(choice)


def _schema_text(schema: str | Mapping[str, Any] | None) -> str:
    """The schema as JSON text; made again from what was parsed, so that one schema has one text."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise SamplingError(f"structured_outputs.json is not a JSON schema: {error}") from None
    if not isinstance(parsed, Mapping):
        raise SamplingError(f"structured_outputs.json {text[:40]} is not possible; allowed: a JSON object")
    return text


def _require_short(text: str, name: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise SamplingError(f"structured_outputs.{name} has {len(text)} characters; allowed: at most {MOST_CHARACTERS}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SamplingError(
            f"structured_outputs.{name} holds half a character (a lone surrogate) at position {error.start}"
        ) from None


def _require(holds: bool, name: str, given: object, allowed: str) -> None:
    if not holds:
        shown = repr(given)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise SamplingError(f"structured_outputs.{name} {shown} is not possible; allowed: {allowed}")
