"""Drafters side by side on the subset of Spec-Bench, HumanEval and tool calls: which one, at which budget, pays most.

Each arm names a drafter and its own most draft tokens (``suffix@8``, ``merged:HEAD:num_nodes=9@9``). All arms of a precision
decode a prompt one after the other before the next prompt comes. Arms that draft merged trees (``merged:HEAD``, or in a choice
with suffix alone, ``auto:suffix,merged:HEAD``) are compared with the best suffix arm and the best arm of a head alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.arms import Bench, Comparison, compare_engines, progress_bar, run_engine
from benchmarks.prompts import PromptRow
from benchmarks.report import Bar, Section
from benchmarks.stats import PairedRatio, pooled_ratio
from outrider.errors import ConfigError

__all__ = ["section_drafts"]

PRECISIONS = ("bfloat16", "int8")
GROUPS = ("spec_bench", "humaneval", "tool_calls")
PLAIN = "none"
OVER_PLAIN, OVER_PARTS = 1.8, 1.15
"""Aims of the best merged arm: over plain decoding, and over the better of suffix and head alone."""


def section_drafts(bench: Bench) -> Section:
    """Every arm against plain decoding, by task and overall, in bf16 and int8."""
    drafts = bench.settings.drafts
    if not drafts:
        raise ConfigError("the section drafts compares what --drafts names; give for example --drafts suffix@8 ngram@8")
    prompts = [prompt for group in GROUPS for prompt in bench.prompts(group)]
    bars: list[Bar] = []
    summary: dict[str, Any] = {}
    raw: dict[str, Any] = {}
    for precision in PRECISIONS:
        comparison = _compare(bench, precision, drafts, prompts)
        summary[precision] = {name: _tasks(comparison, name, prompts) for name in (PLAIN, *drafts)}
        raw[precision] = comparison.to_json()
        bars += _bars(comparison, drafts, precision)
    title = "drafters at their own budgets: Spec-Bench subset, HumanEval, tool calls"
    return Section(name="drafts", title=title, bars=bars, summary=summary, raw=raw)


def _compare(
    bench: Bench, precision: str, drafts: Sequence[str], prompts: Sequence[tuple[PromptRow, list[int]]]
) -> Comparison:
    """As many rounds as ``--pairs`` says (one), each with new engines: an arm knows this round's prompts only."""
    comparison = Comparison(prompts=[], runs={})
    rounds = bench.settings.pairs or 1
    with progress_bar(f"{precision}: plain, {', '.join(drafts)}") as bar:
        task = bar.add_task("", total=rounds * len(prompts))
        for turn in range(rounds):
            engines = {name: bench.engine(precision, name) for name in (PLAIN, *drafts)}
            for engine in engines.values():
                run_engine(engine, prompts[0][1][:8], bench.greedy())
            params = bench.greedy()
            compare_engines(engines, prompts, params, into=comparison, turn=turn, progress=lambda: bar.advance(task))
    return comparison


def _tasks(comparison: Comparison, arm: str, prompts: Sequence[tuple[PromptRow, list[int]]]) -> dict[str, Any]:
    """Tokens a pass, tokens a second and speed-up of one arm by task, and ``all``."""
    task_of = {row.id: row.category if row.group == "spec_bench" else row.group for row, _ in prompts}
    found = {}
    for task in (*dict.fromkeys(task_of.values()), "all"):
        part = comparison.part([id for id in comparison.prompts if task in ("all", task_of[id])])
        seconds = sum(run.decode_s for run in part.runs[arm])
        found[task] = {
            "prompts": len(part.prompts),
            "tokens_per_pass": round(part.tokens_per_pass(arm), 3),
            "tokens_per_s": round(sum(run.decoded for run in part.runs[arm]) / seconds, 1),
            "speed_up": pooled_ratio(part.costs(PLAIN, PLAIN), part.costs(arm, PLAIN)).to_json(),
            "outputs_equal_to_plain": part.identical(arm, PLAIN),
        }
    return found


def _bars(comparison: Comparison, drafts: Sequence[str], precision: str) -> list[Bar]:
    """The best merged arm against plain, and against the best arm of each of its parts."""
    merged = [name for name in drafts if "merged:" in name]
    if not merged:
        return []
    best = _fastest(comparison, merged)
    bars = [Bar.of_ratio(f"{best} against plain, {precision}", _over(comparison, best, PLAIN), OVER_PLAIN)]
    suffix = [name for name in drafts if name.startswith("suffix")]
    head = re.split("[:,@]", best.partition("merged:")[2])[0]
    heads = [name for name in drafts if name.startswith(head)]
    for parts in (suffix, heads):
        if parts:
            rival = _fastest(comparison, parts)
            name = f"{best} against {rival}, {precision}"
            bars.append(Bar.of_ratio(name, _over(comparison, best, rival), OVER_PARTS))
    return bars


def _fastest(comparison: Comparison, arms: Sequence[str]) -> str:
    return min(arms, key=lambda arm: sum(comparison.costs(arm, PLAIN)))


def _over(comparison: Comparison, arm: str, rival: str) -> PairedRatio:
    return pooled_ratio(comparison.costs(rival, PLAIN), comparison.costs(arm, PLAIN))
