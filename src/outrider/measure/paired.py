"""Plain and speculative decoding of the same prompts, interleaved, with what theory predicts beside what was measured.

A step of a plain run makes one token; a step of a speculative run makes ``tokens_per_pass`` tokens and costs a pass over
more rows, and the drafting. So the predicted speed-up is

    tokens_per_pass / ((pass at its rows + drafting) / plain pass)

with pass times by rows that were measured beforehand on their own. What is measured differs from it by everything else
that a step does (sampling, stop rules, Python) and by the weather on the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.audit.identity import Control, Difference, explain, first_difference, run_control
from outrider.drafters.base import Drafter
from outrider.engine.config import EngineConfig
from outrider.engine.costs import RowCosts
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.metrics import SpeculationStats
from outrider.models.base import Target
from outrider.models.cost import time_passes
from outrider.sampling.params import SamplingParams

__all__ = ["PairedReport", "PromptPair", "compare_paired", "measure_row_costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPair:
    """One prompt (or, as ``overall``, all of them) both ways. Speeds count decode passes only, in tokens a second.

    Attributes:
        measured: speculative over plain speed, the median over repeats.
        predicted: the same by the formula above; ``None`` without a decode pass.
        is_identical: both ways gave the same token ids.
    """

    name: str
    kind: str
    num_tokens: int
    plain_speed: float
    speculative_speed: float
    measured: float
    predicted: float | None
    tokens_per_pass: float | None
    acceptance_rate: float | None
    draft_rate: float | None
    is_identical: bool
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedReport:
    """All prompts, all together, the measured cost of a pass by its rows, and every difference explained."""

    settings: dict[str, Any]
    repeats: int
    row_costs_ms: dict[int, float]
    prompts: tuple[PromptPair, ...]
    overall: PromptPair
    differences: tuple[Difference, ...] = ()
    control: Control | None = None

    @property
    def is_lossless(self) -> bool:
        """True if no difference is a bug."""
        return all(difference.verdict != "bug" for difference in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"is_lossless": self.is_lossless, **asdict(self)}


@dataclass(slots=True)
class _Runs:
    """Results of one prompt, one a repeat, both ways."""

    plain: list[GenerationResult] = field(default_factory=list)
    speculative: list[GenerationResult] = field(default_factory=list)


def measure_row_costs(target: Target, *, most_rows: int, num_cached: int = 256, repeats: int = 10) -> RowCosts:
    """Milliseconds of a pass by its rows, on this machine, now."""
    rows = sorted({1, 2, 4, 8, 16, 32, most_rows} & set(range(1, most_rows + 1)))
    timed = time_passes(target, rows, num_cached=num_cached, repeats=repeats)
    return RowCosts(rows=tuple(count for count, _ in timed), ms=tuple(ms for _, ms in timed))


def compare_paired(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    *,
    kinds: Mapping[str, str],
    make_drafter: Callable[[], Drafter | None],
    params: SamplingParams,
    config: EngineConfig,
    repeats: int = 1,
    on_run: Callable[[str], None] | None = None,
) -> PairedReport:
    """Decode each prompt plainly and with drafts, turn by turn, one sequence at a time.

    Args:
        target: the model.
        prompts: token ids by name; kinds: what sort of prompt each is.
        make_drafter: makes a fresh drafter for every run, so that no run learns the answer from an earlier one.
        params: greedy, or with a seed.
        config: engine settings of the speculative runs.
        repeats: times that each pair is run, in alternating order.
        on_run: told the name of each prompt before it runs.
    """
    say = on_run or (lambda name: None)
    say("pass times")
    costs = measure_row_costs(target, most_rows=config.num_draft_tokens + 1)
    runs = {name: _Runs() for name in prompts}
    for repeat in range(repeats):
        for name, prompt in prompts.items():
            say(name)
            _run_pair(target, prompt, runs[name], name, make_drafter, params, config, is_plain_first=repeat % 2 == 0)
    pairs = [_pair(name, kinds[name], runs[name], costs) for name in prompts]
    differences, control = _differences(target, prompts, runs, params, config, say)
    settings = next(iter(runs.values())).speculative[0].settings
    return PairedReport(
        settings=settings,
        repeats=repeats,
        row_costs_ms=dict(zip(costs.rows, costs.ms, strict=True)),
        prompts=tuple(pairs),
        overall=_overall(list(runs.values()), costs),
        differences=differences,
        control=control,
    )


def _run_pair(
    target: Target,
    prompt: Sequence[int],
    runs: _Runs,
    name: str,
    make_drafter: Callable[[], Drafter | None],
    params: SamplingParams,
    config: EngineConfig,
    *,
    is_plain_first: bool,
) -> None:
    arms: list[tuple[list[GenerationResult], Drafter | None]] = [(runs.plain, None), (runs.speculative, make_drafter())]
    for results, drafter in arms if is_plain_first else reversed(arms):
        engine = Engine(target, drafter=drafter, config=config)
        results += engine.generate([list(prompt)], params, ids=[name])


def _pair(name: str, kind: str, runs: _Runs, costs: RowCosts) -> PromptPair:
    stats = SpeculationStats.pooled(result.stats for result in runs.speculative)
    ratios = [_speed([s]) / _speed([p]) for s, p in zip(runs.speculative, runs.plain, strict=True) if _speed([p])]
    return PromptPair(
        name=name,
        kind=kind,
        num_tokens=len(runs.plain[0].token_ids),
        plain_speed=_speed(runs.plain),
        speculative_speed=_speed(runs.speculative),
        measured=statistics.median(ratios) if ratios else 0.0,
        predicted=_predicted(runs.speculative, costs),
        tokens_per_pass=stats.tokens_per_pass,
        acceptance_rate=stats.acceptance_rate,
        draft_rate=stats.draft_rate,
        is_identical=all(
            first_difference(p.token_ids, s.token_ids) is None
            for p, s in zip(runs.plain, runs.speculative, strict=True)
        ),
        text=runs.speculative[0].text,
    )


def _overall(runs: Sequence[_Runs], costs: RowCosts) -> PromptPair:
    """All prompts as one: tokens and milliseconds are summed first, divided last."""
    pooled = _Runs(
        plain=[result for each in runs for result in each.plain],
        speculative=[result for each in runs for result in each.speculative],
    )
    stats = SpeculationStats.pooled(result.stats for result in pooled.speculative)
    plain, speculative = _speed(pooled.plain), _speed(pooled.speculative)
    return PromptPair(
        name="overall",
        kind="all",
        num_tokens=sum(len(each.plain[0].token_ids) for each in runs),
        plain_speed=plain,
        speculative_speed=speculative,
        measured=speculative / plain if plain else 0.0,
        predicted=_predicted(pooled.speculative, costs),
        tokens_per_pass=stats.tokens_per_pass,
        acceptance_rate=stats.acceptance_rate,
        draft_rate=stats.draft_rate,
        is_identical=all(
            first_difference(p.token_ids, s.token_ids) is None
            for p, s in zip(pooled.plain, pooled.speculative, strict=True)
        ),
    )


def _speed(results: Sequence[GenerationResult]) -> float:
    """Tokens of decode passes a second; 0 where there was none."""
    ms = sum(result.timing.draft + result.timing.verify + result.timing.other for result in results)
    return 1e3 * sum(result.stats.committed for result in results) / ms if ms else 0.0


def _predicted(results: Sequence[GenerationResult], costs: RowCosts) -> float | None:
    passes = [step for result in results for step in result.steps if not step.is_prefill]
    if not passes:
        return None
    tokens = sum(len(step.tokens) for step in passes)
    spent = sum(costs(step.rows) + step.draft_ms for step in passes)
    return tokens * costs(1) / spent


def _differences(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    runs: Mapping[str, _Runs],
    params: SamplingParams,
    config: EngineConfig,
    say: Callable[[str], None],
) -> tuple[tuple[Difference, ...], Control | None]:
    """Explain every difference, one that repeats once; the control is only run if there is one."""
    differing = {
        (name, p.token_ids, s.token_ids): (name, p, s)
        for name, each in runs.items()
        for p, s in zip(each.plain, each.speculative, strict=True)
        if p.token_ids != s.token_ids
    }
    if not differing:
        return (), None
    say("control")
    plain = [each.plain[0] for each in runs.values()]
    control = run_control(target, prompts, plain, prefill_chunk=config.prefill_chunk)
    found = [
        explain(
            target,
            prompts[name],
            p,
            s,
            params=params,
            tolerance=control.tolerance,
            prefill_chunk=config.prefill_chunk,
        )
        for name, p, s in differing.values()
    ]
    return tuple(difference for difference in found if difference is not None), control
