"""How many draft tokens each sequence gets now. Zero is a good answer.

A step with k drafts commits 1 + S_1 + ... + S_k tokens on average, S_i being the chance that the first i are kept, and
costs c(k) plain passes: the larger pass and the drafting. It pays where (1 + sum S) / c > 1; the best k maximises it
(Leviathan et al., arXiv 2211.17192, theorem 3.8, with measured chances and costs in place of one rate).

Chances come from tokens that are already committed, costs from a clock: nothing here looks at a token that is drafted
now (law 5), so the choice cannot bias the output.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.config import EngineConfig
from outrider.engine.sequence import LiveSequence
from outrider.models.base import Target
from outrider.models.cost import time_passes
from outrider.types import StepReport

__all__ = ["Planner", "RowCosts"]

DECAY = 0.9
"""Weight of a step's evidence after each later step of the same request: about ten steps are remembered."""
PAUSE_DECAY = 0.98
"""The same for each pass without drafts, so that a text that changes its nature gets a new chance."""
PRIOR_STEPS = 2.0
"""How many steps of evidence the pooled rates of earlier requests are worth to a new one."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""Passes without drafts after drafting stopped paying; doubles each time a new try does not pay either."""
TRY_LENGTH = 4
"""Drafts in the step that tries again after a pause."""
MARGIN = 1.02
"""Predicted gain below which plain decoding is preferred: costs are measured, and measuring errs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Milliseconds of a pass by its packed rows, measured; linear in between and beyond.

    Attributes:
        rows: ascending row counts; ms: time of a pass with that many rows. Both empty: a row more costs nothing.
    """

    rows: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()

    def __call__(self, num_rows: float) -> float:
        """Predicted milliseconds of a pass over ``num_rows`` rows."""
        if len(self.rows) < 2:
            return self.ms[0] if self.ms else 1.0
        right = min(max(1, bisect_left(self.rows, num_rows)), len(self.rows) - 1)
        r0, r1 = self.rows[right - 1], self.rows[right]
        slope = (self.ms[right] - self.ms[right - 1]) / (r1 - r0)
        return self.ms[right - 1] + slope * (num_rows - r0)

    @staticmethod
    def measured(target: Target) -> RowCosts:
        """Time a few passes of this target on this machine; a fraction of a second."""
        num_cached = min(256, target.spec.max_positions // 2)
        row_counts = [rows for rows in (1, 2, 4, 8, 16) if num_cached + rows <= target.spec.max_positions]
        timed = time_passes(target, row_counts, num_cached=num_cached, repeats=3)
        # A pass over more rows is never cheaper; where the clock says so, it erred.
        ms = itertools.accumulate((ms for _, ms in timed), max)
        return RowCosts(rows=tuple(rows for rows, _ in timed), ms=tuple(ms))


@dataclass(slots=True)
class _Belief:
    """Decayed counts of how often each depth was reached and kept."""

    reached: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def update(self, report: StepReport, decay: float) -> None:
        self.fade(decay)
        for depth, (reached, kept) in enumerate(zip(report.reached, report.kept, strict=True)):
            if depth == len(self.reached):
                self.reached.append(0.0)
                self.kept.append(0.0)
            self.reached[depth] += reached
            self.kept[depth] += kept

    def fade(self, decay: float) -> None:
        """Old evidence weighs less."""
        self.reached = [value * decay for value in self.reached]
        self.kept = [value * decay for value in self.kept]

    def rate(self, depth: int, prior: float, strength: float) -> float:
        if depth >= len(self.reached):
            return prior
        return (self.kept[depth] + prior * strength) / (self.reached[depth] + strength)


@dataclass(slots=True)
class _Plan:
    """What the planner remembers of one sequence."""

    belief: _Belief = field(default_factory=_Belief)
    pause: int = FIRST_PAUSE
    waiting: int = 0
    is_trying: bool = False


class Planner:
    """Chooses the draft depth of every sequence of a step.

    Args:
        config: ``schedule="fixed"`` always gives ``num_draft_tokens``.
        costs: pass time by rows of this target on this machine; only the adaptive schedule reads them.
    """

    def __init__(self, config: EngineConfig, costs: RowCosts) -> None:
        self._most = config.num_draft_tokens
        self._is_fixed = config.schedule == "fixed"
        self.costs = costs
        self._pooled = _Belief()
        self._plans: dict[int, _Plan] = {}
        self._draft_ms_per_level = 0.0
        self._nodes_per_level = 1.0

    def budgets(self, sequences: Sequence[LiveSequence]) -> list[int]:
        """Most draft depth for each sequence, never past what its limit could commit."""
        return [min(s.most_drafts, self._depth(s.key, len(sequences))) for s in sequences]

    def record(self, sequence: LiveSequence, report: StepReport) -> None:
        """Learn from one pass of one sequence."""
        if self._is_fixed or report.is_prefill:
            return
        plan = self._plans.setdefault(sequence.key, _Plan())
        if not report.drafter:
            plan.waiting = max(0, plan.waiting - 1)
            plan.belief.fade(PAUSE_DECAY)
            return
        plan.belief.update(report, DECAY)
        self._pooled.update(report, 0.99)
        levels = max(1, len(report.reached))
        per_level = report.draft_ms / report.batch_size / levels
        self._draft_ms_per_level += 0.1 * (per_level - self._draft_ms_per_level)
        self._nodes_per_level += 0.1 * (report.drafted / levels - self._nodes_per_level)

    def forget(self, sequence: LiveSequence) -> None:
        """The sequence ended."""
        self._plans.pop(sequence.key, None)

    def _depth(self, key: int, batch_size: int) -> int:
        if self._is_fixed or self._most == 0:
            return self._most
        plan = self._plans.setdefault(key, _Plan())
        if plan.waiting > 0:
            return 0
        best = self._best_depth(plan.belief, batch_size)
        if best > 0:
            plan.pause, plan.is_trying = FIRST_PAUSE, False
            return best
        if plan.is_trying:
            plan.pause = min(2 * plan.pause, LONGEST_PAUSE)
            plan.is_trying = False
            plan.waiting = plan.pause
            return 0
        if plan.belief.reached:
            plan.is_trying = True
        return min(TRY_LENGTH, self._most)

    def _best_depth(self, belief: _Belief, batch_size: int) -> int:
        """The depth with the highest predicted speed-up, 0 if none beats plain decoding."""
        plain_ms = self.costs(batch_size)
        survival, tokens = 1.0, 1.0
        best, best_gain = 0, MARGIN
        for depth in range(1, self._most + 1):
            survival *= self._rate(belief, depth - 1)
            tokens += survival
            drafting = self._draft_ms_per_level * depth * batch_size
            rows = batch_size * (1 + depth * self._nodes_per_level)
            gain = tokens * plain_ms / (self.costs(rows) + drafting)
            if gain > best_gain:
                best, best_gain = depth, gain
        return best

    def _rate(self, belief: _Belief, depth: int) -> float:
        pooled = self._pooled.rate(depth, 0.6, PRIOR_STEPS)
        return belief.rate(depth, pooled, PRIOR_STEPS)
