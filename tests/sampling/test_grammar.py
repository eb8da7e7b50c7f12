from __future__ import annotations

import sys

import pytest

from outrider.errors import MissingExtra, SamplingError
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.grammar import GrammarCompiler, TokenTable
from outrider.sampling.matcher import GrammarMatcher
from tests.sampling.grammars import LETTERS, allowed, letter_table


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(letter_table(3, num_eos=2))


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutputs(regex="[z"),
        StructuredOutputs(regex="(?=a)b"),
        StructuredOutputs(grammar="start: " + "(" * 3000 + '"a"' + ")" * 3000),
        StructuredOutputs(grammar="start: nothing_of_that_name"),
        StructuredOutputs(grammar='start: "a" ('),
        StructuredOutputs(json={"type": "strin"}),
        StructuredOutputs(json={"type": "string", "pattern": "[z"}),
        StructuredOutputs(json={"type": "string", "minLength": 5, "maxLength": 2}),
        StructuredOutputs(json={"$ref": "http://elsewhere.invalid/schema"}),
        StructuredOutputs(json={"type": "object", "properties": {"a": False}, "required": ["a"]}),
    ],
    ids=lambda constraint: constraint.text[:40],
)
def test_what_is_not_valid_is_refused_by_name_in_one_line(
    compiler: GrammarCompiler, constraint: StructuredOutputs
) -> None:
    with pytest.raises(SamplingError) as caught:
        compiler.compile(constraint)
    assert str(caught.value).startswith(f"structured_outputs.{constraint.kind} is not possible: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("regex", ["z", "[^\\s\\S]"])
def test_what_no_text_of_this_vocabulary_meets_is_refused(compiler: GrammarCompiler, regex: str) -> None:
    with pytest.raises(SamplingError, match=r"structured_outputs\.regex is not possible"):
        compiler.compile(StructuredOutputs(regex=regex))


def test_a_schema_of_too_many_values_is_refused(compiler: GrammarCompiler) -> None:
    properties = {f"k{index}": {"type": "integer"} for index in range(2_000)}
    with pytest.raises(SamplingError, match=r"json is not possible: it holds 4003 values; allowed: up to 4000"):
        compiler.compile(StructuredOutputs(json={"type": "object", "properties": properties}))


def test_a_constraint_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(StructuredOutputs(regex="ab*"))
    assert compiler.compile(StructuredOutputs(regex="ab*")) is first
    assert compiler.compile(StructuredOutputs(choice=["ab"])) is not first
    for length in range(20):  # the oldest are forgotten
        compiler.compile(StructuredOutputs(regex=f"a{{{length + 1}}}"))
    assert compiler.compile(StructuredOutputs(regex="ab*")) is not first


def test_every_end_of_sequence_token_ends_it_and_padding_never_comes() -> None:
    table = letter_table(3, num_eos=2)
    padded = TokenTable(
        pieces=[*table.pieces, b"", b"", b""],
        special_ids=table.special_ids,
        eos_ids=table.eos_ids,
        encode=table.encode,
    )
    matcher = GrammarMatcher(GrammarCompiler(padded).compile(StructuredOutputs(regex="a[abc]*")))
    assert allowed(matcher) == {0}
    assert allowed(matcher, (0,)) == {0, 1, 2, 3, 4}


def test_special_tokens_are_not_text() -> None:
    table = TokenTable(
        pieces=[b"a", b"b", b"a", b""], special_ids=frozenset({2, 3}), eos_ids=(3,), encode=lambda text: [0] * len(text)
    )
    matcher = GrammarMatcher(GrammarCompiler(table).compile(StructuredOutputs(regex="a[ab]")))
    assert allowed(matcher) == {0}
    assert allowed(matcher, (0,)) == {0, 1}


def test_tokens_of_a_text_spell_it_even_where_the_tokenizer_does_not() -> None:
    pieces = [b"a", b"b", b"ab", b" a", b"<s>", b""]
    strange = TokenTable(
        pieces=pieces,
        special_ids=frozenset({4, 5}),
        eos_ids=(5,),
        encode=lambda text: [3] if text == "a" else [4] if text == "<s>" else [2],
    )
    assert strange.tokenize("ab") == [2]
    assert strange.tokenize("a") == [0], "the tokenizer put a blank before it"
    assert strange.tokenize("aba") == [2, 0]
    assert strange.tokenize("<s>") == [], "the special token is not its own spelling"


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"outrider\[grammar\]"):
        GrammarCompiler(letter_table(len(LETTERS)))
