"""A head beside a target whose weights have changed under it: is that noticed, and does the output stay the target's?

Every matrix of the target gets noise of so many per cent of its root mean square (``--share``), as a careless conversion, a
further fine-tuning or a damaged copy would leave it. Then, on the same requests:

* the doctor examines the head beside the target as it is and as it was changed, and once more with the fingerprint taken out of
  the head's folder, so that only the recorded statistics of hidden states are left to notice it by;
* greedy and seeded outputs with the head are compared with plain decoding of the *changed* target, token by token.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.arms import MODEL, Bench, Settings
from benchmarks.peers.__main__ import by_turns
from benchmarks.prompts import add_prompt_options
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, wide_console, write_json
from outrider.audit.doctor.case import Case
from outrider.audit.doctor.examine import examine
from outrider.audit.doctor.report import DoctorReport
from outrider.audit.identity import audit_identity
from outrider.device import resolve_placement
from outrider.drafters.build import make_drafter
from outrider.drafters.head_folder import read_head, save_head
from outrider.errors import OutriderError
from outrider.models.base import LoadedTarget
from outrider.models.checkpoint import Checkpoint, MemoryTensors
from outrider.models.fingerprint import TensorBytes, fingerprint
from outrider.models.load import build_target
from outrider.sampling.params import SamplingParams

TEMPERATURE = 0.8


def perturbed(checkpoint: Checkpoint, share: float, *, seed: int = 0) -> Checkpoint:
    """The same model with noise on every matrix, and the fingerprint that its weights now have.

    Args:
        checkpoint: the model. share: standard deviation of the noise over the matrix's root mean square.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in checkpoint.tensor_names():
        tensor = checkpoint.tensor(name)
        if tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            tensor = tensor + share * tensor.float().square().mean().sqrt().to(tensor.dtype) * noise
        tensors[name] = tensor
    rows = [
        TensorBytes(
            name=name,
            dtype=str(tensor.dtype),
            shape=tuple(tensor.shape),
            data=tensor.contiguous().view(torch.uint8).flatten().numpy(),
        )
        for name, tensor in tensors.items()
    ]
    return dataclasses.replace(
        checkpoint,
        name=f"{checkpoint.name}, {share:.0%} noise",
        fingerprint=fingerprint(checkpoint.config, rows),
        tensors=MemoryTensors(tensors),
    )


def without_fingerprint(head: Path, out: Path) -> Path:
    """A copy of a head that does not say which target it was made for."""
    found = read_head(head)
    save_head(out, found.head, dataclasses.replace(found.info, target_fingerprint=""), dtype=torch.bfloat16)
    return out


def shown(report: DoctorReport) -> dict[str, Any]:
    """What the doctor said: the verdict, and the findings that are neither clear nor unchecked; the target's, always."""
    findings = [f for f in report.findings if f.status not in ("clear", "not checked") or f.cause == "checkpoint"]
    told = [{key: getattr(f, key) for key in ("cause", "status", "title", "evidence", "remedy")} for f in findings]
    return {"verdict": report.verdict, "acceptance": report.acceptance, "findings": told}


def identity(target: LoadedTarget, head: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    """Outputs with the head against plain ones, greedy and seeded."""
    greedy = SamplingParams(max_tokens=max_tokens)
    report = audit_identity(
        target,
        {str(index): prompt for index, prompt in enumerate(prompts)},
        drafters={"head": lambda: make_drafter(str(head), target)},
        num_draft_tokens=[4],
        sampling={
            "greedy": greedy,
            f"temperature {TEMPERATURE:g}, seeded": dataclasses.replace(greedy, temperature=TEMPERATURE, seed=1),
        },
    )
    return report.to_json()


def _run(args: argparse.Namespace) -> list[dict[str, Any]]:
    bench = Bench(Settings(model=args.model, traffic=args.traffic))
    rows = by_turns([row for row, _ in bench.prompts("spec_bench")])[: args.prompts]
    ids = {row.id: prompt for row, prompt in bench.prompts("spec_bench")}
    prompts = [ids[row.id] for row in rows]
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        nameless = without_fingerprint(args.head, Path(scratch) / args.head.resolve().name)
        for share in (0.0, *args.share):
            checkpoint = perturbed(bench.checkpoint, share) if share else bench.checkpoint
            target = build_target(checkpoint, resolve_placement(args.dtype, "cpu"))
            told = {"named": args.head, "no fingerprint": nameless}
            results.append(
                {
                    "share": share,
                    "fingerprint": target.spec.fingerprint,
                    "doctor": {
                        name: shown(_examined(target, head, prompts, args.tokens)) for name, head in told.items()
                    },
                    "identity": identity(target, args.head, prompts, args.tokens),
                }
            )
    return results


def _examined(target: LoadedTarget, head: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> DoctorReport:
    params = SamplingParams(max_tokens=max_tokens)
    return examine(Case(target=target, draft=str(head), prompts=prompts, params=params, is_timed=False))


def print_results(results: Sequence[Mapping[str, Any]]) -> None:
    """One row a target and head's folder."""
    table = Table(title="a target that changed under its head", title_justify="left")
    for column in ("noise", "head's folder", "checkpoint", "evidence", "outputs equal to plain"):
        table.add_column(column)
    for each in results:
        equal = ", ".join(f"{arm['num_identical']} of {arm['num_outputs']}" for arm in each["identity"]["arms"])
        for name, told in each["doctor"].items():
            found = next(finding for finding in told["findings"] if finding["cause"] == "checkpoint")
            table.add_row(f"{each['share']:.0%}", name, found["status"], found["evidence"], equal)
    wide_console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Examine and compare; status 1 if a change went unnoticed or an output changed."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    try:
        results = _run(args)
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_json(
        args.out, {"kind": "perturbed", **describe_run("benchmarks.perturbed_target", arguments), "results": results}
    )
    print_results(results)
    print(f"result: {args.out}")
    return 0 if all(_is_right(each) for each in results) else 1


def _is_right(result: Mapping[str, Any]) -> bool:
    [found] = [f for f in result["doctor"]["named"]["findings"] if f["cause"] == "checkpoint"]
    is_noticed = found["status"] in ("seen", "noted")
    return bool(is_noticed == (result["share"] > 0) and result["identity"]["is_lossless"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perturbed_target", description=__doc__)
    add_prompt_options(parser)
    parser.add_argument("head", type=Path, help="folder of a head")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--share", type=float, nargs="+", default=[0.05], help="noise over root mean square")
    parser.add_argument("--prompts", type=int, default=12, help="first prompts of Spec-Bench, its tasks in turn")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--out", type=Path, default=RESULTS / "perturbed.json")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
