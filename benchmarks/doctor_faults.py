"""Faults planted in a real head on the real model: what does the doctor put first?

Copies of the head's folder are rewired, or their tensors changed, as wrong conversions leave them; some of them without the
record of hidden states, which would give the answer away. Other faults lie in the requests, the options or the target.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.audit_proof import short_prompts
from benchmarks.provenance import describe_run
from benchmarks.report import write_json
from benchmarks.sources import read_jsonl
from outrider import SamplingParams, load_target
from outrider.audit.doctor.case import Case
from outrider.audit.doctor.examine import examine
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import read_head, save_head
from outrider.models.base import LoadedTarget

TensorChange = Callable[[dict[str, Tensor]], None]
OTHER_LANGUAGE = (
    "Напиши короткий рассказ о море.",
    "Объясни простыми словами, почему небо голубое.",
    "Перечисли пять рек России и скажи, куда они впадают.",
    "Какие овощи можно хранить зимой и как?",
    "Переведи на русский: good morning, my friend.",
    "Напиши письмо соседу с просьбой полить цветы.",
    "Как приготовить борщ? Напиши по шагам.",
    "Чем отличается поезд от трамвая?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault.

    Attributes:
        name: short. causes: what may come out first; none of them: healthy.
        config: of the head, changed in both of its files. tensors: changes the weights.
        keeps_record: leave what was recorded at training in the folder.
        options: of the drafter. temperature: of the requests. dtype: of the target.
        requests: ``chats``, ``bare`` (the same without the template) or ``other language``.
        draft: another drafter altogether. is_timed: measure speed, too.
    """

    name: str
    causes: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    tensors: TensorChange | None = None
    keeps_record: bool = True
    options: str = ""
    temperature: float = 0.0
    dtype: str = "bfloat16"
    requests: str = "chats"
    draft: str = ""
    is_timed: bool = False


def as_ids(tensors: dict[str, Tensor]) -> None:
    """Ids where offsets belong."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def as_offsets_of_offsets(tensors: dict[str, Tensor]) -> None:
    """Offsets that somebody took for ids."""
    tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))


def drop_tensor(tensors: dict[str, Tensor]) -> None:
    """A tensor that got lost."""
    del tensors["midlayer.mlp.down_proj.weight"]


def random_tensor(name: str) -> TensorChange:
    """Random numbers of the same size in a tensor's place."""

    def change(tensors: dict[str, Tensor]) -> None:
        old = tensors[name].float()
        noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
        tensors[name] = (noise * old.square().mean().sqrt()).to(tensors[name].dtype)

    return change


FAULTS = (
    Fault(name="nothing", causes=()),
    Fault(
        name="layers one higher, no record",
        causes=("tap_layers",),
        config={"tap_layers": (3, 16, 28)},
        keeps_record=False,
    ),
    Fault(name="layers one lower", causes=("tap_layers",), config={"tap_layers": (1, 14, 26)}),
    Fault(name="layers guessed", causes=("tap_layers",), config={"tap_layers": (9, 20, 29)}),
    Fault(
        name="norm_before_residual on, no record",
        causes=("norm_flags",),
        config={"norm_before_residual": True},
        keeps_record=False,
    ),
    Fault(name="norm_output on, no record", causes=("norm_flags",), config={"norm_output": True}, keeps_record=False),
    Fault(name="vocabulary padded by 128", causes=("vocabulary",), config={"target_vocab_size": 49152 + 128}),
    Fault(name="ids in d2t", causes=("d2t",), tensors=as_ids),
    Fault(name="offsets of offsets in d2t", causes=("d2t",), tensors=as_offsets_of_offsets),
    Fault(name="a tensor is missing", causes=("tensors",), tensors=drop_tensor),
    Fault(name="fc.weight random", causes=("tensors",), tensors=random_tensor("fc.weight")),
    Fault(
        name="fc.weight random, no record", causes=("tensors",), tensors=random_tensor("fc.weight"), keeps_record=False
    ),
    Fault(
        name="lm_head.weight random, no record",
        causes=("tensors",),
        tensors=random_tensor("lm_head.weight"),
        keeps_record=False,
    ),
    Fault(name="window of 4", causes=("window",), options=":window=4"),
    Fault(name="temperature 1.3", causes=("temperature",), temperature=1.3),
    Fault(name="temperature 2", causes=("temperature",), temperature=2.0),
    Fault(name="requests without the chat template", causes=("template",), requests="bare"),
    Fault(name="another language", causes=("traffic",), requests="other language"),
    Fault(name="a slice of 29 of the 30 layers as drafter", causes=("cost",), draft="slice:29", is_timed=True),
    Fault(name="target in int4-g128", causes=("quantised_target",), dtype="int4-g128"),
)


