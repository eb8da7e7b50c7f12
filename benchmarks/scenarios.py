"""Black-box acceptance scenarios on the real model, each for four drafters; in float32 if nothing else is asked for.

``python -m benchmarks.scenarios`` runs them at full size (hours in float32 on two cores) and records each outcome in
``benchmarks/results/scenarios.json``; the test suite runs the same functions small. Each scenario states what must hold
and raises :class:`AssertionError` where it does not; what it saw is returned as JSON values.

S1 greedy identity, S2 sampled law, S3 seeds, S4 penalties, S5 log-probabilities, S6 limits and choices, S7 stop tokens,
S11 odd prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from benchmarks.scenario_parts import (
    COPY_CHAT,
    DRAFTERS,
    HELLO_CHAT,
    LAW_PARAMS,
    LAWS,
    ODD_PROMPTS,
    OPEN_CHAT,
    PENALTIES,
    REPEATING,
    ROBOT,
    STOP_STRINGS,
    TREE,
    WEATHER,
    cells_of,
    permutation_test,
    prompt_rows,
)
from outrider import Engine, EngineConfig, GenerationResult, SamplingParams, load_target, make_drafter
from outrider.audit.identity import audit_identity
from outrider.errors import PromptError
from outrider.metrics import SpeculationStats
from outrider.models.base import LoadedTarget

__all__ = ["DRAFTERS", "SCENARIOS", "Setup"]

RESULT = Path(__file__).parent / "results" / "scenarios.json"
_TOLERANCES = {"pytorch": 1e-4}
"""Logit gap below which a difference is a tie, by path; the native ones are allowed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Target, drafters, and how large a scenario is.

    Attributes:
        prompts_per_category, max_tokens, ks: size of S1.
        num_calls, laws: calls an arm of S2, and the cuts it tries; num_seeded_calls: those with a seed, call by call.
        few_ks, num_repeats, num_tokens: draft lengths of S3 and S4, calls with one seed of S3, output tokens of
            S4, S5 and S7; num_stop_strings: of S7.
        wrong_temperature: of S2's control that must be told from 1.3; few calls can only see a large error.
    """

    target: LoadedTarget
    drafters: Sequence[str] = DRAFTERS
    prompts_per_category: int = 10
    max_tokens: int = 96
    ks: Sequence[int] = (1, 2, 4, 8, 20)
    num_calls: int = 4000
    num_seeded_calls: int = 400
    wrong_temperature: float = 1.0
    few_ks: Sequence[int] = (1, 4, 8)
    num_tokens: int = 80
    num_repeats: int = 5
    num_stop_strings: int = 5
    laws: Sequence[str] = LAWS

    def engine(self, drafter: str = "none", *, k: int = 8, **settings: Any) -> Engine:
        """A fresh engine with a fixed draft length and no reuse of prefixes."""
        config = EngineConfig(num_draft_tokens=k, schedule="fixed", num_cached_prefixes=0, **settings)
        return Engine(self.target, drafter=make_drafter(drafter, self.target), config=config)

    def answers(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        drafter: str = "none",
        **more: Any,
    ) -> list[GenerationResult]:
        """Decode prompts with a fresh engine."""
        return self.engine(drafter, **more).generate(prompts, params)


def greedy_identity(setup: Setup) -> dict[str, Any]:
    """S1: greedy output is plain output, for every drafter, k and a tree; float32 differences only below 1e-4."""
    assert setup.target.tokenizer is not None
    rows = prompt_rows(setup.prompts_per_category)
    prompts = {row["id"]: setup.target.tokenizer.encode_chat(row["messages"]) for row in rows}
    sampling = {"greedy": SamplingParams(max_tokens=setup.max_tokens)}
    arms: list[dict[str, Any]] = []
    ties: list[dict[str, Any]] = []
    trees = (TREE,) if any(name.startswith("slice") for name in setup.drafters) else ()
    for names, ks in ((setup.drafters, setup.ks), *(((tree,), (4,)) for tree in trees)):
        report = audit_identity(
            setup.target,
            prompts,
            drafters={name: _maker(name, setup.target) for name in names},
            num_draft_tokens=ks,
            sampling=sampling,
            config=EngineConfig(max_batch_size=50, num_cached_prefixes=0),
            on_arm=_say,
        )
        found = report.to_json()
        assert report.is_lossless, found["differences"]
        assert report.control.tolerance <= _TOLERANCES.get(setup.target.spec.path, 0.0)
        arms += found["arms"]
        ties += found["differences"]
    return {"control": found["control"], "arms": arms, "ties": ties}


def sampled_law(setup: Setup) -> dict[str, Any]:
    """S2: sampled output has the law of plain sampling: call by call with seeds, in distribution without."""
    seeded = _seeded_calls(setup)
    prompt = WEATHER
    out: dict[str, Any] = {"seeded calls equal": seeded}
    for law in setup.laws:
        params = LAW_PARAMS[law]
        plain = _draw_many(setup, prompt, params, "none")
        wrong = _draw_many(setup, prompt, replace(params, temperature=setup.wrong_temperature), "slice:10")
        p_wrong = permutation_test(*cells_of(params, plain[0], wrong[0]))
        assert p_wrong <= 0.005, f"{law}: the test does not see a wrong temperature (p = {p_wrong})"
        out[f"{law}, wrong control"] = p_wrong
        for drafter in setup.drafters:
            text = prompt if drafter not in ("ngram", "suffix") else REPEATING
            base = plain if text == prompt else _draw_many(setup, text, params, "none")
            drawn = _draw_many(setup, text, params, drafter)
            assert drawn[1].drafted > 0, f"{law}, {drafter}: no drafts, the test is void"
            p = permutation_test(*cells_of(params, base[0], drawn[0]))
            out[f"{law}, {drafter}"] = {"p": p, "drafted": drawn[1].drafted, "accepted": drawn[1].accepted}
            assert p > 0.001, f"{law}, {drafter}: another law (p = {p})"
    return out


def seeds(setup: Setup) -> dict[str, Any]:
    """S3: a seed fixes the output, alone or in company; other seeds and no seed vary."""
    prompt = ROBOT
    params = SamplingParams(temperature=2.0, max_tokens=10, seed=42)
    [plain] = setup.answers([prompt], params)
    for drafter, k in itertools.product(setup.drafters, setup.few_ks):
        for _ in range(setup.num_repeats):
            [alone] = setup.answers([prompt], params, drafter, k=k)
            assert alone.token_ids == plain.token_ids, (drafter, k)
        crowd = [replace(params, seed=seed) for seed in range(1, 9)]
        mixed = setup.answers([prompt] * 9, [*crowd[:4], params, *crowd[4:]], drafter, k=k)
        assert mixed[4].token_ids == plain.token_ids, (drafter, k, "in company")
    others = setup.answers([prompt] * 10, [replace(params, seed=seed) for seed in range(43, 53)], setup.drafters[0])
    assert len({result.token_ids for result in others}) > 1
    unseeded = setup.answers([prompt] * 5, replace(params, seed=None), setup.drafters[0])
    assert len({result.token_ids for result in unseeded}) > 1
    return {"text": plain.text, "different seeds": len({result.token_ids for result in others})}


def penalties(setup: Setup) -> dict[str, Any]:
    """S4: penalties count draft tokens exactly, and only hurt the request that asked for them."""
    chat = HELLO_CHAT
    base = SamplingParams(max_tokens=min(48, setup.num_tokens))
    seen: dict[str, Any] = {}
    for name, choices in PENALTIES.items():
        each = [replace(base, **{name: value}) for value in choices]
        plain = [setup.answers([chat], params)[0].token_ids for params in each]
        assert plain[0] != plain[2], f"{name} has no effect"
        for drafter, k in itertools.product(setup.drafters, setup.few_ks):
            together = setup.answers([chat] * 3, each, drafter, k=k)
            assert [result.token_ids for result in together] == plain, (name, drafter, k)
        seen[name] = {str(value): len(ids) for value, ids in zip(choices, plain, strict=True)}
    return seen


def logprobs(setup: Setup) -> dict[str, Any]:
    """S5: one entry a token, equal to plain decoding's within 1e-3, the chosen token in its list."""
    worst = 0.0
    for params in (
        SamplingParams(max_tokens=setup.num_tokens, logprobs=3),
        SamplingParams(max_tokens=setup.num_tokens, logprobs=0),
        SamplingParams(max_tokens=setup.num_tokens, logprobs=3, temperature=0.8, seed=9),
        SamplingParams(
            max_tokens=setup.num_tokens // 2, logprobs=3, temperature=0.8, seed=9, logprobs_mode="processed", top_p=0.9
        ),
    ):
        [plain] = setup.answers([COPY_CHAT], params)
        for drafter in setup.drafters:
            [got] = setup.answers([COPY_CHAT], params, drafter)
            assert got.logprobs is not None and plain.logprobs is not None
            assert len(got.logprobs) == got.usage.completion_tokens
            assert got.token_ids == plain.token_ids
            for mine, theirs in zip(got.logprobs, plain.logprobs, strict=True):
                worst = max(worst, abs(mine.logprob - theirs.logprob))
                assert mine.token in [token for token, _ in mine.top]
            assert any(entry.logprob != 0.0 for entry in got.logprobs)
    assert worst < 1e-3, worst
    return {"largest difference": worst}


