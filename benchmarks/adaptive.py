"""Is the planner ever slower than plain decoding, and how close does it come to the best fixed draft length?

For each traffic mix and concurrency, arms take turns in slices of a few seconds: no drafter (``off``), a drafter that is
loaded and never asked (``idle``), fixed lengths, and the planner (``adaptive``). Every arm has an engine of its own over the same
weights and keeps its requests in flight from one of its slices to the next; as one request ends, the next of the mix is
submitted. Reading prompts counts, for all arms alike.

python -m benchmarks.adaptive --traffic DIR --draft auto:suffix,HEAD --out adaptive.json  # everything: hours on two cores
python -m benchmarks.adaptive --traffic DIR --draft auto:suffix,HEAD --out adaptive.json --resume          # and go on
python -m benchmarks.adaptive --mixes copy_heavy --concurrency 1 8 --slice-s 2 --pairs 2 --no-history    # a try

Bars: adaptive against off, pooled over concurrencies, mix by mix; no cell whose upper bound is below 0.97; adaptive against the
best fixed length (or off), which is chosen on half of the pairs and compared on the other half; idle against off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import MODEL, Bench, Settings
from benchmarks.prompts import add_prompt_options, encode, load_group
from benchmarks.provenance import describe_run
from benchmarks.report import HISTORY, RESULTS, Bar, append_history, print_table, write_json
from benchmarks.stats import alternate, paired_ratio, pooled_ratio
from outrider.device import Placement
from outrider.drafters.base import Drafter
from outrider.drafters.build import make_drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.models.base import LoadedTarget
from outrider.models.native import NativeTarget
from outrider.sampling.params import SamplingParams

CONCURRENCY = (1, 2, 4, 8, 16, 32)
FIXED = (2, 4, 8)
ARMS = ("off", "idle", *(f"k{k}" for k in FIXED), "adaptive")
LEAST_TO_OFF, LEAST_OF_A_CELL, LEAST_TO_BEST, LEAST_IDLE = 0.97, 0.97, 0.97, 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Traffic of one kind.

    Attributes:
        groups: of prompts. categories: of those, or all. temperature: of every request.
        has_random_head: drafts come from a head with random weights instead of ``--draft``.
    """

    groups: tuple[str, ...]
    categories: tuple[str, ...] = ()
    temperature: float = 0.0
    has_random_head: bool = False


MIXES = {
    "creative": Mix(groups=("prose",), temperature=1.0),
    "code": Mix(groups=("humaneval",)),
    "tool_calls": Mix(groups=("tool_calls",)),
    "copy_heavy": Mix(groups=("copy_heavy",)),
    "random_head": Mix(groups=("prose", "humaneval"), has_random_head=True),
}


@dataclass(slots=True, kw_only=True)
class Arm:
    """One way to decode, with its requests in flight.

    Attributes:
        tokens, seconds: of each slice.
    """

    engine: Engine
    prompts: Iterator[list[int]]
    params: SamplingParams
    in_flight: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, concurrency: int, slice_s: float) -> None:
        """One slice: steps until the time is up."""
        tokens, began = 0, time.perf_counter()
        while time.perf_counter() - began < slice_s:
            while self.in_flight < concurrency:
                self.engine.submit(next(self.prompts), self.params)
                self.in_flight += 1
            for event in self.engine.step():
                tokens += len(event.token_ids)
                self.in_flight -= event.result is not None
        self.tokens.append(tokens)
        self.seconds.append(time.perf_counter() - began)

    @property
    def ms_per_token(self) -> list[float]:
        """Milliseconds a token of each slice."""
        return [1e3 * s / max(1, n) for s, n in zip(self.seconds, self.tokens, strict=True)]


