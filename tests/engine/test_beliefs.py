"""What counts as evidence, and what is made of it."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from outrider.engine.beliefs import Belief, Calibration, Evidence, Pooled, evidence_of, sibling_groups
from outrider.engine.report import PassCost, report_of
from outrider.types import Proposal, StepReport, Verdict

COST = PassCost(draft_ms=1, verify_ms=1, other_ms=1, batch_size=1, rows=1)


def report(proposal: Proposal, path: tuple[int, ...], next_token: int = 99, cut: int | None = None) -> StepReport:
    verdict = Verdict(path=path, next_token=next_token)
    tokens = (*(proposal.tokens[node] for node in path), next_token)[:cut]
    return report_of(proposal, verdict, tokens, COST)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_what_lay_behind_a_refusal_does_not_count(kept: int) -> None:
    """Its length depends on tokens whose noise will draw again."""
    chains = [Proposal.chain(range(length)) for length in (kept + 1, kept + 2, kept + 5)]
    found = {evidence_of(report(chain, tuple(range(kept)))) for chain in chains}
    assert found == {(True,) * kept + (False,)}


def test_beliefs_are_the_same_however_much_was_drafted_behind_a_refusal() -> None:
    learned = []
    for length in (2, 6):
        evidence = Evidence({"head": ()}, {"head": 8})
        evidence.step = 1
        chain = Proposal.chain(range(length))
        evidence.learn(0, "head", chain, report(chain, (0,)))
        learned.append(evidence.of(0, "head").survivals)
    assert learned[0] == learned[1]


def test_rates_start_at_the_card_and_end_at_the_evidence() -> None:
    pooled = Pooled((0.8, 0.5))
    assert pooled.rates(4) == [0.8, 0.5, 0.5, 0.5]
    for _ in range(200):
        pooled.add((True, False))
    assert pooled.rates(4)[0] > 0.98 and pooled.rates(4)[1] < 0.03


def test_survivals_are_products_and_fall() -> None:
    pooled, own = Pooled(), Belief()
    for flags in ((True, True, False), (True, False), (True, True, True)):
        own.add(flags, decay=0.9)
        pooled.add(flags)
    survivals = pooled.survivals(own, 6)
    assert len(survivals) == 6 and all(a > b > 0 for a, b in itertools.pairwise(survivals))


def test_whoever_offers_nothing_is_expected_to_offer_nothing() -> None:
    evidence = Evidence({"lookup": ()}, {"lookup": 4})
    before = evidence.of(0, "lookup").hope
    for _ in range(40):
        evidence.step += 1
        evidence.learn(0, "lookup", Proposal(), StepReport(tokens=(1,)))
    own = evidence.of(0, "lookup")
    assert own.hope < 0.05 < before
    assert own.given[0] > 0.5, "of what it would offer nothing is known"


def test_what_was_ever_so_stays_when_now_fades() -> None:
    """A drafter that never was of use does not become promising because of one lucky try."""
    pooled = Pooled()
    for _ in range(100):
        pooled.add((False,))
    pooled.add((True,), is_surprise=True)
    assert pooled.rates(1)[0] < 0.1


def test_a_few_tries_that_succeed_outweigh_a_long_drought() -> None:
    pooled = Pooled()
    for _ in range(100):
        pooled.add((False,))
    for _ in range(5):
        pooled.add((True,), is_surprise=True)
    assert pooled.rates(1)[0] > 0.3


def test_idle_passes_fade_a_requests_evidence() -> None:
    own = Belief()
    own.add((False,), decay=0.9)
    own.fade_to(200)
    assert own.reached[0] / own.unit < 0.1 and own.seen == 200


def test_counts_read_in_their_unit_are_those_of_fading_every_one_of_them() -> None:
    """Also where the unit has grown so large that all counts are written anew."""
    rng, own = random.Random(3), Belief()
    reached, kept = [0.0] * 3, [0.0] * 3
    for _ in range(1500):
        flags = [True] * rng.randint(0, 2) + [False]
        own.add(flags, decay=0.9)
        for depth in range(3):
            reached[depth] = 0.9 * reached[depth] + (depth < len(flags))
            kept[depth] = 0.9 * kept[depth] + (depth < len(flags) - 1)
    assert [count / own.unit for count in own.reached] == pytest.approx(reached)
    assert [count / own.unit for count in own.kept] == pytest.approx(kept)
    assert own.unit < 1e9 * 1.2


def tree() -> Proposal:
    """0 and 1 below the root, 2 and 3 below 0."""
    probs = (0.6, 0.3, 0.4, 0.1)
    return Proposal(tokens=(5, 6, 7, 8), parents=(-1, -1, 0, 0), scores=tuple(map(math.log, probs)))


@pytest.mark.parametrize(
    ("path", "next_token", "cut", "expected"),
    [
        ((), 9, None, [([0.6, 0.3], -1)]),
        ((1,), 9, None, [([0.6, 0.3], 1)]),
        ((0,), 9, None, [([0.6, 0.3], 0), ([4 / 6, 1 / 6], -1)]),
        ((0, 3), 9, None, [([0.6, 0.3], 0), ([4 / 6, 1 / 6], 1)]),
        ((0, 3), 9, 1, [([0.6, 0.3], 0)]),
    ],
)
def test_groups_that_verification_stood_before(
    path: tuple[int, ...], next_token: int, cut: int | None, expected: list[tuple[list[float], int]]
) -> None:
    found = list(sibling_groups(tree(), report(tree(), path, next_token, cut)))
    assert [kept for _, kept in found] == [kept for _, kept in expected]
    for (estimates, _), (wanted, _) in zip(found, expected, strict=True):
        assert estimates == pytest.approx(wanted)


def test_estimates_that_promise_too_much_are_corrected() -> None:
    calibration, rng = Calibration(), random.Random(0)
    for _ in range(2000):
        calibration.add([0.85], 0 if rng.random() < 0.4 else -1)
    assert calibration(0.85) == pytest.approx(0.4, abs=0.05)
    assert calibration(0.15) == pytest.approx(0.15), "what was never tested is taken at its word"
    probs = calibration.path_probs(tree(), 1.0)
    assert probs[2] <= probs[0] and probs[3] <= probs[0]