def limits_and_choices(setup: Setup) -> dict[str, Any]:
    """S6: max_tokens is exact for every value; n gives different choices."""
    [whole] = setup.answers([COPY_CHAT], SamplingParams(max_tokens=24, ignore_eos=True))
    for drafter in setup.drafters:
        each = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in range(1, 21)]
        for limit, result in enumerate(setup.answers([COPY_CHAT] * 20, each, drafter), start=1):
            assert result.token_ids == whole.token_ids[:limit], (drafter, limit)
            assert result.usage.completion_tokens == limit
            assert result.finish_reason == "length"
            assert whole.text.startswith(result.text.rstrip("\ufffd"))
    params = SamplingParams(max_tokens=24, temperature=0.8, n=3, seed=7)  # without a seed they might be equal by chance
    choices = setup.answers([OPEN_CHAT], params, setup.drafters[0])
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.token_ids for choice in choices}) > 1
    return {"choices": [choice.text for choice in choices]}


def stop_tokens(setup: Setup) -> dict[str, Any]:
    """S7: a stop token ends the output at every position of a run of accepted drafts; nothing later appears."""
    free = SamplingParams(max_tokens=max(18, setup.num_tokens // 2), ignore_eos=True)
    [whole] = setup.answers([COPY_CHAT], free)
    positions = [j for j in range(1, 19) if whole.token_ids[j - 1] not in whole.token_ids[: j - 1]]
    each = [replace(free, stop_token_ids=(whole.token_ids[j - 1],)) for j in positions]
    assert setup.target.tokenizer is not None
    for drafter in setup.drafters:
        for position, result in zip(positions, setup.answers([COPY_CHAT] * len(each), each, drafter), strict=True):
            assert result.token_ids == whole.token_ids[:position], (drafter, position)
            assert result.finish_reason == "stop"
            assert result.text == setup.target.tokenizer.decode(result.token_ids)
        late = replace(each[0], min_tokens=free.max_tokens - 10)
        assert setup.answers([COPY_CHAT], late, drafter)[0].token_ids == setup.answers([COPY_CHAT], late)[0].token_ids
        _stop_strings(setup, drafter)
    return {"positions": positions}


def odd_prompts(setup: Setup) -> dict[str, Any]:
    """S11: odd prompts give plain decoding's output or plain decoding's error, and the engine lives on."""
    params = SamplingParams(max_tokens=min(8, setup.num_tokens // 5))
    check = SamplingParams(max_tokens=2)
    seen: dict[str, str] = {}
    expected = [_outcome(setup.engine(), prompt, params) for prompt in ODD_PROMPTS]
    for drafter in setup.drafters:
        engine = setup.engine(drafter)
        [healthy] = engine.generate(["Two and two are"], check)
        for prompt, plain in zip(ODD_PROMPTS, expected, strict=True):
            assert _outcome(engine, prompt, params) == plain, (drafter, prompt)
            assert engine.generate(["Two and two are"], check)[0].token_ids == healthy.token_ids
            seen[repr(prompt)[:40]] = plain if isinstance(plain, str) else "answered"
    return seen


SMALL: dict[str, Any] = {
    "prompts_per_category": 2,
    "max_tokens": 16,
    "ks": (1, 8),
    "num_calls": 100,
    "num_seeded_calls": 10,
    "few_ks": (4,),
    "num_tokens": 24,
    "num_repeats": 2,
    "num_stop_strings": 2,
    "wrong_temperature": 0.2,
    "laws": ("top_k 2",),
}
"""Sizes of ``--small``."""

SCENARIOS: Mapping[str, Callable[[Setup], dict[str, Any]]] = {
    "S1": greedy_identity,
    "S2": sampled_law,
    "S3": seeds,
    "S4": penalties,
    "S5": logprobs,
    "S6": limits_and_choices,
    "S7": stop_tokens,
    "S11": odd_prompts,
}


def _seeded_calls(setup: Setup) -> int:
    """Calls with seed i must equal plain decoding's call by call."""
    params = SamplingParams(temperature=1.3, top_k=2, max_tokens=8)
    each = [replace(params, seed=seed) for seed in range(setup.num_seeded_calls)]
    prompts = [WEATHER] * len(each)
    plain = setup.answers(prompts, each)
    for drafter in setup.drafters:
        got = setup.answers(prompts, each, drafter, k=4)
        assert [r.token_ids for r in got] == [r.token_ids for r in plain], drafter
    return len(each) * len(setup.drafters)


def _draw_many(
    setup: Setup, prompt: str, params: SamplingParams, drafter: str
) -> tuple[list[tuple[int, ...]], SpeculationStats]:
    """``num_calls`` outputs without seeds, and how much was drafted for them."""
    _say(f"{setup.num_calls} calls, {drafter}, temperature {params.temperature}")
    choices = min(50, setup.num_calls)
    engine = setup.engine(drafter, k=4, max_batch_size=100)
    results = engine.generate([prompt] * (setup.num_calls // choices), replace(params, n=choices))
    return [r.token_ids for r in results], SpeculationStats.pooled(r.stats for r in results)


def _stop_strings(setup: Setup, drafter: str) -> None:
    """A stop string is cut out of the text wherever it ends, also inside a token and across tokens."""
    for stop in STOP_STRINGS[: setup.num_stop_strings]:
        params = SamplingParams(max_tokens=setup.num_tokens // 2, stop=(stop,))
        [plain], [got] = setup.answers([COPY_CHAT], params), setup.answers([COPY_CHAT], params, drafter)
        assert (got.text, got.token_ids, got.finish_reason) == (plain.text, plain.token_ids, plain.finish_reason)
        assert stop not in got.text


def _outcome(engine: Engine, prompt: Any, params: SamplingParams) -> tuple[int, ...] | str:
    try:
        return engine.generate([prompt], params)[0].token_ids
    except PromptError as error:
        return str(error)


def _maker(name: str, target: LoadedTarget) -> Callable[[], Any]:
    return lambda: make_drafter(name, target)


def _say(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


def main() -> int:
    """Run scenarios at full size and record what was seen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenarios", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), metavar="SPEC")
    parser.add_argument("--dtype", default="float32", help="precision of the target (default float32)")
    parser.add_argument("--calls", type=int, default=4000, help="calls an arm of S2 (default 4000)")
    parser.add_argument("--seeded-calls", type=int, default=400, help="calls of S2 with a seed (default 400)")
    parser.add_argument(
        "--laws", nargs="*", default=list(LAWS), choices=LAWS, help="cuts of S2 (default: all; none: seeds only)"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="output tokens of S1 (default 96)")
    parser.add_argument("--small", action="store_true", help="a tenth of the size: minutes instead of an hour")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    random.seed(0)
    failed = 0
    setup = Setup(
        target=load_target("smollm2-135m-instruct", dtype=args.dtype),
        drafters=args.drafters,
        num_calls=args.calls,
        num_seeded_calls=args.seeded_calls,
        laws=args.laws,
        max_tokens=args.max_tokens,
    )
    if args.small:
        setup = replace(setup, **SMALL)
    run = {**describe_run("benchmarks.scenarios", sys.argv[1:]), "path": setup.target.spec.path}
    for name in args.only:
        print(f"{name} {SCENARIOS[name].__doc__}", file=sys.stderr)
        began = time.perf_counter()
        try:
            seen, verdict = SCENARIOS[name](setup), "passed"
        except AssertionError as error:
            seen, verdict = {"error": str(error)}, "failed"
        seconds = round(time.perf_counter() - began, 1)
        entry = {"verdict": verdict, "seconds": seconds, "drafters": list(args.drafters), "run": run, "seen": seen}
        _record(args.output, ", ".join((name, args.dtype, *_subset(name, args))), entry)
        failed += verdict == "failed"
        print(f"{name} {verdict} in {seconds} s", flush=True)
    return int(failed > 0)


def _subset(name: str, args: argparse.Namespace) -> list[str]:
    """What an entry of only some drafters or laws is called, so that it stands beside those of others."""
    drafters = [] if tuple(args.drafters) == DRAFTERS else [" ".join(args.drafters)]
    laws = [] if name != "S2" or tuple(args.laws) == LAWS else [" ".join(args.laws) or "seeds"]
    return drafters + laws


def _record(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Put one outcome into the file, beside what earlier runs recorded."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**data, name: entry})


if __name__ == "__main__":
    raise SystemExit(main())
