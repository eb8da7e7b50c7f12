"""The sections of ``engine_speed``: each measures one claim and returns its bars, spread and raw values."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.arms import Bench, Comparison, Run, TransformersArm, compare_engines, progress_bar, run_engine
from benchmarks.drafts import section_drafts
from benchmarks.passes import ROW_COUNTS, time_passes
from benchmarks.provenance import ROOT
from benchmarks.report import Bar, Section
from benchmarks.stats import alternate, paired_ratio, pooled_ratio, spread
from outrider.engine.engine import Engine
from outrider.models.base import LoadedTarget
from outrider.models.native import NativeTarget
from outrider.sampling.params import SamplingParams

__all__ = ["SECTIONS"]

CACHED = 300
BATCH = 64
BATCH_BARS = {"bfloat16": 700, "int8": 1500}
"""Tokens a second aimed at, by precision."""


def _pairs(bench: Bench, usual: int) -> int:
    return bench.settings.pairs or usual


def _arm_summary(comparison: Comparison, arm: str) -> dict[str, Any]:
    ms = spread(comparison.ms_per_token(arm))
    return {
        "ms_per_token": ms.to_json(),
        "tokens_per_s": round(1e3 / ms.median, 1),
        "tokens_per_pass": round(comparison.tokens_per_pass(arm), 3),
        "first_token_s": spread([run.first_s for run in comparison.runs[arm]]).to_json(),
    }


def section_transformers(bench: Bench) -> Section:
    """Plain bf16 decoding against transformers' ``generate``, same weights, same precision."""
    theirs = TransformersArm(bench.checkpoint, torch.bfloat16)
    ours = bench.engine("bfloat16")
    params = bench.greedy(ignore_eos=True)
    runners: dict[str, Callable[[list[int]], Run]] = {
        "outrider": lambda ids: run_engine(ours, ids, params),
        "transformers": lambda ids: theirs.run(ids, bench.settings.tokens),
    }
    prompts = bench.mixed_prompts(_pairs(bench, 10))
    comparison = _alternate_runs(runners, prompts, title="plain against transformers")
    ratio = paired_ratio(comparison.ms_per_token("transformers"), comparison.ms_per_token("outrider"))
    return Section(
        name="transformers",
        title="plain bf16 decoding against transformers generate (eager, SDPA), one stream",
        bars=[Bar.of_ratio("plain bf16 against transformers generate", ratio, 2.0)],
        summary={arm: _arm_summary(comparison, arm) for arm in runners},
        notes=[f"equal outputs: {comparison.identical('outrider', 'transformers')} (bf16 ties part the others)"],
        raw=comparison.to_json(),
    )


def _alternate_runs(
    runners: dict[str, Callable[[list[int]], Run]], prompts: Sequence[tuple[Any, list[int]]], *, title: str
) -> Comparison:
    """One pair a prompt, arms taking turns; the first prompt is run once by each arm to warm up, uncounted."""
    comparison = Comparison(prompts=[], runs={})
    for run in runners.values():
        run(prompts[0][1])
    with progress_bar(title) as bar:
        for turn, (row, ids) in enumerate(bar.track(prompts)):
            comparison.prompts.append(row.id)
            for arm in alternate(list(runners), turn):
                comparison.runs.setdefault(arm, []).append(runners[arm](ids))
    return comparison


def section_passes(bench: Bench) -> Section:
    """One target pass against its rows, in every precision."""
    rounds = _pairs(bench, 30)
    rows = ROW_COUNTS if bench.settings.limit is None else (1, 8)
    bars, summary, raw = [], {}, {}
    for precision in ("bfloat16", "int8", "float32"):
        with progress_bar(f"passes, {precision}") as bar:
            task = bar.add_task("", total=rounds + 2)
            times = time_passes(
                bench.target(precision), rows, cached=CACHED, rounds=rounds, progress=lambda b=bar, t=task: b.advance(t)
            )
        ratios = {count: paired_ratio(times[count], times[1]) for count in rows}
        summary[precision] = {
            str(count): {"ms": spread(times[count]).to_json(), "ratio_to_one_row": ratios[count].to_json()}
            for count in rows
        }
        raw[precision] = {str(count): [round(ms, 3) for ms in times[count]] for count in rows}
        if precision == "bfloat16":
            bars.append(Bar.of_ratio("pass over 8 rows against 1 row, bf16", ratios[8], 1.35, at_least=False))
    title = f"one target pass against its rows, {CACHED} tokens cached"
    return Section(name="passes", title=title, bars=bars, summary=summary, raw=raw)


