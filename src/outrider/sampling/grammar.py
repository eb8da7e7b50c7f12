"""From a constraint to a grammar over the target's tokens, through llguidance (the extra ``grammar``).

The token table is made of the very bytes that our own detokenizer emits, so what a grammar allows is what the text says.
A constraint that is wrong, too large, or that no text can meet is an error here, before anything is decoded.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.errors import MissingExtra, SamplingError
from outrider.sampling.constraint import StructuredOutputs

__all__ = ["LIMITS", "Grammar", "GrammarCompiler", "TokenTable"]

LIMITS: Mapping[str, int] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
"""What a hostile grammar may cost. Compiling is limited by fuel and by symbols (measured: at most a quarter of a second, most
schemas take 1 to 20 ms), a token's mask by fuel and by parser items (at most some 15 ms, most take 0.02 to 0.2), memory by
lexer states (1 to 2 kB each)."""

_MOST_VALUES = 4_000
"""Values of a JSON schema (numbers, texts, lists, objects), since the time to compile an object grows with the square of its
properties: 2,000 optional ones take most of a second, 13,000 would take half a minute."""

_MOST_REMEMBERED = 16
"""Compiled grammars kept for requests with the same constraint; each may hold as many lexer states as a limit allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """A target's tokens as a grammar sees them.

    Attributes:
        pieces: the bytes that each token adds to the text, one entry for each of V columns; empty for tokens that add
            none (padding). Such tokens are never allowed.
        special_ids: tokens that are not text, whatever their bytes; allowed only where a grammar names them.
        eos_ids: end-of-sequence tokens, at least one; allowed where the grammar may end.
        encode: canonical token ids of a text.
    """

    pieces: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]

    def tokenize(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly those of ``text``: the canonical ones if they are, else the longest ones."""
        wanted = text.encode("utf-8")
        tokens = list(self.encode(text))
        is_text = all(0 <= token < len(self.pieces) and token not in self.special_ids for token in tokens)
        if is_text and b"".join(self.pieces[token] for token in tokens) == wanted:
            return tokens
        return self._longest_tokens(wanted)

    def _longest_tokens(self, wanted: bytes) -> list[int]:
        ids = {
            piece: token
            for token, piece in reversed(list(enumerate(self.pieces)))
            if piece and token not in self.special_ids and token not in self.eos_ids
        }
        longest = max(map(len, ids), default=0)
        tokens: list[int] = []
        start = 0
        while start < len(wanted):
            ends = range(min(len(wanted), start + longest), start, -1)
            end = next((end for end in ends if wanted[start:end] in ids), None)
            if end is None:
                return tokens  # a vocabulary without this byte
            tokens.append(ids[wanted[start:end]])
            start = end
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grammar:
    """A compiled constraint; any number of outputs are matched against it.

    Attributes:
        compiler: what made it.
        prototype: llguidance's matcher before the first token; copied, never advanced.
    """

    compiler: GrammarCompiler
    prototype: Any = field(repr=False)

    def new_matcher(self) -> Any:
        """llguidance's matcher of a new output."""
        return self.prototype.deep_copy()


class GrammarCompiler:
    """Compiles constraints for one target; remembers the last ones.

    Building it takes a fraction of a second, so make one a target.

    Args:
        table: the target's tokens.

    Attributes:
        executor: llguidance's threads, as many as torch has.

    Raises:
        MissingExtra: llguidance is not installed.
    """

    def __init__(self, table: TokenTable) -> None:
        assert table.eos_ids, "a grammar ends with an end-of-sequence token"
        self.table = table
        self._library = _library()
        self._tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Wrapped(table)),
            n_vocab=len(table.pieces),
            eos_token=list(table.eos_ids),
        )
        self.executor = self._library.LLExecutor(torch.get_num_threads())
        self._limits = self._library.LLParserLimits(**LIMITS, verbose_errors=False)
        self._remembered: OrderedDict[tuple[str, str, str], Grammar] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        """V: how many tokens masks speak of."""
        return len(self.table.pieces)

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """The grammar of a constraint.

        Raises:
            SamplingError: it is not valid, too large, or no text meets it.
        """
        whitespace = "none" if constraint.disable_any_whitespace else constraint.whitespace_pattern or ""
        key = (constraint.kind, constraint.text, whitespace)
        if key not in self._remembered:
            self._remembered[key] = self._compile(constraint)
        self._remembered.move_to_end(key)
        while len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return self._remembered[key]

    def forget(self, grammar: Grammar) -> None:
        """A matcher met a limit, and all of a grammar's matchers share what was used up: compile it anew next time."""
        for key in [key for key, known in self._remembered.items() if known is grammar]:
            del self._remembered[key]

    def _compile(self, constraint: StructuredOutputs) -> Grammar:
        try:
            source = self._source(constraint)
        except (ValueError, RecursionError) as error:
            raise _refusal(constraint, str(error)) from None
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(constraint, matcher.get_error())
        self._check_something_matches(constraint, matcher)
        return Grammar(compiler=self, prototype=matcher)

    def _source(self, constraint: StructuredOutputs) -> str:
        matcher, text = self._library.LLMatcher, constraint.text
        if constraint.kind in ("json", "json_object"):
            _check_size(text)
            source: str = matcher.grammar_from_json_schema(text, overrides=_whitespace(constraint))
        elif constraint.kind == "regex":
            source = matcher.grammar_from_regex(text)
        elif constraint.kind == "choice":
            rule = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in constraint.choice)
            # A terminal: one expression for all of them. As alternatives of a rule they would be parsed side by side.
            source = json.dumps({"grammars": [{"lark_grammar": f"start: CHOICE\nCHOICE: {rule}"}]})
        else:
            source = json.dumps({"grammars": [{"lark_grammar": text}]})
        return source

    def _check_something_matches(self, constraint: StructuredOutputs, matcher: Any) -> None:
        first = matcher.deep_copy()
        mask = int.from_bytes(first.compute_bitmask(), "little")
        for token in self.table.eos_ids:
            mask &= ~(1 << token)
        if not mask or first.is_error():
            raise _refusal(constraint, "no text matches it, as far as the limits on its size allow to tell")


