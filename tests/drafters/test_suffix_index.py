"""The automaton against plain counting of substrings."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.suffix_index import RANK_UNIT, START, WIDEST, SuffixIndex

text = st.lists(st.integers(0, 2), max_size=14)


def substring_counts(texts: Sequence[Sequence[int]], depth: int) -> Counter[tuple[int, ...]]:
    """Occurrences of every substring of up to ``depth`` tokens."""
    return Counter(
        tuple(tokens[begin:end])
        for tokens in texts
        for end in range(1, len(tokens) + 1)
        for begin in range(max(0, end - depth), end)
    )


def indexed_counts(index: SuffixIndex) -> Counter[tuple[int, ...]]:
    """The same, read by walking every path of the index."""
    counts: Counter[tuple[int, ...]] = Counter()
    paths: list[tuple[int, tuple[int, ...]]] = [(START, ())]
    while paths:
        node, path = paths.pop()
        for token, child in index.next[node].items():
            if len(path) < index.depth:
                counts[(*path, token)] = index.rank[child] // RANK_UNIT
                assert index.token[child] == token
                paths.append((child, (*path, token)))
    return counts


@given(texts=st.lists(text, min_size=1, max_size=5), depth=st.integers(2, 6))
def test_counts_of_texts_that_come_and_go(texts: list[list[int]], depth: int) -> None:
    index = SuffixIndex(depth)
    for tokens in texts:
        index.append(tokens)
        index.end_text(tokens)
    for gone in range(len(texts)):
        assert indexed_counts(index) == substring_counts(texts[gone:], depth)
        index.remove_oldest()
    assert index.num_nodes == 1
    assert index.next[START] == {}


@given(
    plan=st.lists(st.one_of(text, st.none()), max_size=12),
    depth=st.integers(2, 6),
)
@settings(max_examples=200)
def test_additions_and_removals_in_any_order(plan: list[list[int] | None], depth: int) -> None:
    index = SuffixIndex(depth)
    held: list[list[int]] = []
    for tokens in plan:
        if tokens is not None:
            index.append(tokens)
            index.end_text(tokens)
            held.append(tokens)
        elif held:
            index.remove_oldest()
            del held[0]
        assert indexed_counts(index) == substring_counts(held, depth)
    assert index.num_texts == len(held)


@given(tokens=text, depth=st.integers(2, 6), cut=st.integers(0, 14))
def test_a_growing_text_knows_its_own_end(tokens: list[int], depth: int, cut: int) -> None:
    index = SuffixIndex(depth)
    index.append(tokens[:cut])
    index.append(tokens[cut:])
    assert indexed_counts(index) == substring_counts([tokens], depth)
    node, matched = index.end
    assert matched == min(len(tokens), depth - 1)
    assert index.length[index.link[node]] < matched <= index.length[node] or node == START
    walked = START
    for token in tokens[len(tokens) - matched :]:
        walked = index.next[walked][token]
    assert walked == node


@given(held=text, asked=text, depth=st.integers(2, 6))
def test_advance_keeps_the_longest_known_suffix(held: list[int], asked: list[int], depth: int) -> None:
    index = SuffixIndex(depth)
    index.append(held)
    known = substring_counts([held], depth)
    node, matched = START, 0
    for end, token in enumerate(asked, start=1):
        node, matched = index.advance(node, matched, token)
        longest = max(
            (size for size in range(1, min(end, depth - 1) + 1) if tuple(asked[end - size : end]) in known), default=0
        )
        assert matched == longest
        if matched:
            assert index.rank[node] // RANK_UNIT == known[tuple(asked[end - matched : end])]


def test_successors_are_ranked_and_follow_every_change() -> None:
    draw = random.Random(4)
    index = SuffixIndex(4)
    held: list[list[int]] = []
    for step in range(12):
        tokens = [draw.choice([0, draw.randrange(40)]) for _ in range(80)]
        index.append(tokens)
        index.end_text(tokens)
        held.append(tokens)
        if step % 3 == 2:
            index.remove_oldest()
            del held[0]
        followers = [after for text in held for before, after in pairwise(text) if before == 0]
        last_seen = {token: place for place, token in enumerate(followers)}
        expected = sorted(Counter(followers).items(), key=lambda item: (-item[1], -last_seen[item[0]]))
        total, best = index.successors(index.next[START][0])
        assert total == len(followers)
        assert best == expected[:WIDEST] and len(expected) > WIDEST


@pytest.mark.parametrize("alphabet", [1, 2, 50])
def test_memory_is_two_nodes_a_token_at_most(alphabet: int) -> None:
    draw = random.Random(alphabet)
    tokens = [draw.randrange(alphabet) for _ in range(3000)]
    index = SuffixIndex(24)
    index.append(tokens)
    assert index.num_nodes <= 2 * len(tokens)


def test_memory_of_removed_texts_is_used_again() -> None:
    draw = random.Random(0)
    index = SuffixIndex(24)
    for number in range(60):
        tokens = [draw.randrange(5) for _ in range(50)]
        index.append(tokens)
        index.end_text(tokens)
        if number >= 10:
            index.remove_oldest()
    assert len(index.next) <= 2 * 50 * 12