def planted(fault: Fault, head: Path, work: Path) -> Path:
    """A copy of the head with the fault in it; the head itself if the fault lies elsewhere."""
    if not fault.config and fault.tensors is None and fault.keeps_record:
        return head
    out = work / fault.name.replace(" ", "_").replace(",", "")
    shutil.rmtree(out, ignore_errors=True)
    found = read_head(head)
    changed = EagleHead(replace(found.head.config, **fault.config))
    state = found.head.state_dict()
    size = changed.config.target_vocab_size
    state["t2d"] = torch.cat((state["t2d"], torch.zeros(size, dtype=torch.bool)))[:size]
    changed.load_state_dict(state)
    info = found.info if fault.keeps_record else replace(found.info, hidden_statistics={}, record={})
    save_head(out, changed, info)
    if fault.tensors is not None:
        _change_tensors(out / "model.safetensors", fault.tensors)
    return out


def _change_tensors(path: Path, change: TensorChange) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def case_of(
    fault: Fault, target: LoadedTarget, chats: Sequence[list[dict[str, Any]]], args: argparse.Namespace
) -> Case:
    """The examination of one fault."""
    assert target.tokenizer is not None, "the model of the benchmarks has one"
    tokenizer = target.tokenizer
    if fault.requests == "other language":
        chats = [[{"role": "user", "content": text}] for text in OTHER_LANGUAGE]
    rendered = [tokenizer.encode_chat(chat) for chat in chats]
    bare = [tokenizer.encode(str(chat[-1]["content"])) for chat in chats]
    is_bare = fault.requests == "bare"
    return Case(
        target=target,
        draft=(fault.draft or str(planted(fault, args.head, args.work))) + fault.options,
        prompts=bare if is_bare else rendered,
        params=SamplingParams(max_tokens=args.max_tokens, temperature=fault.temperature),
        renderings={"as chats": rendered} if is_bare else {},
        is_timed=fault.is_timed,
    )


def examined(
    fault: Fault, target: LoadedTarget, chats: Sequence[list[dict[str, Any]]], args: argparse.Namespace
) -> dict[str, Any]:
    """What the doctor said of one fault."""
    begun = time.perf_counter()
    report = examine(case_of(fault, target, chats, args))
    first = report.found[0] if report.found else None
    is_right = (first is None) if not fault.causes else first is not None and first.cause in fault.causes
    return {
        "fault": fault.name,
        "is_right": is_right,
        "first": None if first is None else {"cause": first.cause, "status": first.status, "title": first.title},
        "evidence": "" if first is None else first.evidence.replace(f"{args.work}/", ""),
        "others": [finding.cause for finding in report.found[1:]],
        "verdict": report.verdict,
        "acceptance": report.acceptance,
        "seconds": round(time.perf_counter() - begun),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Plant, examine, append to the record; exit status 1 if a fault did not come out first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor_faults", description=__doc__)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--traffic", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the copies")
    parser.add_argument("--record", type=Path, required=True, help="JSON Lines, continued if it is there")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--only", nargs="+", help="names of faults")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    run = describe_run("benchmarks.doctor_faults", list(sys.argv[1:] if argv is None else argv))
    args.work.mkdir(parents=True, exist_ok=True)
    chats = [row["messages"] for row in short_prompts(args.traffic, args.requests)]
    rows: list[dict[str, Any]] = read_jsonl(args.record.read_bytes(), args.record.name) if args.record.exists() else []
    targets: dict[str, LoadedTarget] = {}
    for fault in FAULTS:
        if fault.name in {row["fault"] for row in rows} or (args.only and fault.name not in args.only):
            continue
        if fault.dtype not in targets:
            targets[fault.dtype] = load_target(args.model, dtype=fault.dtype)
        rows.append(examined(fault, targets[fault.dtype], chats, args))
        with args.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        write_json(args.out, {"requests": len(chats), "max_tokens": args.max_tokens, "rows": rows, "run": run})
    return int(not all(row["is_right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
