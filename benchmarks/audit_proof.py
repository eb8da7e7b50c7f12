"""Proofs of the audits on a real model: every planted fault is caught, and no sound drafter is accused.

``faults`` plants each fault in the running engine (what ``outrider audit calibration --self-test`` does, a line of the record
for each audit, so that a long run can be cut off and goes on). ``drafters`` audits sound drafters: greedy and seeded output
by identity, fresh samples by calibration, with ``top_p`` and penalties.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from benchmarks.sources import read_jsonl
from outrider import EngineConfig, SamplingParams, load_target, make_drafter
from outrider.audit.calibration import CalibrationSettings, audit_calibration
from outrider.audit.identity import audit_identity
from outrider.audit.selftest import audit_plan, plans_of
from outrider.audit.sources import EngineSource
from outrider.drafters.base import Drafter
from outrider.drafters.lm import LMDrafter
from outrider.models.base import LoadedTarget

__all__ = ["short_prompts"]

MAX_CHARACTERS = 500
"""Longer prompts cost reading and show nothing that short ones do not."""
PENALTIES = {"repetition_penalty": 1.15, "presence_penalty": 0.3, "frequency_penalty": 0.2}
SAMPLED = {
    "temperature 0.8, top_p 0.95, penalties": {"temperature": 0.8, "top_p": 0.95, **PENALTIES},
    "temperature 1.3, top_p 0.9, penalties": {"temperature": 1.3, "top_p": 0.9, **PENALTIES},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 1.3, top_p 0.9": {"temperature": 1.3, "top_p": 0.9},
}
FIXED: dict[str, dict[str, float]] = {
    "greedy": {},
    "greedy, penalties": PENALTIES,
    "seed 1, temperature 0.8, top_p 0.95": {"seed": 1, **SAMPLED["temperature 0.8, top_p 0.95"]},
    "seed 1, temperature 1.3, top_p 0.9, penalties": {"seed": 1, **SAMPLED["temperature 1.3, top_p 0.9, penalties"]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What all audits of a run share."""

    target: LoadedTarget
    prompts: dict[str, list[int]]
    num_tokens: int
    max_tokens: int

    def params(self, fields: dict[str, float]) -> SamplingParams:
        """Sampling fields of one audit."""
        return replace(SamplingParams(max_tokens=self.max_tokens), **fields)  # type: ignore[arg-type]


