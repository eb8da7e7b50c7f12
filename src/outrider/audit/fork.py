"""Exact integration over every random choice that a verifier makes, by running the verifier itself.

The verifier is handed laws whose answers are read from a script. The first question past the script's end forks it: a
draw forks over the tokens of its law, an acceptance uniform over the intervals of (0, 1) on which the verifier goes on in
the same way. Where those intervals end is found by watching the verifier, so a wrong acceptance rule is integrated as it
is, not as it should be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from outrider.types import Verdict
from outrider.verify.base import Place, StepLaws

__all__ = ["Fork", "ForkingLaws", "Leaf", "Outcome", "Question", "explore"]

_GRID = tuple((i + 0.5) / 8 for i in range(8))
_HINT_WIDTH = 1e-14
_FINEST = 2.0**-52


class Question(NamedTuple):
    """A random answer that a verifier asked for: ``choose``, ``draw`` (with their law) or ``uniform``."""

    kind: str
    place: Place
    law: tuple[float, ...] = ()


class Outcome(NamedTuple):
    """Where a scripted run ended: the question past the script's end if there was one, else the verdict."""

    verdict: Verdict
    question: Question | None

    @property
    def signature(self) -> tuple[object, ...]:
        """What the verifier did next, for telling apart the two sides of a threshold."""
        if self.question is None:
            return ("verdict", self.verdict)
        return (self.question.kind, self.question.place.node, self.question.place.path)


class Fork(NamedTuple):
    """A run still to be made: which start, its script, and the probability of both."""

    start: int
    script: tuple[float, ...]
    probability: float


class Leaf(NamedTuple):
    """A finished run."""

    start: int
    verdict: Verdict
    probability: float


class _Bracket(NamedTuple):
    """An interval of a run's next uniform in which the verifier stops doing what it does at ``low``."""

    fork: Fork
    low: float
    high: float
    at_low: tuple[object, ...]

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def is_wide(self) -> bool:
        width = self.high - self.low
        return width > 4 * _HINT_WIDTH * self.high and width > _FINEST / 4


Run = Callable[[Sequence[Fork]], list[Outcome]]
Hint = Callable[[int, Place], float]


class ForkingLaws:
    """Step laws that answer from scripts, one a sequence, and record the first question past each script's end."""

    def __init__(self, laws: StepLaws, scripts: Sequence[Sequence[float]]) -> None:
        self._laws = laws
        self._scripts = scripts
        self._cursors = [0] * len(scripts)
        self.questions: list[Question | None] = [None] * len(scripts)

    def choose(self, places: Sequence[Place]) -> list[int]:
        """Scripted tokens; past the script a likeliest token, and the law is recorded."""
        fresh = [place for place in places if not self._is_scripted(place)]
        return self._draw("choose", places, self.probs_BV(fresh) if fresh else None)

    def probs_BV(self, places: Sequence[Place]) -> Tensor:
        """The wrapped laws'."""
        return self._laws.probs_BV(places)

    def uniforms(self, places: Sequence[Place]) -> list[float]:
        """Scripted uniforms; 0.5 past the script."""
        return [self._answer(Question("uniform", place), 0.5) for place in places]

    def draw_from(self, weights_BV: Tensor, places: Sequence[Place]) -> list[int]:
        """Scripted tokens; past the script a likeliest token, and the normalised weights are recorded."""
        fresh = [row for row, place in enumerate(places) if not self._is_scripted(place)]
        weights_BV = weights_BV.double()
        return self._draw("draw", places, (weights_BV / weights_BV.sum(dim=-1, keepdim=True))[fresh])

    def _draw(self, kind: str, places: Sequence[Place], fresh_laws_BV: Tensor | None) -> list[int]:
        laws = iter([] if fresh_laws_BV is None else fresh_laws_BV.tolist())
        tokens: list[int] = []
        for place in places:
            law = () if self._is_scripted(place) else tuple(next(laws))
            tokens.append(int(self._answer(Question(kind, place, law), law.index(max(law)) if law else -1)))
        return tokens

    def _is_scripted(self, place: Place) -> bool:
        return self._cursors[place.sequence] < len(self._scripts[place.sequence])

    def _answer(self, question: Question, default: float) -> float:
        walk = question.place.sequence
        cursor = self._cursors[walk]
        self._cursors[walk] += 1
        if cursor < len(self._scripts[walk]):
            return self._scripts[walk][cursor]
        if self.questions[walk] is None:
            self.questions[walk] = question
        return default