def _drafting(bench: Bench, group: str, drafters: Sequence[str], *, rounds: int, full: bool = False) -> Comparison:
    """Greedy runs of plain decoding and of each drafter. A round's engines remember nothing of earlier rounds."""
    return _rounds(bench, group, drafters, rounds=rounds, full=full, params_of=lambda turn: bench.greedy())


def _rounds(
    bench: Bench,
    group: str,
    drafters: Sequence[str],
    *,
    rounds: int,
    params_of: Callable[[int], SamplingParams],
    full: bool = False,
) -> Comparison:
    prompts = bench.prompts(group, full=full)
    comparison = Comparison(prompts=[], runs={})
    run_engine(bench.engine("bfloat16"), prompts[0][1], bench.greedy())
    with progress_bar(f"{group}: plain, {', '.join(drafters)}") as bar:
        task = bar.add_task("", total=rounds * len(prompts))
        for turn in range(rounds):
            engines = {name: bench.engine("bfloat16", name) for name in ("none", *drafters)}
            compare_engines(
                engines, prompts, params_of(turn), into=comparison, turn=turn, progress=lambda: bar.advance(task)
            )
    return comparison


def _drafting_section(
    comparison: Comparison, drafters: Sequence[str], *, name: str, title: str, limits: dict[str, float], pooled: bool
) -> Section:
    bars, summary = [], {"plain": _arm_summary(comparison, "none")}
    ratio_of = pooled_ratio if pooled else paired_ratio
    for drafter in drafters:
        plain_costs = comparison.costs("none", "none")
        ratio = ratio_of(plain_costs, comparison.costs(drafter, "none"))
        whole = pooled_ratio(comparison.walls("none"), comparison.walls(drafter))
        summary[drafter] = {
            **_arm_summary(comparison, drafter),
            "speed_up": ratio.to_json(),
            "speed_up_with_prompt": whole.to_json(),
            "outputs_equal_to_plain": comparison.identical(drafter, "none"),
        }
        if drafter in limits:
            bars.append(Bar.of_ratio(f"{drafter} against plain, {title}", ratio, limits[drafter]))
    return Section(name=name, title=title, bars=bars, summary=summary, raw=comparison.to_json())


def section_copy(bench: Bench) -> Section:
    """Suffix and n-gram drafts where the answer copies the prompt."""
    drafters = ("suffix", "ngram")
    comparison = _drafting(bench, "copy_heavy", drafters, rounds=_pairs(bench, 2))
    return _drafting_section(
        comparison, drafters, name="copy", title="copy-heavy prompts", limits={"suffix": 2.2}, pooled=True
    )


def section_spec_bench(bench: Bench) -> Section:
    """Suffix and n-gram drafts over Spec-Bench: the whole set with ``--full``, the subset otherwise."""
    drafters = ("suffix", "ngram")
    full = bench.settings.full
    comparison = _drafting(bench, "spec_bench", drafters, rounds=1, full=full)
    title = "all 480 Spec-Bench prompts" if full and bench.settings.limit is None else "Spec-Bench subset"
    section = _drafting_section(
        comparison, drafters, name="spec_bench", title=title, limits={"suffix": 1.5}, pooled=True
    )
    section.summary["by_category"] = _by_category(bench, comparison, drafters, full=full)
    return section


def _by_category(bench: Bench, comparison: Comparison, drafters: Sequence[str], *, full: bool) -> dict[str, Any]:
    category_of = {row.id: row.category for row, _ in bench.prompts("spec_bench", full=full)}
    table: dict[str, Any] = {}
    for category in dict.fromkeys(category_of.values()):
        part = comparison.part([id for id in comparison.prompts if category_of[id] == category])
        table[category] = {
            drafter: {
                "tokens_per_pass": round(part.tokens_per_pass(drafter), 3),
                "speed_up": pooled_ratio(part.costs("none", "none"), part.costs(drafter, "none")).to_json(),
            }
            for drafter in drafters
        }
    return table


