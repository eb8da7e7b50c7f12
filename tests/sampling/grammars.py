"""Small vocabularies whose grammars can be worked out by hand, and one that can spell JSON."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from outrider.models.table import TableModel
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.grammar import Grammar, GrammarCompiler, TokenTable
from outrider.sampling.masks import allowed_BV, grammar_masks
from outrider.sampling.matcher import GrammarMatcher, Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letter_table(size: int, *, num_eos: int = 1, longer: Sequence[str] = ()) -> TokenTable:
    """``size`` single letters, some longer tokens, then end-of-sequence tokens."""
    pieces = [*(letter.encode() for letter in LETTERS[:size]), *(text.encode() for text in longer)]
    eos = tuple(range(len(pieces), len(pieces) + num_eos))
    return TokenTable(
        pieces=[*pieces, *(b"" for _ in eos)],
        special_ids=frozenset(eos),
        eos_ids=eos,
        encode=lambda text: [LETTERS.index(letter) for letter in text],
    )


def letter_grammar(constraint: StructuredOutputs, size: int, *, longer: Sequence[str] = ()) -> Grammar:
    return GrammarCompiler(letter_table(size, longer=longer)).compile(constraint)


def allowed(matcher: GrammarMatcher, path: Path = ()) -> set[int]:
    """Tokens that the mask of a place allows."""
    size = matcher.grammar.compiler.vocab_size
    return set(allowed_BV(grammar_masks([(matcher, path)]), size)[0].nonzero().flatten().tolist())


_ALPHABET = '{}[]":,-.0123456789' + LETTERS + "AN_"
_MERGES = (
    ("t", "r"),
    ("u", "e"),
    ("tr", "ue"),
    ("o", "k"),
    ("n", "a"),
    ("m", "e"),
    ("na", "me"),
    ('"', ":"),
    ('"', ","),
)


def tiny_tokenizer() -> Tokenizer:
    """A byte-pair tokenizer of some fifty tokens with one end-of-sequence token, the last."""
    tokens = [*_ALPHABET, *("".join(pair) for pair in _MERGES)]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=(len(tokens),))


def tiny_model(seed: int = 0, *, scale: float = 3.0, max_positions: int = 4096) -> TableModel:
    """A random table over the tokens of :func:`tiny_tokenizer` and three columns of padding."""
    tokenizer = tiny_tokenizer()
    size = tokenizer.vocab_size + 3
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, size, generator=generator) * scale
    model = TableModel(logits, eos_token_ids=tokenizer.eos_token_ids, max_positions=max_positions)
    model.tokenizer = tokenizer
    return model