def random_head(target: LoadedTarget, *, draft_vocab: int = 8192) -> Drafter:
    """A head of the usual shape that knows nothing."""
    config = target.checkpoint.config  # type: ignore[attr-defined]
    head = EagleHead(EagleConfig.for_target(config, draft_vocab_size=min(draft_vocab, config.vocab_size)))
    head.initialise(list(range(min(draft_vocab, config.vocab_size))), seed=0)
    head.attach_embedding(target.checkpoint.tensor("model.embed_tokens.weight"))
    native = target if isinstance(target, NativeTarget) else None
    precision = "int8" if native is not None and target.placement.precision == "int8" else "bfloat16"
    placement = Placement(device=target.spec.device, precision=precision)
    return EagleDrafter(head, placement, name="random_head", context=None if native is None else native.context)


def make_arm(name: str, bench: Bench, mix: Mix, args: argparse.Namespace, concurrency: int) -> Arm:
    """An engine of its own; ``off``, ``idle``, ``k4``, ``adaptive``."""
    target = bench.target(args.precision)
    drafter = None
    if name != "off":
        drafter = random_head(target) if mix.has_random_head else make_drafter(args.draft, target)
    is_fixed = name.startswith("k")
    config = EngineConfig.from_dict(
        {
            "num_draft_tokens": int(name[1:]) if is_fixed else 0 if name == "idle" else max(FIXED),
            "schedule": "fixed" if is_fixed else "adaptive",
            "max_batch_size": concurrency,
            "num_cached_prefixes": 0,
        }
    )
    params = SamplingParams(temperature=mix.temperature, max_tokens=args.tokens)
    engine = Engine(target, drafter=drafter, config=config)
    return Arm(engine=engine, prompts=itertools.cycle(prompts_of(mix, bench)), params=params)


def prompts_of(mix: Mix, bench: Bench) -> list[list[int]]:
    """Token ids of the mix's prompts, its groups in turn."""
    rows = [row for group in mix.groups for row in load_group(group, traffic=bench.settings.traffic)]
    chosen = [row for row in rows if not mix.categories or row.category in mix.categories]
    return [encode(bench.checkpoint.tokenizer, row) for row in chosen[: bench.settings.limit]]


