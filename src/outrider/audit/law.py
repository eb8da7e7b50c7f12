"""Proof by enumeration that verification keeps the target's law (``outrider audit law``).

In small random worlds every draw, acceptance and correction is integrated exactly, in float64, through the very sampling
and verification functions that the engine runs (:mod:`outrider.audit.fork`). What a step commits, continued by plain
decoding to a fixed length, must have the law of plain decoding: their total variation distance is rounding, or the
verifier is biased. Worlds of all kinds and fields share batches, as requests do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from outrider.audit.cases import KINDS, World, random_world
from outrider.audit.fork import Fork, ForkingLaws, Leaf, Outcome, explore
from outrider.errors import ConfigError
from outrider.sampling.laws import ProcessedLaws
from outrider.types import ROOT, Proposal, Verdict
from outrider.verify import select
from outrider.verify.base import Place

__all__ = ["TOLERANCE", "LawReport", "LawRow", "audit_law"]

TOLERANCE = 1e-12
_WORLDS_A_BATCH = 6
_SEEDS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class LawRow:
    """What the audit found for one kind of verification.

    Attributes:
        kind: verifier and shape of its proposals.
        cases: worlds; branches: outcomes enumerated in them (of seeded worlds: runs compared).
        worst: largest total variation distance (of seeded worlds: largest share of runs that differ from plain decoding).
    """

    kind: str
    cases: int
    branches: int
    worst: float

    @property
    def is_lossless(self) -> bool:
        """True within rounding."""
        return self.worst < TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class LawReport:
    """Result of :func:`audit_law`."""

    seed: int
    rows: tuple[LawRow, ...]

    @property
    def cases(self) -> int:
        """Worlds enumerated."""
        return sum(row.cases for row in self.rows)

    @property
    def worst(self) -> float:
        """Largest total variation distance of all."""
        return max(row.worst for row in self.rows)

    @property
    def is_lossless(self) -> bool:
        """True if every row is."""
        return all(row.is_lossless for row in self.rows)

    @property
    def verdict(self) -> str:
        """``lossless`` or ``biased``."""
        return "lossless" if self.is_lossless else "biased"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {"kind": r.kind, "cases": r.cases, "branches": r.branches, "worst_total_variation": r.worst}
            for r in self.rows
        ]
        return {
            "verdict": self.verdict,
            "cases": self.cases,
            "seed": self.seed,
            "tolerance": TOLERANCE,
            "worst_total_variation": self.worst,
            "rows": rows,
        }


def audit_law(*, num_cases: int = 200, seed: int = 0) -> LawReport:
    """Enumerate ``num_cases`` random worlds, spread over all kinds of verification.

    Raises:
        ConfigError: fewer cases than there are kinds.
    """
    if num_cases < len(KINDS):
        raise ConfigError(
            f"{num_cases} cases are too few; give {len(KINDS)} or more, one for each kind of verification"
        )
    with _one_thread():
        return _audit(num_cases, random.Random(seed), seed)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Worlds are so small that more threads only wait for one another."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _audit(num_cases: int, noise: random.Random, seed: int) -> LawReport:
    worlds = [random_world(KINDS[index % len(KINDS)], noise) for index in range(num_cases)]
    found: list[tuple[str, int, float]] = []
    for vocab_size in sorted({world.vocab_size for world in worlds}):
        alike = [world for world in worlds if world.vocab_size == vocab_size and world.kind != "seeded compare"]
        for start in range(0, len(alike), _WORLDS_A_BATCH):
            found.extend(_enumerate(alike[start : start + _WORLDS_A_BATCH]))
    found.extend(_compare_seeded(world, noise) for world in worlds if world.kind == "seeded compare")
    return LawReport(seed=seed, rows=tuple(_row(kind, found) for kind in KINDS))


def _row(kind: str, found: Sequence[tuple[str, int, float]]) -> LawRow:
    mine = [(branches, distance) for name, branches, distance in found if name == kind]
    return LawRow(
        kind=kind, cases=len(mine), branches=sum(b for b, _ in mine), worst=max((d for _, d in mine), default=0.0)
    )


def _enumerate(worlds: Sequence[World]) -> list[tuple[str, int, float]]:
    """Kind, number of branches and total variation of each world, all verified in the same batches."""
    starts = [(world, proposal, p) for world in worlds for proposal, p in world.proposals]
    leaves = explore([p for _, _, p in starts], _runner(starts), _hinter(starts))
    found: list[tuple[str, int, float]] = []
    for world in worlds:
        mine = [leaf for leaf in leaves if starts[leaf.start][0] is world]
        committed = [(_committed(starts[leaf.start][1], leaf.verdict), leaf) for leaf in mine]
        found.append((world.kind, len(mine), _total_variation(world, committed)))
    return found


def _runner(starts: Sequence[tuple[World, Proposal, float]]) -> Callable[[Sequence[Fork]], list[Outcome]]:
    """Runs the engine's verifier over scripts; all runs of a start share its rows and its state."""
    rows = [world.rows_RV(proposal) for world, proposal, _ in starts]
    first_rows = [0]
    for block in rows:
        first_rows.append(first_rows[-1] + len(block))
    logits_RV = torch.cat(rows)
    states = [world.state() for world, _, _ in starts]

    def run(forks: Sequence[Fork]) -> list[Outcome]:
        if not forks:
            return []
        which = [fork.start for fork in forks]
        laws = ProcessedLaws(
            logits_RV, first_rows=[first_rows[start] for start in which], states=[states[start] for start in which]
        )
        forking = ForkingLaws(laws, [fork.script for fork in forks])
        verdicts = select.verify([starts[start][1] for start in which], forking)
        return [Outcome(verdict, question) for verdict, question in zip(verdicts, forking.questions, strict=True)]

    return run