def short_prompts(path: Path, number: int) -> list[dict[str, Any]]:
    """Rows of chats of one short question, spread evenly over the file."""
    rows = [row for row in read_jsonl(path.read_bytes(), path.name) if row.get("messages") and not row.get("tools")]
    short = [row for row in rows if sum(len(message["content"]) for message in row["messages"]) < MAX_CHARACTERS]
    return short[:: max(1, len(short) // number)][:number]


def split_arm(text: str) -> tuple[str, int]:
    """``NAME@K`` is a drafter with its number of draft tokens.

    Raises:
        ValueError: no number.
    """
    name, _, number = text.rpartition("@")
    if not name or not number.isdigit():
        raise ValueError(f"arm {text!r} is not NAME@K: give for example suffix@8")
    return name, int(number)


def maker(spec: str, target: LoadedTarget) -> Callable[[], Drafter]:
    """Fresh drafters of one kind; a draft model's weights are read once."""
    first = make_drafter(spec, target)
    assert first is not None, "none drafts nothing, so there is nothing to audit"
    if isinstance(first, LMDrafter):
        size = target.spec.vocab_size
        return lambda: LMDrafter(first.model, name=first.name, tree=first.tree, vocab_size=size)

    def make() -> Drafter:
        drafter = make_drafter(spec, target)
        assert drafter is not None, "the same name made one before"
        return drafter

    return make


def fault_rows(proof: Proof, arms: Sequence[str], known: set[str]) -> Iterator[dict[str, Any]]:
    """One row for each planted fault, and for the sound engine beside them."""
    spec, num_draft_tokens = split_arm(arms[0])
    make = maker(spec, proof.target)
    for plan in reversed(plans_of()):  # faults first: they are soon caught, and the sound engine never is
        key = f"{plan.title} {plan.fields}"
        if key in known:
            continue
        begun = time.perf_counter()
        row = audit_plan(
            proof.target,
            proof.prompts,
            plan=plan,
            make_drafter=make,
            params=proof.params(SAMPLED["temperature 0.8, top_p 0.95"]),
            config=EngineConfig(num_draft_tokens=num_draft_tokens, schedule="fixed"),
            settings=CalibrationSettings(num_tokens=proof.num_tokens),
            on_progress=functools.partial(_say, plan.title),
        )
        yield {"key": key, **asdict(row), "drafter": arms[0], "seconds": round(time.perf_counter() - begun)}


def drafter_rows(proof: Proof, arms: Sequence[str], known: set[str]) -> Iterator[dict[str, Any]]:
    """One row for each drafter and kind of sampling."""
    fixed, sampled = list(FIXED), list(SAMPLED)
    for sampling in (*fixed[:1], *sampled[:2], *fixed[1:], *sampled[2:]):  # one of each temperature first
        for arm in arms:
            key = f"{arm} {sampling}"
            if key in known:
                continue
            begun = time.perf_counter()
            found = _identity(proof, arm, sampling) if sampling in FIXED else _calibration(proof, arm, sampling)
            shown = {"key": key, "drafter": arm, "sampling": sampling}
            yield {**shown, **found, "seconds": round(time.perf_counter() - begun)}


def _identity(proof: Proof, arm: str, sampling: str) -> dict[str, Any]:
    spec, num_draft_tokens = split_arm(arm)
    report = audit_identity(
        proof.target,
        proof.prompts,
        drafters={spec: maker(spec, proof.target)},
        num_draft_tokens=[num_draft_tokens],
        sampling={sampling: proof.params(FIXED[sampling])},
        config=EngineConfig(max_batch_size=16),
    )
    [found] = report.arms
    wanted = ("verdict", "num_outputs", "num_identical", "num_tokens", "drafted", "accepted")
    return {"kind": "identity", **{name: getattr(found, name) for name in wanted}}


def _calibration(proof: Proof, arm: str, sampling: str) -> dict[str, Any]:
    spec, num_draft_tokens = split_arm(arm)
    make = maker(spec, proof.target)
    params = proof.params(SAMPLED[sampling])
    source = EngineSource(
        proof.target,
        drafter=make(),
        config=EngineConfig(num_draft_tokens=num_draft_tokens, schedule="fixed"),
        params=params,
        noise=np.random.default_rng([0, 2]),
    )
    report = audit_calibration(
        proof.target,
        proof.prompts,
        source=source,
        params=params,
        make_drafter=make,
        settings=CalibrationSettings(num_tokens=proof.num_tokens),
        on_progress=functools.partial(_say, f"{arm}, {sampling}"),
    )
    stats = source.speculation
    return {
        "kind": "calibration",
        "null": report.null,
        "verdict": report.verdict,
        "num_tokens": report.tokens,
        "evidence": report.evidence,
        "outside": report.num_outside,
        "cause": report.cause,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
    }


def _say(title: str, line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {title}: {line}", file=sys.stderr, flush=True)


ROWS = {"faults": fault_rows, "drafters": drafter_rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Audit, append each row to the record, and write the result; exit status 1 if a row is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_proof", description=__doc__)
    parser.add_argument("what", choices=list(ROWS))
    parser.add_argument("--traffic", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True, help="JSON Lines, continued if it is there")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arms", nargs="+", default=["slice:20@3"], help="drafters as NAME@K; faults: the first")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8000, help="most tokens of one audit of calibration")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    run = describe_run("benchmarks.audit_proof", list(sys.argv[1:] if argv is None else argv))
    target = load_target(args.model, dtype=args.dtype)
    assert target.tokenizer is not None, "the model of the benchmarks has one"
    encode = target.tokenizer.encode_chat
    prompts = {row["id"]: encode(row["messages"]) for row in short_prompts(args.traffic, args.prompts)}
    proof = Proof(target=target, prompts=prompts, num_tokens=args.tokens, max_tokens=args.max_tokens)
    rows: list[dict[str, Any]] = read_jsonl(args.record.read_bytes(), args.record.name) if args.record.exists() else []
    result = {"what": args.what, "prompts": len(prompts), "rows": rows, "run": run}
    _keep(args.out, result)
    for row in ROWS[args.what](proof, args.arms, {row["key"] for row in rows}):
        rows.append(row)
        with args.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        _keep(args.out, result)
    return int(not all(_is_right(row) for row in rows))


def _keep(out: Path | None, result: dict[str, Any]) -> None:
    """After every row, so that a long run that was cut off leaves what it found."""
    if out is not None:
        write_json(out, result)


def _is_right(row: dict[str, Any]) -> bool:
    if "fault" in row:
        return bool(row["is_caught"]) == (row["fault"] != "none")
    return row["verdict"] in ("identical", "tie", "calibrated")


if __name__ == "__main__":
    sys.exit(main())
