"""Prompt lookup against a scan of the whole text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.ngram import NGramDrafter, copy_forward
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT

from .helpers import wish


def scan(tokens: Sequence[int], wanted: int, min_match: int, max_match: int) -> list[int]:
    """Longest match first, latest occurrence first, by brute force."""
    for length in range(min(max_match, len(tokens)), min_match - 1, -1):
        suffix = list(tokens[len(tokens) - length :])
        for follower in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[follower - length : follower]) == suffix:
                text = list(tokens)
                for offset in range(wanted):
                    text.append(text[follower + offset])
                return text[len(tokens) :]
    return []


small_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(
    prompt=small_tokens,
    commits=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=6),
    wanted=st.integers(0, 9),
    bounds=st.tuples(st.integers(1, 4), st.integers(0, 4)),
)
def test_equals_a_scan_after_every_commit(
    prompt: list[int], commits: list[list[int]], wanted: int, bounds: tuple[int, int]
) -> None:
    min_match, max_match = bounds[0], bounds[0] + bounds[1]
    drafter = NGramDrafter(max_match=max_match, min_match=min_match)
    tokens = list(prompt)
    drafter.start(0, tokens)
    for new in [[], *commits]:
        tokens.extend(new)
        drafter.observe(0, tokens, len(new))
        [proposal] = drafter.propose([wish(tokens, wanted)])
        assert list(proposal.tokens) == scan(tokens, wanted, min_match, max_match)
        assert proposal.is_chain
        assert proposal.draft_probs_NV is None


def test_a_repetition_is_continued_past_the_end_of_the_text() -> None:
    drafter = NGramDrafter()
    tokens = [9, 5, 6, 5, 6]
    drafter.start(0, tokens)
    [proposal] = drafter.propose([wish(tokens, 7)])
    assert proposal.tokens == (5, 6, 5, 6, 5, 6, 5)
    assert proposal.drafter == "ngram"


def test_the_latest_occurrence_wins() -> None:
    drafter = NGramDrafter()
    tokens = [1, 2, 1, 3, 1]
    drafter.start(0, tokens)
    assert drafter.propose([wish(tokens, 1)])[0].tokens == (3,)


def test_the_longest_match_wins() -> None:
    drafter = NGramDrafter(max_match=3)
    tokens = [8, 1, 7, 9, 1, 5, 8, 1]
    drafter.start(0, tokens)
    assert drafter.propose([wish(tokens, 2)])[0].tokens == (7, 9)


def test_sequences_do_not_see_each_other() -> None:
    drafter = NGramDrafter()
    first, second = [1, 2, 3, 1], [1, 4, 1]
    drafter.start(10, first)
    drafter.start(11, second)
    wishes = [wish(second, 2, sequence=11), wish(first, 2, sequence=10)]
    assert [proposal.tokens for proposal in drafter.propose(wishes)] == [(4, 1), (2, 3)]
    drafter.finish(11)
    assert drafter.propose(wishes[1:])[0].tokens == (2, 3)
    drafter.start(11, [3])
    assert drafter.propose([wish([3], 2, sequence=11)]) == [NO_DRAFT]


def test_no_wish_no_draft() -> None:
    drafter = NGramDrafter()
    drafter.start(0, [1, 1, 1])
    assert drafter.propose([wish([1, 1, 1], 0)]) == [NO_DRAFT]


@pytest.mark.parametrize(("max_match", "min_match"), [(3, 0), (1, 2), (65, 1)])
def test_impossible_bounds_are_refused(max_match: int, min_match: int) -> None:
    with pytest.raises(ConfigError, match="1 <= min_match <= max_match"):
        NGramDrafter(max_match=max_match, min_match=min_match)


def test_copy_forward_is_the_token_by_token_copy() -> None:
    for length, count in itertools.product(range(1, 6), range(12)):
        for start in range(length):
            text = list(range(length))
            for offset in range(count):
                text.append(text[start + offset])
            assert copy_forward(range(length), start, count) == text[length:]