def measure_cell(bench: Bench, mix: str, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """All arms at one concurrency; the first slice of each warms up and does not count."""
    names = list(args.arms)
    arms = {name: make_arm(name, bench, MIXES[mix], args, concurrency) for name in names}
    for turn in range(args.pairs + 1):
        for name in alternate(names, turn):
            arms[name].run(concurrency, args.slice_s)
        print(f"{mix}, {concurrency} at a time: round {turn} of {args.pairs}", file=sys.stderr)
    cell: dict[str, Any] = {
        "mix": mix,
        "concurrency": concurrency,
        "ms_per_token": {name: [round(ms, 5) for ms in arm.ms_per_token[1:]] for name, arm in arms.items()},
    }
    if "adaptive" in arms:
        planner = arms["adaptive"].engine.planner
        log = [record.to_json() for record in list(planner.log.records)[-64:]]
        cell = {**cell, "planner": planner.snapshot(), "log": log}
    return cell


def bars_of(cells: Sequence[dict[str, Any]]) -> list[Bar]:
    """Speed of arms relative to one another: time of the one over time of the other for as many tokens."""
    bars: list[Bar] = []
    for mix in dict.fromkeys(cell["mix"] for cell in cells):
        mine = [cell["ms_per_token"] for cell in cells if cell["mix"] == mix]
        off, idle, ours = ([ms for cell in mine for ms in cell.get(arm, ())] for arm in ("off", "idle", "adaptive"))
        if off and ours:
            bars.append(Bar.of_ratio(f"{mix}: adaptive to off", paired_ratio(off, ours), LEAST_TO_OFF))
        if off and idle:
            bars.append(Bar.of_ratio(f"{mix}: idle to off", paired_ratio(off, idle), LEAST_IDLE))
        if ours and any(name.startswith("k") for name in mine[0]):
            best = [ms for cell in mine for ms in _best_fixed(cell)]
            held_out = [ms for cell in mine for ms in cell["adaptive"][1::2]]
            bars.append(Bar.of_ratio(f"{mix}: adaptive to best fixed", pooled_ratio(best, held_out), LEAST_TO_BEST))
    for cell in cells:
        if not {"off", "adaptive"} <= cell["ms_per_token"].keys():
            continue
        ratio = paired_ratio(cell["ms_per_token"]["off"], cell["ms_per_token"]["adaptive"])
        name = f"{cell['mix']}, {cell['concurrency']} at a time: adaptive to off"
        if ratio.high < LEAST_OF_A_CELL:
            bars.append(Bar.of_ratio(f"{name} (upper bound below {LEAST_OF_A_CELL})", ratio, LEAST_OF_A_CELL))
    return bars


def _best_fixed(cell: dict[str, list[float]]) -> list[float]:
    """The other half of the slices of the arm that is best on every second one."""
    names = [name for name in cell if name == "off" or name.startswith("k")]
    best = min(names, key=lambda name: sum(cell[name][0::2]))
    return cell[best][1::2]


def main(argv: list[str] | None = None) -> int:
    """Measure the chosen cells; the result file is whole after each of them."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.resume and args.out is None:
        parser.error("--resume goes on with --out FILE; name it")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    bench = Bench(
        Settings(model=args.model, backend=args.backend, tokens=args.tokens, traffic=args.traffic, limit=args.limit)
    )
    head = {"kind": "adaptive", **describe_run("benchmarks.adaptive", arguments), "settings": _settings(args)}
    out = args.out or RESULTS / f"adaptive-{head['started'].replace(':', '').replace('+0000', '')}.json"
    try:
        cells = earlier_cells(out, head["settings"]) if args.resume else []
        done = {(cell["mix"], cell["concurrency"]) for cell in cells}
        for mix, concurrency in itertools.product(args.mixes, args.concurrency):
            if (mix, concurrency) in done:
                continue
            cells.append(measure_cell(bench, mix, concurrency, args))
            write_json(out, {**head, "cells": cells})
    except (OutriderError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bars = [bar.to_json() for bar in bars_of(cells)]
    write_json(out, {**head, "cells": cells, "bars": bars})
    if not args.no_history:
        append_history(head, bars, result=out.name, path=HISTORY)
    print_table(bars, title=f"planner, {args.model}, {args.precision}, drafter {args.draft}")
    print(f"result: {out}")
    return 0


def earlier_cells(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells of a run that was cut off.

    Raises:
        ValueError: it was measured with other settings.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if name not in ("concurrency", "mixes") and found["settings"].get(name) != value:
            raise ValueError(f"{path} was measured with {name} {found['settings'].get(name)!r}, not {value!r}")
    cells: list[dict[str, Any]] = found["cells"]
    return cells


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("model", "backend", "precision", "tokens", "slice_s", "pairs", "arms", "concurrency", "mixes", "limit")
    return {**{name: getattr(args, name) for name in names}, "draft": Path(args.draft).name}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adaptive", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_prompt_options(parser)
    parser.add_argument("--model", default=MODEL, help="alias, folder or hub id of the target")
    parser.add_argument("--backend", choices=("auto", "native", "pytorch"), default="auto", help="who runs the passes")
    parser.add_argument("--precision", default="bfloat16", help="of the target")
    parser.add_argument("--draft", default="suffix", help="drafter of all mixes but random_head")
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), default=list(MIXES), metavar="MIX")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCY))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="which take turns")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens a request")
    parser.add_argument("--slice-s", type=float, default=20.0, help="seconds of a slice")
    parser.add_argument("--pairs", type=int, default=12, help="slices of each arm that count")
    parser.add_argument("--limit", type=int, help="first prompts of each mix only: for trying the script")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/, named by time)")
    parser.add_argument("--resume", action="store_true", help="leave out cells that --out holds already")
    parser.add_argument("--no-history", action="store_true", help="append no line to the history")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