def explore(starts: Sequence[float], run: Run, hint: Hint) -> list[Leaf]:
    """Every outcome of every start with its exact probability.

    Args:
        starts: probability of each start.
        run: runs the verifier on a batch of scripts.
        hint: where the acceptance threshold at a place of a start should lie; only saves search. The threshold that
            counts is the one that the verifier shows.
    """
    leaves: list[Leaf] = []
    frontier = [Fork(start, (), probability) for start, probability in enumerate(starts)]
    while frontier:
        outcomes = run(frontier)
        tests: list[tuple[Fork, Place]] = []
        forks: list[Fork] = []
        for fork, (verdict, question) in zip(frontier, outcomes, strict=True):
            if question is None:
                leaves.append(Leaf(fork.start, verdict, fork.probability))
            elif question.kind == "uniform":
                tests.append((fork, question.place))
            else:
                forks.extend(_extended(fork, token, p) for token, p in enumerate(question.law) if p > 0)
        frontier = forks + _split(tests, run, hint)
    return leaves


def _extended(fork: Fork, answer: float, probability: float) -> Fork:
    return Fork(fork.start, (*fork.script, answer), fork.probability * probability)


def _split(tests: Sequence[tuple[Fork, Place]], run: Run, hint: Hint) -> list[Fork]:
    """Fork each run over the intervals of its next uniform; a representative of each interval goes into the script."""
    probes = [_probes(hint(fork.start, place)) for fork, place in tests]
    shown = iter(run([_extended(fork, u, 1.0) for (fork, _), us in zip(tests, probes, strict=True) for u in us]))
    brackets: list[_Bracket] = []
    for (fork, _), us in zip(tests, probes, strict=True):
        signatures = [next(shown).signature for _ in us]
        for (low, left), (high, right) in itertools.pairwise(zip(us, signatures, strict=True)):
            if left != right:
                brackets.append(_Bracket(fork, low, high, left))
    edges: dict[Fork, list[float]] = {fork: [0.0] for fork, _ in tests}
    for bracket in _narrowed(brackets, run):
        edges[bracket.fork].append(bracket.middle)
    return [
        _extended(fork, (a + b) / 2, b - a)
        for fork, found in edges.items()
        for a, b in itertools.pairwise([*found, 1.0])
    ]


def _probes(threshold: float) -> list[float]:
    """A grid, both sides of the expected threshold, and points next to the ends of (0, 1), ascending."""
    near = [threshold * (1 - _HINT_WIDTH), threshold * (1 + _HINT_WIDTH)]
    ends = [_FINEST, 1 - _FINEST]
    return sorted({u for u in (*_GRID, *near, *ends) if 0 < u < 1})


def _narrowed(brackets: Sequence[_Bracket], run: Run) -> list[_Bracket]:
    """Bisect all brackets together until each holds its threshold to about fourteen digits."""
    done = list(brackets)
    while wide := [index for index, bracket in enumerate(done) if bracket.is_wide]:
        outcomes = run([_extended(done[index].fork, done[index].middle, 1.0) for index in wide])
        for index, outcome in zip(wide, outcomes, strict=True):
            bracket = done[index]
            is_low = outcome.signature == bracket.at_low
            done[index] = bracket._replace(low=bracket.middle) if is_low else bracket._replace(high=bracket.middle)
    return done