def section_prose(bench: Bench) -> Section:
    """Free prose at temperature 1, where drafts hardly ever fit: speculation must not make it slower."""
    drafters = ("ngram", "suffix")
    seed = bench.settings.seed

    def params_of(turn: int) -> SamplingParams:
        """The same seed for all arms, so that all write the same text; another one in each round."""
        return SamplingParams(temperature=1.0, max_tokens=bench.settings.tokens, seed=seed + turn)

    rounds = _pairs(bench, 3)
    comparison = _rounds(bench, "prose", drafters, rounds=rounds, params_of=params_of)
    limits = dict.fromkeys(drafters, 0.97)
    title = "free prose at temperature 1"
    return _drafting_section(comparison, drafters, name="prose", title=title, limits=limits, pooled=False)


def section_int8(bench: Bench) -> Section:
    """Plain decoding in int8 against bf16, at least 20 alternating pairs."""
    engines = {precision: bench.engine(precision) for precision in ("int8", "bfloat16")}
    params = bench.greedy(ignore_eos=True)
    runners: dict[str, Callable[[list[int]], Run]] = {
        precision: (lambda ids, engine=engine: run_engine(engine, ids, params)) for precision, engine in engines.items()
    }
    comparison = _alternate_runs(runners, bench.mixed_prompts(_pairs(bench, 20)), title="int8 against bf16")
    ratio = paired_ratio(comparison.ms_per_token("bfloat16"), comparison.ms_per_token("int8"))
    return Section(
        name="int8",
        title="plain decoding, int8 against bf16, one stream",
        bars=[Bar.of_ratio("plain int8 against plain bf16", ratio, 1.0)],
        summary={precision: _arm_summary(comparison, precision) for precision in engines},
        raw=comparison.to_json(),
    )


def section_batch(bench: Bench) -> Section:
    """Plain decoding of 64 sequences at once: tokens a second of passes over all of them, prompts not counted."""
    size = BATCH if bench.settings.limit is None else bench.settings.limit
    prompts = [ids for _, ids in bench.mixed_prompts(size)]
    rates: dict[str, list[float]] = {precision: [] for precision in BATCH_BARS}
    roofs: dict[str, list[float]] = {precision: [] for precision in BATCH_BARS}
    repeats = _pairs(bench, 3)
    context = sum(map(len, prompts)) / size + bench.settings.tokens / 2
    with progress_bar(f"plain batch of {size}") as bar:
        for _ in bar.track(range(repeats)):
            for precision, each in rates.items():
                each.append(_batch_rate(bench.engine(precision, batch=size), prompts, bench.greedy(ignore_eos=True)))
                roofs[precision] += _reading_roof(bench.target(precision), size, context)
    found = {precision: spread(each) for precision, each in rates.items()}
    bars = [
        Bar(
            name=f"plain {precision}, {size} sequences, decode passes only",
            value=found[precision].median,
            limit=limit,
            unit="tokens/s",
            pairs=repeats,
        )
        for precision, limit in BATCH_BARS.items()
    ]
    return Section(
        name="batch",
        title=f"batched plain decoding, {size} sequences",
        bars=bars,
        summary={
            precision: {"tokens_per_s": each.to_json()}
            | ({"reading_roof": spread(roofs[precision]).to_json()} if roofs[precision] else {})
            for precision, each in found.items()
        },
        raw={precision: [round(rate, 1) for rate in each] for precision, each in rates.items()},
    )


def _reading_roof(target: LoadedTarget, num_sequences: int, context: float) -> list[float]:
    """Tokens a second if a pass did nothing but read its weights, and the keys and values of ``context`` tokens a sequence.

    At the rate at which the weights are read now. Nothing where the target cannot time that.
    """
    if not isinstance(target, NativeTarget):
        return []
    begun = time.perf_counter()
    for _ in range(5):
        target.stream_weights()
    bytes_per_s = 5 * target.num_weight_bytes() / (time.perf_counter() - begun)
    config = target.config
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_width * torch.bfloat16.itemsize * context
    return [num_sequences * bytes_per_s / (target.num_weight_bytes() + num_sequences * cached)]


