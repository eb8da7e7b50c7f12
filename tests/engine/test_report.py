"""What counts of a verdict: the glossary's rules, case by case."""

from __future__ import annotations

from outrider.engine.report import PassCost, report_of
from outrider.metrics import SpeculationStats
from outrider.types import NO_DRAFT, Proposal, StepReport, Verdict

COST = PassCost(draft_ms=1.0, verify_ms=2.0, other_ms=3.0, batch_size=1, rows=5)


def report(tokens: tuple[int, ...], path: tuple[int, ...], committed: tuple[int, ...]) -> StepReport:
    proposal = Proposal.chain(tokens, drafter="test")
    return report_of(proposal, Verdict(path=path, next_token=99), committed, COST)


def test_partly_kept_chain() -> None:
    got = report((1, 2, 3, 4), (0, 1), (1, 2, 99))
    assert (got.drafted, got.accepted) == (4, 2)
    assert got.reached == (1, 1, 1, 0)
    assert got.kept == (1, 1, 0, 0)
    assert got.refused == (3,)


def test_first_draft_refused() -> None:
    got = report((1, 2), (), (99,))
    assert (got.drafted, got.accepted, got.reached, got.kept) == (2, 0, (1, 0), (0, 0))


def test_all_kept_commits_a_bonus() -> None:
    got = report((1, 2), (0, 1), (1, 2, 99))
    assert (got.drafted, got.accepted, got.reached, got.kept, got.refused) == (2, 2, (1, 1), (1, 1), ())


def test_tokens_behind_a_stop_never_existed() -> None:
    got = report((1, 2, 3, 4), (0, 1, 2), (1, 2))
    assert (got.drafted, got.accepted, got.reached, got.kept) == (2, 2, (1, 1), (1, 1))
    assert got.refused == ()


def test_cut_bonus_is_not_committed_but_the_pass_is_a_step() -> None:
    got = report((1, 2), (0, 1), (1, 2))
    stats = SpeculationStats()
    stats.add(got)
    assert (stats.steps, stats.passes, stats.committed, stats.accepted) == (1, 1, 2, 2)


def test_tree_counts_nodes_and_depths() -> None:
    #        root -> 0, 1 ; 0 -> 2 ; 1 -> 3
    proposal = Proposal(tokens=(5, 6, 7, 8), parents=(-1, -1, 0, 1), drafter="tree")
    got = report_of(proposal, Verdict(path=(1,), next_token=9), (6, 9), COST)
    assert (got.drafted, got.accepted) == (4, 1)
    assert got.reached == (1, 1)
    assert got.kept == (1, 0)
    assert got.refused == (8,)


def test_leaf_reached_at_half_depth_is_not_a_reach_below() -> None:
    proposal = Proposal(tokens=(5, 6, 7), parents=(-1, -1, 0), drafter="tree")
    got = report_of(proposal, Verdict(path=(1,), next_token=9), (6, 9), COST)
    assert got.reached == (1, 0)


def test_plain_decoding_is_one_token_a_pass() -> None:
    stats = SpeculationStats()
    for _ in range(3):
        stats.add(report_of(NO_DRAFT, Verdict(path=(), next_token=4), (4,), COST))
    assert stats.tokens_per_pass == 1.0
    assert stats.steps == 0
    assert stats.accepted_length is None
    assert stats.acceptance_rate is None


def test_prefill_counts_nowhere() -> None:
    stats = SpeculationStats()
    cost = PassCost(draft_ms=0, verify_ms=1, other_ms=0, batch_size=1, rows=9, is_prefill=True)
    stats.add(report_of(NO_DRAFT, Verdict(path=(), next_token=4), (4,), cost))
    assert (stats.passes, stats.committed) == (0, 0)


def test_accepted_length_is_over_steps_and_tokens_per_pass_over_passes() -> None:
    stats = SpeculationStats()
    stats.add(report((1, 2), (0, 1), (1, 2, 99)))
    for _ in range(3):
        stats.add(report_of(NO_DRAFT, Verdict(path=(), next_token=4), (4,), COST))
    assert stats.accepted_length == 3.0
    assert stats.tokens_per_pass == 6 / 4
    assert stats.draft_rate == 1 / 4


def test_pooling_sums_before_it_divides() -> None:
    long, short = SpeculationStats(), SpeculationStats()
    for _ in range(9):
        long.add(report((1, 2), (0, 1), (1, 2, 99)))
    short.add(report((1, 2), (), (99,)))
    pooled = SpeculationStats.pooled([long, short])
    assert pooled.accepted_length == 1 + 18 / 10
    assert pooled.tokens_per_pass == 28 / 10
    assert pooled.per_position() == [{"reached": 10, "accepted": 9}, {"reached": 9, "accepted": 9}]
