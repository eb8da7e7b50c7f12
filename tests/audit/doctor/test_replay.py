"""Replay along answers is decoding; gains are paired; findings are ranked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.audit.doctor.anatomy import read_parts
from outrider.audit.doctor.bench import Bench
from outrider.audit.doctor.replay import AnsweredText, walk
from outrider.audit.doctor.report import Finding, Gain, Status, compare, rank
from outrider.audit.doctor.wiring import Wiring, candidates, target_ids
from outrider.metrics import SpeculationStats
from outrider.models.base import LoadedTarget

from .ward import NUM_TOKENS, TAPS, K, case, prompts


def counts(stats: SpeculationStats) -> tuple[object, ...]:
    return stats.passes, stats.steps, stats.committed, stats.accepted, stats.kept, stats.reached, stats.drafted


@pytest.mark.parametrize("seed", [11, 3])
def test_replay_counts_what_the_engine_counts(target: LoadedTarget, head: Path, seed: int) -> None:
    """On texts that the head knows by heart, and on others, where it errs at every depth."""
    ward = case(target, head, prompts=prompts(seed=seed))
    run = ward.run(ward.drafter(), ward.greedy)
    parts = read_parts(head, target.spec)
    assert parts.config is not None and parts.is_whole
    table_VD = target.checkpoint.tensor("model.embed_tokens.weight")
    pairs = list(zip(ward.prompts, run.answers, strict=True))
    bench = Bench(parts, target, table_VD, pairs, num_draft_tokens=K)
    replayed = bench.score(Wiring(config=parts.config))
    assert replayed is not None
    whole = [index for index, answer in enumerate(run.answers) if len(answer) == NUM_TOKENS]
    assert len(whole) >= 4, "answers that end early are counted otherwise at their end"
    assert [counts(replayed[index]) for index in whole] == [counts(run.stats[index]) for index in whole]
    passes = [(stats.passes, stats.committed) for stats in replayed]
    assert passes == [(stats.passes, stats.committed) for stats in run.stats]
    pooled = SpeculationStats.pooled(replayed)
    assert (pooled.accepted_length or 0) > 2 if seed == 11 else 0 < pooled.accepted < pooled.drafted


def test_a_walk_by_hand() -> None:
    """Prompt of 2, answer 5 6 7 8 9: the first draft is right twice; then one token is left, and nothing is drafted."""
    text = AnsweredText(tokens=(1, 2, 5, 6, 7, 8, 9), num_prompt=2, taps={})
    assert text.starts == range(3, 7)
    says_KQ = torch.tensor([[6, 0, 0, 9], [7, 0, 0, 4], [0, 0, 0, 4]])
    assert counts(walk(text, says_KQ)) == (2, 1, 4, 2, [1, 1, 0], [1, 1, 1], 3)
    nothing = walk(text, torch.zeros(3, 4, dtype=torch.int64))
    assert counts(nothing) == (4, 3, 4, 0, [0, 0, 0], [3, 0, 0], 6)


def made(committed: int, passes: int) -> SpeculationStats:
    return SpeculationStats(committed=committed, passes=passes)


def test_gains_are_paired_over_requests() -> None:
    before = [made(20, 20 - i) for i in range(8)]
    after = [made(20, 10 - i) for i in range(8)]
    gain = compare(before, after)
    assert gain.before == pytest.approx(160 / 132) and gain.after == pytest.approx(160 / 52)
    assert gain.low < gain.after - gain.before < gain.high and gain.is_proved
    same = compare(before, before)
    assert (same.low, same.high) == (0, 0) and not same.is_proved
    assert not compare(before[:2], after[:2]).is_proved, "two requests prove nothing"
    mixed = [made(20, 10 + 10 * (i % 2)) for i in range(8)]
    assert not compare([made(20, 15)] * 8, mixed).is_proved


def finding(cause: str, status: Status, *, low: float = 0.0, weight: int = 0) -> Finding:
    gain = Gain(before=1.0, after=2.0, low=low, high=2.0, num_requests=5) if low else None
    return Finding(cause=cause, place="wiring", status=status, title=cause, evidence="", gain=gain, weight=weight)


def test_the_order_of_findings() -> None:
    findings = [
        finding("clear", "clear", weight=99),
        finding("faint", "seen", weight=10),
        finding("strong", "seen", weight=20),
        finding("refused", "refused"),
        finding("small", "proved", low=0.1),
        finding("large", "proved", low=0.9),
    ]
    ranked = [each.cause for each in rank(findings)]
    assert ranked == ["large", "small", "refused", "strong", "faint", "clear"]


def test_candidates_differ_in_one_thing_and_none_comes_twice(target: LoadedTarget, head: Path) -> None:
    parts = read_parts(head, target.spec)
    assert parts.config is not None
    now = Wiring(config=parts.config, window=64)
    found = list(candidates(parts, now, num_layers=6, target_vocab_size=target.spec.vocab_size, looks_like=(1, 2, 5)))
    wirings = [candidate.wiring for candidate in found]
    assert len(set(wirings)) == len(wirings) and now not in wirings
    for wiring in wirings:
        changed = [wiring.config != now.config, wiring.vocabulary != now.vocabulary, wiring.window != now.window]
        assert sum(changed) == 1
    taps = {wiring.config.tap_layers for wiring in wirings}
    assert {(0, 2, 4), (2, 4, 6), (1, 2, 5), (5, 3, 1), TAPS} <= taps
    assert all(0 <= tap <= 6 for each in taps for tap in each)


def test_readings_of_d2t(target: LoadedTarget, head: Path) -> None:
    parts = read_parts(head, target.spec)
    offsets, marked = target_ids(parts, "offsets"), target_ids(parts, "marked")
    assert offsets is not None and marked is not None and torch.equal(offsets, marked)
    ids = target_ids(parts, "ids")
    assert ids is not None and torch.equal(ids, offsets - torch.arange(len(offsets)))