def _batch_rate(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> float:
    """Tokens a second of the passes in which all sequences decode: not of those that read prompts, nor of the tail.

    Prompts are read in chunks, so some sequences decode while others are still being read.
    """
    for ids in prompts:
        engine.submit(ids, params)
    tokens, seconds, started = 0, 0.0, set[str]()
    while engine.has_work:
        is_reading, begun = len(started) < len(prompts), time.perf_counter()
        events = engine.step()
        started |= {event.id for event in events}
        if not is_reading and len(events) == len(prompts):
            tokens += sum(len(event.token_ids) for event in events)
            seconds += time.perf_counter() - begun
    assert tokens, "the sequences never ran together"
    return tokens / seconds


def section_start(bench: Bench) -> Section:
    """Peak memory and the time from process start to the first token, each in fresh processes."""
    bench.checkpoint  # noqa: B018 - the model is on disk before any clock starts
    [(_, ids)] = bench.mixed_prompts(1)
    repeats = _pairs(bench, 5)
    shots: dict[str, list[dict[str, float]]] = {}
    with progress_bar("fresh processes") as bar:
        for _ in bar.track(range(repeats)):
            for precision in ("bfloat16", "int8", "float32"):
                shots.setdefault(precision, []).append(_one_shot(bench, ids, precision))
    seconds = {precision: spread([shot["start_s"] for shot in each]) for precision, each in shots.items()}
    excess = {precision: spread([shot["excess_mb"] for shot in each]) for precision, each in shots.items()}
    bars = [
        Bar(
            name=f"peak memory beyond weights and cache, {precision}",
            value=excess[precision].median,
            limit=500,
            at_least=False,
            unit="MB",
            pairs=repeats,
        )
        for precision in shots
    ]
    bars.append(
        Bar(
            name="process start to first token, bf16",
            value=seconds["bfloat16"].median,
            limit=6,
            at_least=False,
            unit="s",
            pairs=repeats,
        )
    )
    summary = {
        precision: {"start_s": seconds[precision].to_json(), "excess_mb": excess[precision].to_json(), "last": each[-1]}
        for precision, each in shots.items()
    }
    notes = ["files lie in the page cache after the first start; a cold disk adds its own reading time"]
    title = "memory and start, fresh processes"
    return Section(name="start", title=title, bars=bars, summary=summary, notes=notes, raw={"shots": shots})


def _one_shot(bench: Bench, ids: Sequence[int], precision: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.one_shot", "--model", bench.settings.model, "--dtype", precision]
    command += ["--backend", "pytorch" if precision == "float32" else bench.settings.backend]
    started_at = time.time()
    done = subprocess.run(
        [*command, "--tokens", str(bench.settings.tokens)],
        input=json.dumps(list(ids)),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode != 0:
        raise RuntimeError(f"benchmarks.one_shot failed: {done.stderr.strip().splitlines()[-1:]}")
    shot = json.loads(done.stdout.strip().splitlines()[-1])
    needed = shot["weight_bytes"] + shot["cache_bytes"]
    return {
        "start_s": round(shot["first_token_at"] - started_at, 3),
        "load_s": round(shot["loaded_at"] - started_at, 3),
        "imported_peak_mb": round(shot["imported_peak_bytes"] / 1e6, 1),
        "loaded_peak_mb": round(shot["loaded_peak_bytes"] / 1e6, 1),
        "peak_mb": round(shot["peak_rss_bytes"] / 1e6, 1),
        "weights_mb": round(shot["weight_bytes"] / 1e6, 1),
        "cache_mb": round(shot["cache_bytes"] / 1e6, 1),
        "excess_mb": round((shot["peak_rss_bytes"] - needed) / 1e6, 1),
    }


SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "transformers": section_transformers,
    "passes": section_passes,
    "copy": section_copy,
    "spec_bench": section_spec_bench,
    "prose": section_prose,
    "int8": section_int8,
    "batch": section_batch,
    "start": section_start,
    "drafts": section_drafts,
}