def _hinter(starts: Sequence[tuple[World, Proposal, float]]) -> Callable[[int, Place], float]:
    """Where theory puts the acceptance threshold of the draft token behind a place."""
    known: dict[tuple[int, int], float] = {}

    def hint(start: int, place: Place) -> float:
        world, proposal, _ = starts[start]
        node = place.node + 1
        if (start, node) not in known:
            assert proposal.draft_probs_NV is not None
            laws = ProcessedLaws(
                world.logits[place.path].unsqueeze(0), first_rows=[0], states=[world.state(place.path)]
            )
            token = proposal.tokens[node]
            target = float(laws.probs_BV([Place(sequence=0, node=ROOT, path=())])[0, token])
            known[start, node] = target / float(proposal.draft_probs_NV[node, token])
        return known[start, node]

    return hint


def _committed(proposal: Proposal, verdict: Verdict) -> tuple[int, ...]:
    return (*(proposal.tokens[node] for node in verdict.path), verdict.next_token)


def _total_variation(world: World, committed: Sequence[tuple[tuple[int, ...], Leaf]]) -> float:
    """Distance of (what was committed, continued by plain decoding) from plain decoding, over ``depth + 1`` tokens."""
    plain = torch.ones(1, dtype=torch.float64)
    carried = torch.zeros(1, dtype=torch.float64)
    for length in range(1, world.depth + 2):
        laws_BV = world.plain_laws_BV(length - 1)
        plain = (plain.unsqueeze(1) * laws_BV).flatten()
        carried = (carried.unsqueeze(1) * laws_BV).flatten()
        for tokens, leaf in committed:
            if len(tokens) == length:
                carried[_index(tokens, world.vocab_size)] += leaf.probability
    return float((plain - carried).abs().sum()) / 2


def _index(tokens: Sequence[int], vocab_size: int) -> int:
    index = 0
    for token in tokens:
        index = index * vocab_size + token
    return index


def _compare_seeded(world: World, noise: random.Random) -> tuple[str, int, float]:
    """Share of seeds for which a step commits other tokens than plain decoding with that seed does."""
    proposal = world.proposals[0][0]
    seeds = [noise.getrandbits(64) - 2**63 for _ in range(_SEEDS)]
    laws = ProcessedLaws(
        world.rows_RV(proposal), first_rows=[0] * _SEEDS, states=[world.state(seed=seed) for seed in seeds]
    )
    verdicts: list[Verdict] = select.verify([proposal] * _SEEDS, laws)
    runs = [_committed(proposal, verdict) for verdict in verdicts]
    plain = _plain_runs(world, seeds)
    wrong = sum(expected[: len(run)] != run for expected, run in zip(plain, runs, strict=True))
    return world.kind, _SEEDS, wrong / _SEEDS


def _plain_runs(world: World, seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """What plain decoding commits with each seed, as many tokens as a step can commit at most."""
    runs: list[tuple[int, ...]] = [()] * len(seeds)
    places = [Place(sequence=index, node=ROOT, path=()) for index in range(len(seeds))]
    for _ in range(world.depth + 1):
        laws = ProcessedLaws(
            torch.stack([world.logits[run] for run in runs]),
            first_rows=range(len(seeds)),
            states=[world.state(run, seed) for run, seed in zip(runs, seeds, strict=True)],
        )
        runs = [(*run, token) for run, token in zip(runs, laws.choose(places), strict=True)]
    return runs
