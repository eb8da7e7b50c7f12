"""Grammars of requests, over the target's own tokens. One compiler a tokenizer, made when the first constraint comes."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from outrider.errors import SamplingError
from outrider.models.base import TargetSpec
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.grammar import Grammar, GrammarCompiler, TokenTable
from outrider.sampling.params import SamplingParams

__all__ = ["compile_constraint", "compiler_for", "token_table"]

_COMPILERS: WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], GrammarCompiler]] = WeakKeyDictionary()


def compile_constraint(params: SamplingParams, spec: TargetSpec, tokenizer: Tokenizer | None) -> Grammar | None:
    """The grammar that a request's output must match, ``None`` if it has none.

    Raises:
        SamplingError: a constraint that is not valid, too large, that no text meets, or that this target cannot be held to.
        MissingExtra: llguidance is not installed.
    """
    if params.structured_outputs is None:
        return None
    if tokenizer is None:
        raise SamplingError("structured_outputs is about text, and this target has no tokenizer")
    if not spec.eos_token_ids:
        raise SamplingError(
            "structured_outputs needs an end-of-sequence token, and this target has none; leave structured_outputs out"
        )
    return compiler_for(spec, tokenizer).compile(params.structured_outputs)


def compiler_for(spec: TargetSpec, tokenizer: Tokenizer) -> GrammarCompiler:
    """The target's compiler; takes a fraction of a second the first time.

    Raises:
        MissingExtra: llguidance is not installed.
    """
    compilers = _COMPILERS.setdefault(tokenizer, {})
    key = (spec.vocab_size, spec.eos_token_ids)
    if key not in compilers:
        compilers[key] = GrammarCompiler(token_table(spec, tokenizer))
    return compilers[key]


def token_table(spec: TargetSpec, tokenizer: Tokenizer) -> TokenTable:
    """The bytes of all of the target's columns; columns past the tokenizer's last token are padding."""
    return TokenTable(
        pieces=[tokenizer.piece(token, skip_special_tokens=False) for token in range(spec.vocab_size)],
        special_ids=tokenizer.special_token_ids,
        eos_ids=tuple(token for token in spec.eos_token_ids if token < spec.vocab_size),
        encode=tokenizer.encode,
    )
