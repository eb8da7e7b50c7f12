"""Masks at any place of a tree equal those of a fresh matcher that read the same tokens."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.engine.constraints import compiler_for
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.grammar import Grammar
from outrider.sampling.masks import allowed_BV, forbid_by_grammar, grammar_masks
from outrider.sampling.matcher import End, GrammarMatcher, Path
from tests.sampling.grammars import allowed, letter_grammar, tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "ok": {"type": "boolean"},
        "list": {"type": "array", "items": {"enum": ["a", "true", 1]}, "maxItems": 3},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": StructuredOutputs(json=SCHEMA),
    "tight": StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    "object": StructuredOutputs(json_object=True, whitespace_pattern="[ ]?"),
    "regex": StructuredOutputs(regex="(true|tr[a-f]*|name(ok)*)-[0-9]{2,3}"),
    "choice": StructuredOutputs(choice=["true", "tree", "name", "ok", "okok"]),
    "grammar": StructuredOutputs(grammar='start: "[" item ("," item)* "]"\nitem: /[a-c]+/ | start'),
}


@pytest.fixture(scope="module", params=CONSTRAINTS)
def grammar(request: pytest.FixtureRequest) -> Grammar:
    model = tiny_model()
    assert model.tokenizer is not None
    return compiler_for(model.spec, model.tokenizer).compile(CONSTRAINTS[request.param])


def fresh(grammar: Grammar, tokens: Path) -> GrammarMatcher:
    matcher = GrammarMatcher(grammar)
    matcher.rebuild(tokens)
    return matcher


def random_walk(matcher: GrammarMatcher, rng: random.Random, steps: int) -> Path:
    path: Path = ()
    while len(path) < steps and matcher.is_open(path):
        path = (*path, rng.choice(sorted(allowed(matcher, path))))
    return path


@pytest.mark.parametrize("seed", range(3))
def test_every_place_of_a_tree_answers_as_if_nothing_else_had_been_read(grammar: Grammar, seed: int) -> None:
    rng = random.Random(seed)
    matcher = GrammarMatcher(grammar)
    places: list[Path] = []
    for _ in range(4):
        walk = random_walk(matcher, rng, 12)
        places += [walk[:length] for length in range(len(walk) + 1)]
    rng.shuffle(places)
    for path in places[:24]:
        alone = fresh(grammar, path)
        assert allowed(matcher, path) == allowed(alone)
        assert matcher.is_open(path) == alone.is_open(())
        assert matcher.forced(path) == alone.forced(())


def test_a_token_is_allowed_exactly_where_its_bit_is_set(grammar: Grammar) -> None:
    """The greedy fast path asks for one token instead of a mask."""
    rng = random.Random(5)
    matcher = GrammarMatcher(grammar)
    for _ in range(3):
        walk = random_walk(matcher, rng, 10)
        for length in range(len(walk) + 1):
            path = walk[:length]
            said = {token for token in range(grammar.compiler.vocab_size) if matcher.allows(path, token)}
            assert said == allowed(matcher, path)


def test_forced_tokens_are_all_that_masks_allow(grammar: Grammar) -> None:
    rng = random.Random(7)
    matcher = GrammarMatcher(grammar)
    num_forced = 0
    for _ in range(4):
        walk = random_walk(matcher, rng, 12)
        for length in range(len(walk)):
            run = matcher.forced_run(walk[:length], 8)
            assert len(run) <= 8
            num_forced += len(run)
            for depth, token in enumerate(run):
                assert allowed(matcher, walk[:length] + run[:depth]) == {token}
    assert num_forced > 0


def test_committing_moves_the_root(grammar: Grammar) -> None:
    rng = random.Random(11)
    matcher = GrammarMatcher(grammar)
    committed: Path = ()
    while matcher.is_open(()) and len(committed) < 20:
        random_walk(matcher, rng, 5)  # drafts that come to nothing
        run = random_walk(matcher, rng, rng.randint(1, 3))
        random_walk(matcher, rng, 2)
        matcher.commit(run)
        committed += run
        alone = fresh(grammar, committed)
        assert allowed(matcher) == allowed(alone) and matcher.forced(()) == alone.forced(())


def test_nothing_follows_the_end() -> None:
    grammar = letter_grammar(StructuredOutputs(choice=["ab", "abc"]), 3)
    matcher = GrammarMatcher(grammar)
    assert matcher.end_of((0, 1)) is None, "abc may still come"
    assert matcher.end_of((0, 1, 2)) == End(3, is_broken=False)
    assert matcher.end_of((0, 1, 3)) == End(3, is_broken=False)
    assert matcher.end_of((0, 1, 2, 3)) == End(3, is_broken=False), "what a pass draws behind the end was never said"
    assert allowed(matcher, (0, 1, 2)) == allowed(matcher, (0, 1, 3)) == {3}
    assert not matcher.is_open((0, 1, 2)) and not matcher.is_open((0, 1, 3))
    matcher.commit((0, 1))
    matcher.commit((3,))
    assert allowed(matcher) == {3} and matcher.forced(()) == () and not matcher.allows((), 2)


def test_behind_a_forbidden_token_nothing_goes_on() -> None:
    matcher = GrammarMatcher(letter_grammar(StructuredOutputs(regex="ab*"), 3))
    assert not matcher.is_open((1,)) and not matcher.is_open((1, 0))
    assert allowed(matcher, (2, 1)) == {3}
    assert allowed(matcher, (0, 1)) == {1, 3}, "and the way back is open"


def test_a_met_limit_ends_the_output_and_harms_no_other_place() -> None:
    """What llguidance does past its limits, which it never recovers from, without waiting for a grammar that gets there."""
    matcher = GrammarMatcher(letter_grammar(StructuredOutputs(regex="a[abc]*"), 3))
    matcher.commit((0,))
    assert matcher.is_open((1,))
    matcher._matcher.consume_token(10_000)  # an error state
    assert not matcher.survived((1,)), "the place is given up"
    assert allowed(matcher, (1,)) == {3}
    assert allowed(matcher, (2,)) == {0, 1, 2, 3}
    assert matcher.end_of((1, 3)) == End(2, is_broken=True)
    assert matcher.end_of((2, 3)) == End(2, is_broken=False)
    matcher.commit((1,))
    assert allowed(matcher) == {3} and matcher.end_of((3,)) == End(1, is_broken=True)


def test_masks_of_many_places_at_once_equal_those_of_each() -> None:
    first = GrammarMatcher(letter_grammar(StructuredOutputs(regex="a[bc]*"), 3))
    compiler = first.grammar.compiler
    second = GrammarMatcher(compiler.compile(StructuredOutputs(choice=["ba", "cab"])))
    places = [
        (first, ()),
        (second, ()),
        (first, (0,)),
        (second, (2, 0)),
        (first, (0, 1, 2)),
        (second, (1, 0)),
        (first, (1,)),
    ]
    together = grammar_masks(places)
    for row, (matcher, path) in enumerate(places):
        assert torch.equal(together[row], grammar_masks([(matcher, path)])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_rows_with_a_grammar_change(dtype: torch.dtype) -> None:
    matcher = GrammarMatcher(letter_grammar(StructuredOutputs(regex="a[bc]*"), 3))
    logits_BV = torch.randn(4, 4, dtype=dtype)
    masked_BV = logits_BV.clone()
    forbid_by_grammar(masked_BV, [None, matcher, None, matcher], [(), (), (1,), (0,)])
    is_kept = torch.tensor([[True] * 4, [True, False, False, False], [True] * 4, [False, True, True, True]])
    assert torch.equal(masked_BV, logits_BV.masked_fill(~is_kept, float("-inf")))


def test_bits_are_read_as_they_are_written() -> None:
    words_BW = torch.tensor([[1 | 1 << 5, -(1 << 31)], [0, 3]], dtype=torch.int32)
    assert [row.nonzero().flatten().tolist() for row in allowed_BV(words_BW, 64)] == [[0, 5, 63], [32, 33]]
    assert allowed_BV(words_BW, 33).shape == (2, 33)


def test_whether_an_output_may_go_on_does_not_depend_on_the_way_there(grammar: Grammar) -> None:
    """Forced runs are read at once, verification comes back step by step."""
    rng = random.Random(13)
    for _ in range(6):
        matcher = GrammarMatcher(grammar)
        walk = random_walk(matcher, rng, 14)
        jumping = GrammarMatcher(grammar)
        for length in range(len(walk) + 1):
            jumping.forced_run(walk[:length], 8)
            jumping.is_open(walk)
            jumping.forced(walk[: length // 2])
            assert jumping.is_open(walk[:length]) == fresh(grammar, walk[:length]).is_open(()), walk[:length]
        jumping.commit(walk)
        assert jumping.is_open(()) == fresh(grammar, walk).is_open(())
