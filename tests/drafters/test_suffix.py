"""Suffix decoding: its three rules against the same rules applied to plain lists of substrings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import floor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.suffix_tree import OWN_DOUBT, SHARED_DOUBT
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT, Proposal

from .helpers import wish

text = st.lists(st.integers(0, 2), min_size=1, max_size=12)
rules = st.fixed_dictionaries(
    {
        "max_depth": st.integers(2, 7),
        "factor": st.sampled_from([0.5, 1.0, 2.0]),
        "offset": st.sampled_from([0.0, 1.0, 4.0]),
        "min_prob": st.sampled_from([0.0, 0.1, 0.4]),
    }
)
tree_rules = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(["tree", "chain"]),
        "max_depth": st.integers(2, 7),
        "width": st.integers(1, 3),
        "min_prob": st.sampled_from([0.0, 0.02, 0.2]),
    }
)


class Substrings:
    """All substrings of up to ``depth`` tokens with their counts and last occurrence."""

    def __init__(self, texts: Sequence[Sequence[int]], depth: int) -> None:
        self.depth = depth
        self.count: dict[tuple[int, ...], int] = {}
        self.recent: dict[tuple[int, ...], int] = {}
        clock = 0
        for tokens in texts:
            for end in range(1, len(tokens) + 1):
                clock += 1
                for begin in range(max(0, end - depth), end):
                    gram = tuple(tokens[begin:end])
                    self.count[gram] = self.count.get(gram, 0) + 1
                    self.recent[gram] = clock

    def successors(self, suffix: tuple[int, ...]) -> list[tuple[int, int]]:
        """Tokens and counts, most frequent first, then most recent."""
        found = [(self.count[g], self.recent[g], g[-1]) for g in self.count if g[:-1] == suffix]
        return [(token, count) for count, _, token in sorted(found, reverse=True)]

    def longest_continued(self, context: Sequence[int]) -> tuple[int, ...]:
        for matched in range(min(len(context), self.depth - 1), 0, -1):
            suffix = tuple(context[len(context) - matched :])
            if self.successors(suffix):
                return suffix
        return ()


class BruteForce(Substrings):
    """The score rule of the paper."""

    def __init__(self, texts: Sequence[Sequence[int]], rule: dict[str, float]) -> None:
        super().__init__(texts, int(rule["max_depth"]))
        self.rule = rule

    def follow(self, suffix: tuple[int, ...], limit: int) -> tuple[float, list[int]]:
        probability, score = 1.0, 0.0
        path: list[int] = []
        for _ in range(limit):
            children = self.successors(suffix)
            if not children:
                break
            token, most = children[0]
            probability *= most / self.count[suffix]
            if probability < self.rule["min_prob"]:
                break
            path.append(token)
            score += probability
            suffix = (*suffix, token)[-(self.depth - 1) :]
        return score, path

    def best(self, context: Sequence[int], wanted: int) -> tuple[float, list[int]]:
        best_score, best_path = 0.0, []
        for matched in range(1, min(len(context), self.depth - 1) + 1):
            suffix = tuple(context[len(context) - matched :])
            if suffix not in self.count:
                break
            limit = min(wanted, floor(matched * self.rule["factor"] + self.rule["offset"]))
            score, path = self.follow(suffix, limit)
            if score >= best_score:
                best_score, best_path = score, path
        return best_score, best_path


def expected(
    finished: Sequence[Sequence[int]], tokens: Sequence[int], wanted: int, rule: dict[str, float]
) -> list[int]:
    own_score, own = BruteForce([tokens], rule).best(tokens, wanted)
    shared_score, shared = BruteForce(finished, rule).best(tokens, wanted)
    return shared if shared_score > own_score else own


@given(
    finished=st.lists(text, max_size=3),
    prompt=text,
    commits=st.lists(text, max_size=3),
    wanted=st.integers(0, 6),
    rule=rules,
)
@settings(max_examples=300)
def test_the_papers_rule_equals_brute_force(
    finished: list[list[int]], prompt: list[int], commits: list[list[int]], wanted: int, rule: dict[str, float]
) -> None:
    drafter = SuffixDrafter(**{**rule, "rule": "paper", "max_depth": int(rule["max_depth"])})  # type: ignore[arg-type]
    drafter.preload(finished)
    tokens = list(prompt)
    drafter.start(0, tokens)
    for new in [[], *commits]:
        tokens.extend(new)
        drafter.observe(0, tokens, len(new))
        [proposal] = drafter.propose([wish(tokens, wanted)])
        assert list(proposal.tokens) == expected(finished, tokens, wanted, rule)
        assert proposal.is_chain


def likeliest(sources: Sequence[tuple[Substrings, Sequence[float]]], context: Sequence[int]) -> list[tuple[int, float]]:
    opinions = []
    for substrings, doubts in sources:
        suffix = substrings.longest_continued(context)
        if suffix:
            found = substrings.successors(suffix)
            doubt = len(found) * doubts[len(suffix)]
            opinions.append((doubt / sum(count for _, count in found), doubt, found))
    shares: dict[int, float] = {}
    rest = 1.0
    for _, doubt, found in sorted(opinions, key=lambda opinion: opinion[0]):
        each = rest / (sum(count for _, count in found) + doubt)
        for token, count in found:
            shares[token] = shares.get(token, 0.0) + each * count
        rest = each * doubt
    return sorted(shares.items(), key=lambda item: -item[1])


def best_nodes(
    finished: Sequence[Sequence[int]], tokens: Sequence[int], wanted: int, rule: dict[str, float]
) -> list[tuple[int, ...]]:
    """Paths of the best nodes: everything down to ``wanted`` levels is computed, then sorted."""
    depth = int(rule["max_depth"])
    sources = [(Substrings([tokens], depth), OWN_DOUBT), (Substrings(finished, depth), SHARED_DOUBT)]
    width = 1 if rule["rule"] == "chain" else int(rule["width"])
    nodes: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for _ in range(wanted):
        level = [
            (probability * share, (*path, token))
            for probability, path in level
            for token, share in likeliest(sources, [*tokens, *path])[:width]
            if probability * share >= rule["min_prob"]
        ]
        nodes += level
    return [path for _, path in sorted(nodes, key=lambda node: -node[0])[:wanted]]


@given(
    finished=st.lists(text, max_size=3),
    prompt=text,
    commits=st.lists(text, max_size=2),
    wanted=st.integers(0, 4),
    rule=tree_rules,
)
@settings(max_examples=150, deadline=None)
def test_trees_and_chains_hold_the_likeliest_nodes(
    finished: list[list[int]], prompt: list[int], commits: list[list[int]], wanted: int, rule: dict[str, float]
) -> None:
    drafter = SuffixDrafter(**rule)  # type: ignore[arg-type]
    drafter.preload(finished)
    tokens = list(prompt)
    drafter.start(0, tokens)
    for new in [[], *commits]:
        tokens.extend(new)
        drafter.observe(0, tokens, len(new))
        [proposal] = drafter.propose([wish(tokens, wanted)])
        scores = path_scores(finished, tokens, paths_of(proposal), int(rule["max_depth"]))
        expected = path_scores(finished, tokens, best_nodes(finished, tokens, wanted, rule), int(rule["max_depth"]))
        assert sorted(scores) == pytest.approx(sorted(expected))  # of equally likely nodes any may be left out
        assert len(set(paths_of(proposal))) == len(proposal)
        assert rule["rule"] == "tree" or proposal.is_chain
        for node in range(-1, len(proposal)):
            family = [scores[child] for child in proposal.children(node)]
            assert family == sorted(family, reverse=True)


def path_scores(
    finished: Sequence[Sequence[int]], tokens: Sequence[int], paths: Sequence[tuple[int, ...]], depth: int
) -> list[float]:
    """Estimated probability of each path."""
    sources = [(Substrings([tokens], depth), OWN_DOUBT), (Substrings(finished, depth), SHARED_DOUBT)]
    scores = []
    for path in paths:
        score = 1.0
        for position, token in enumerate(path):
            score *= dict(likeliest(sources, [*tokens, *path[:position]]))[token]
        scores.append(score)
    return scores


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_two_sequences_side_by_side_while_the_shared_index_changes() -> None:
    rule: dict[str, float] = {"max_depth": 6, "factor": 1.0, "offset": 2.0, "min_prob": 0.1}
    drafter = SuffixDrafter(rule="paper", max_depth=6, factor=1.0, offset=2.0)
    draw = random.Random(3)
    finished: list[list[int]] = []
    texts = {name: [draw.randrange(4)] for name in range(2)}
    for name in texts:
        drafter.start(name, texts[name])
    for round_ in range(30):
        for name, tokens in texts.items():
            new = [draw.randrange(4) for _ in range(draw.randrange(1, 9))]
            tokens.extend(new)
            drafter.observe(name, tokens, len(new))
        if round_ % 3 != 1:  # a sequence that was not asked for a while has more to catch up with
            proposals = drafter.propose([wish(tokens, 5, sequence=name) for name, tokens in texts.items()])
            for tokens, proposal in zip(texts.values(), proposals, strict=True):
                assert list(proposal.tokens) == expected(finished, tokens, 5, rule)
        if round_ % 5 == 4:
            other = [draw.randrange(4) for _ in range(12)]
            drafter.start(99, other[:4])
            grown = other[:4]
            grown.extend(other[4:])
            drafter.observe(99, grown, 8)
            drafter.finish(99)
            finished.append(other[4:])


@pytest.mark.parametrize("rule", ["tree", "chain", "paper"])
def test_a_long_repetition_is_followed_past_the_depth_limit(rule: str) -> None:
    drafter = SuffixDrafter(rule=rule, max_depth=4, factor=8.0)
    tokens = [1, 2, 3, 4, 5] * 4
    drafter.start(0, tokens)
    assert drafter.propose([wish(tokens, 12)])[0].tokens == (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)


def test_finished_responses_are_remembered_and_prompts_are_not() -> None:
    drafter = SuffixDrafter()
    tokens = [1, 2, 3, 4]
    drafter.start(0, tokens)
    tokens.extend([5, 6, 7])
    drafter.observe(0, tokens, 3)
    drafter.finish(0)
    drafter.start(1, [5])
    drafter.start(2, [2])
    proposals = drafter.propose([wish([5], 4, sequence=1), wish([2], 4, sequence=2)])
    assert proposals[0].tokens == (6, 7)
    assert proposals[0].drafter == "suffix"
    assert proposals[1] == NO_DRAFT


def test_a_second_guess_where_the_text_is_ambiguous() -> None:
    drafter = SuffixDrafter()
    tokens = [1, 2, 3, 1, 5, 6, 1]
    drafter.start(0, tokens)
    [proposal] = drafter.propose([wish(tokens, 4)])
    assert {path for path in paths_of(proposal) if len(path) == 1} == {(2,), (5,)}
    assert len(proposal) == 4 and not proposal.is_chain


def test_in_the_papers_rule_own_text_wins_a_tie() -> None:
    drafter = SuffixDrafter(rule="paper")
    drafter.preload([[1, 8], [1, 9]])
    tokens = [1, 7, 1]  # own: 1 -> 7 in one of two; shared: 1 -> 9 in one of two
    drafter.start(0, tokens)
    assert drafter.propose([wish(tokens, 1)])[0].tokens == (7,)


def test_oldest_responses_are_forgotten_whole() -> None:
    bounded, fresh = SuffixDrafter(max_nodes=400), SuffixDrafter(max_nodes=0)
    draw = random.Random(1)
    texts = [[draw.randrange(6) for _ in range(40)] for _ in range(50)]
    for tokens in texts:
        bounded.preload([tokens])
        assert bounded.num_shared_nodes <= 400
    kept = bounded._shared[None].index.num_texts
    assert 5 < kept < 20
    fresh.max_nodes = 10**6
    fresh.preload(texts[-kept:])
    for _ in range(50):
        context = [draw.randrange(6) for _ in range(9)]
        for drafter in (bounded, fresh):
            drafter.start(0, context)
        assert bounded.propose([wish(context, 8)]) == fresh.propose([wish(context, 8)])
        for drafter in (bounded, fresh):
            drafter.finish(0)


def test_no_memory_of_finished_requests_if_none_is_allowed() -> None:
    drafter = SuffixDrafter(max_nodes=0)
    drafter.preload([[1, 2, 3]])
    drafter.start(0, [1])
    assert drafter.propose([wish([1], 4)]) == [NO_DRAFT]
    assert drafter.num_shared_nodes == 0


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "trees"},
        {"max_depth": 1},
        {"width": 9},
        {"factor": -1.0},
        {"offset": 200.0},
        {"min_prob": 1.5},
        {"max_nodes": -1},
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ConfigError, match=f"{name}.*allowed"):
        SuffixDrafter(**options)


def test_scopes_learn_nothing_from_each_other() -> None:
    drafter = SuffixDrafter()
    drafter.preload([[9, 8, 7, 6]])

    def drafts(sequence: int, scope: str | None, text: list[int], answer: list[int]) -> tuple[int, ...]:
        drafter.assign(sequence, scope)
        drafter.start(sequence, text)
        [proposal] = drafter.propose([wish(text, 3, sequence=sequence)])
        text += answer
        drafter.observe(sequence, text, len(answer))
        drafter.finish(sequence)
        return proposal.tokens

    drafts(0, "alice", [1], [2, 3, 4, 5])
    assert drafts(1, "bob", [2, 3], [0]) == ()
    assert drafts(2, None, [2, 3], [0]) == ()
    assert drafts(3, "alice", [2, 3], [0])[:2] == (4, 5)
    for sequence, scope in enumerate(("alice", "bob", None), 4):
        assert drafts(sequence, scope, [9, 8], [0])[:2] == (7, 6), "what was preloaded is everybody's"


def test_all_scopes_together_stay_inside_the_limit() -> None:
    drafter = SuffixDrafter(max_nodes=300)
    noise = random.Random(3)
    for sequence in range(40):
        drafter.assign(sequence, f"scope-{sequence % 5}")
        text = noise.choices(range(50), k=10)
        drafter.start(sequence, text)
        text += noise.choices(range(50), k=12)
        drafter.observe(sequence, text, 12)
        drafter.finish(sequence)
        assert drafter.num_shared_nodes <= 300
    assert drafter.num_shared_nodes > 0