def _check_size(schema: str) -> None:
    waiting, count = [json.loads(schema)], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    if count > _MOST_VALUES:
        raise ValueError(f"it holds {count} values; allowed: up to {_MOST_VALUES}")


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """The shape that llguidance's wrapper asks a tokenizer for."""

    table: TokenTable

    @property
    def tokens(self) -> list[bytes]:
        return [b"" if token in self.table.eos_ids else piece for token, piece in enumerate(self.table.pieces)]

    @property
    def special_token_ids(self) -> list[int]:
        return sorted(token for token in self.table.special_ids if token not in self.table.eos_ids)

    @property
    def eos_token_id(self) -> int:
        return self.table.eos_ids[0]

    @property
    def bos_token_id(self) -> None:
        return None

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts only")  # asked once, to learn whether bytes will do
        return self.table.tokenize(text)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtra(
            "structured_outputs needs llguidance, which is not installed; install the extra: pip install outrider[grammar]"
        ) from None
    return llguidance


def _whitespace(constraint: StructuredOutputs) -> dict[str, object] | None:
    if constraint.disable_any_whitespace:
        return {"whitespace_flexible": False}
    if constraint.whitespace_pattern is not None:
        return {"whitespace_flexible": True, "whitespace_pattern": constraint.whitespace_pattern}
    return None


def _refusal(constraint: StructuredOutputs, reason: str) -> SamplingError:
    reason = reason.partition("<backtrace>")[0]
    lines = [line.strip() for line in reason.splitlines() if line.strip() and "<non-verbose" not in line]
    shown = " ".join(lines) or "llguidance gives no reason"
    return SamplingError(f"structured_outputs.{constraint.kind} is not possible: {shown[:400]}")
