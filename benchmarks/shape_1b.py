"""A model of Llama 3.2 1B's shape with random weights: this library's passes and plain decoding beside llama.cpp's.

Weights are drawn anew, so nothing is downloaded but llama.cpp itself (``python -m benchmarks.peers --setup --only llamacpp``
builds it). They are written as a BF16 GGUF, which ``llama-quantize`` turns into Q8_0; time does not depend on their values.
Every turn runs, in an order drawn anew: for each precision some passes over one row and over eight at 256 cached tokens,
beside reading the weights once; our greedy decoding from an empty context; and ``llama-bench`` over as many tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.native_pass import LLAMA_1B, Bench, CheapWeights, timed
from benchmarks.peers.installs import NotAvailable, run_logged
from benchmarks.peers.setups import LlamaCpp
from benchmarks.provenance import describe_run
from benchmarks.report import RESULTS, Bar, write_json
from benchmarks.stats import alternate, paired_ratio, spread
from outrider.device import Placement, Precision, one_torch_thread
from outrider.errors import DataError, OutriderError
from outrider.models.base import PackedRows
from outrider.models.config import LlamaConfig
from outrider.models.fetch import cache_dir
from outrider.models.native import NativeTarget
from outrider.native.library import Unavailable

__all__ = ["decoding_rate", "result_of", "tensor_names", "write_gguf"]

CACHED = 256
PASSES = ("stream", "native 1", "native 8")
MAX_BYTES_PER_WEIGHT = 3.2
"""Two in BF16, 1.06 in Q8_0, and what the files say of themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A precision of ours, llama.cpp's of the same width, and the bars: pass over reading, eight rows over one."""

    precision: Precision
    weights: str
    pass_bar: float
    rows_bar: float


PAIRS = (
    Pair(precision="bfloat16", weights="BF16", pass_bar=1.2, rows_bar=1.12),
    Pair(precision="int8", weights="Q8_0", pass_bar=1.3, rows_bar=1.2),
)
Turn = dict[str, Any]
"""Of one turn: precision -> {"ours", "theirs": tokens/s, "passes": {name: [milliseconds]}}."""


def tensor_names(config: LlamaConfig) -> Iterator[tuple[str, str]]:
    """All tensors of a tied Llama decoder: Hugging Face name, GGUF name."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm"]
    parts += ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    stems = [f"model.layers.{index}.{part}" for index in range(config.num_layers) for part in parts]
    for stem in ("model.embed_tokens", *stems, "model.norm"):
        found = names.get_name(stem)
        assert found is not None, stem
        yield f"{stem}.weight", f"{found}.weight"


def write_gguf(source: CheapWeights, path: Path) -> None:
    """The source's matrices in BF16, norms in float32, one tensor in memory at a time; without a tokenizer.

    Heads are not reordered for GGUF's rotary layout: this file is for timing.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    _add_config(writer, source.config)
    bf16 = gguf.GGMLQuantizationType.BF16
    names = list(tensor_names(source.config))
    for name, theirs in names:
        shape = source.shape(name)
        kind, dtype = (None, np.dtype(np.float32)) if len(shape) == 1 else (bf16, np.dtype(np.int16))
        writer.add_tensor_info(theirs, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, _ in names:
        weight = source.tensor(name)
        is_matrix = weight.dim() == 2
        writer.write_tensor_data((weight.bfloat16().view(torch.int16) if is_matrix else weight.float()).numpy())
    writer.close()


def _add_config(writer: Any, config: LlamaConfig) -> None:
    import gguf

    writer.add_name("random weights")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("none")


def decoding_rate(target: NativeTarget, num_tokens: int) -> float:
    """Tokens/s of greedy decoding from an empty context: one pass a token, each fed to the next."""
    cache = target.new_cache()
    slot = cache.allocate(num_tokens)
    token, device = 1, target.spec.device
    begun = time.perf_counter()
    for position in range(num_tokens):
        rows = PackedRows.pack([[token]], slots=[slot], starts=[position], device=device)
        token = int(target.forward_greedy(rows, cache).tokens_R[0])
    return num_tokens / (time.perf_counter() - begun)


def llama_rate(binary: Path, gguf: Path, *, num_tokens: int, threads: int) -> float:
    """Tokens/s of ``llama-bench`` from an empty context, after the warm-up that it does itself.

    Raises:
        NotAvailable: it failed.
    """
    command = [binary, "-m", gguf, "-n", num_tokens, "-p", 0, "-t", threads, "-r", 1, "-o", "json"]
    shown = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if shown.returncode:
        last = (shown.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotAvailable(f"llama-bench ended with status {shown.returncode}: {last[:200]}")
    [entry] = json.loads(shown.stdout)
    return float(entry["avg_ts"])


class Shape:
    """Both precisions of the model in memory, and llama.cpp's files of them.

    Args:
        source: of the weights; build: llama.cpp; folder: for its files.
        threads: of each engine.
    """

    def __init__(self, source: CheapWeights, build: LlamaCpp, folder: Path, *, threads: int) -> None:
        self._build, self._folder, self._threads = build, folder, threads
        self._write(source)
        self.targets = {pair.precision: self._load(source, pair.precision) for pair in PAIRS}
        self._benches = {name: Bench(target, cached=CACHED, row_counts=(1, 8)) for name, target in self.targets.items()}

    def _write(self, source: CheapWeights) -> None:
        self._build.server()
        _say("writing the GGUF files")
        write_gguf(source, self._file("BF16"))
        quantize = [self._build.binary("llama-quantize"), self._file("BF16"), self._file("Q8_0"), "Q8_0"]
        run_logged([*quantize, str(self._threads)], self._folder / "quantize.log")

    def _file(self, weights: str) -> Path:
        return self._folder / f"shape_1b.{weights}.gguf"

    def _load(self, source: CheapWeights, precision: Precision) -> NativeTarget:
        _say(f"packing {precision}")
        placement = Placement(device=torch.device("cpu"), precision=precision)
        return NativeTarget(source, placement, num_threads=self._threads)

    def turn(self, number: int, *, num_tokens: int, num_passes: int) -> Turn:
        """Every arm once, the passes ``num_passes`` times."""
        found: Turn = {pair.precision: {} for pair in PAIRS}
        bench = self._build.binary("llama-bench")

        def theirs(weights: str) -> float:
            return llama_rate(bench, self._file(weights), num_tokens=num_tokens, threads=self._threads)

        arms: dict[tuple[str, str], Callable[[], Any]] = {}
        for pair in PAIRS:
            name, target = pair.precision, self.targets[pair.precision]
            arms[name, "passes"] = lambda name=name: self._passes(name, number, num_passes)
            arms[name, "ours"] = lambda target=target: decoding_rate(target, num_tokens)
            arms[name, "theirs"] = lambda weights=pair.weights: theirs(weights)
        order = alternate([" ".join(key) for key in arms], number)
        for precision, what in (key.split(" ") for key in order):
            found[precision][what] = arms[precision, what]()
        return found

    def _passes(self, precision: str, number: int, count: int) -> dict[str, list[float]]:
        target, bench = self.targets[precision], self._benches[precision]
        calls: dict[str, Callable[[], Any]] = {
            "stream": target.stream_weights,
            "native 1": lambda: bench.run(1, target.forward),
            "native 8": lambda: bench.run(8, target.forward),
        }
        draw, times = random.Random(number), {name: [] for name in PASSES}
        for _ in range(count):
            for name in draw.sample(PASSES, len(PASSES)):
                times[name].append(timed(calls[name]))
        return times


def result_of(turns: Sequence[Turn], weight_bytes: Mapping[str, int]) -> dict[str, Any]:
    """Rates, times of passes, and the bars, from the turns.

    Args:
        turns: all that count.
        weight_bytes: what a pass reads, by precision.
    """
    results, bars = [], []
    for pair in PAIRS:
        each = [turn[pair.precision] for turn in turns]
        times = {name: [ms for one in each for ms in one["passes"][name]] for name in PASSES}
        ours, theirs = [one["ours"] for one in each], [one["theirs"] for one in each]
        ratio, title = paired_ratio(ours, theirs), f"{pair.precision}, shape of Llama 3.2 1B"
        one_row = paired_ratio(times["native 1"], times["stream"])
        eight_rows = paired_ratio(times["native 8"], times["native 1"])
        bars += [
            Bar.of_ratio(f"{title}: 1 row over reading the weights", one_row, pair.pass_bar, at_least=False),
            Bar.of_ratio(f"{title}: 8 rows over 1", eight_rows, pair.rows_bar, at_least=False),
            Bar.of_ratio(f"{title}: decoding over llama.cpp {pair.weights}", ratio, 1.0),
        ]
        results.append(
            {
                "precision": pair.precision,
                "weights": pair.weights,
                "weight_bytes": weight_bytes[pair.precision],
                "times_ms": {name: spread(values).to_json() for name, values in times.items()},
                "tokens_per_s": spread(ours).to_json(),
                "llamacpp_tokens_per_s": spread(theirs).to_json(),
                "one_row_over_stream": one_row.to_json(),
                "eight_rows_over_one": eight_rows.to_json(),
                "ratio": ratio.to_json(),
            }
        )
    return {"results": results, "bars": [bar.to_json() for bar in bars], "raw": list(turns)}


def run(args: argparse.Namespace, folder: Path, threads: int) -> dict[str, Any]:
    """Write, load, warm up with a turn that does not count, measure.

    Raises:
        DataError: too little room on the disk. NotAvailable: llama.cpp cannot be had. Unavailable: the native path cannot run.
    """
    source = CheapWeights(config=replace(LLAMA_1B, num_layers=args.layers), seed=0)
    needed = sum(int(np.prod(source.shape(name))) for name, _ in tensor_names(source.config)) * MAX_BYTES_PER_WEIGHT
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(f"{folder} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} are needed; name another --work")
    shape = Shape(source, LlamaCpp(args.root.resolve() / "llamacpp", jobs=args.jobs), folder, threads=threads)
    turns = []
    with one_torch_thread(True):
        for number in range(args.turns + 1):
            turn = shape.turn(number, num_tokens=args.tokens, num_passes=args.passes)
            _say(f"turn {number} of {args.turns}{'' if number else ', to warm up'}: {_shown(turn)}")
            turns += [turn] if number else []
    return result_of(turns, {name: target.num_weight_bytes() for name, target in shape.targets.items()})


def _shown(turn: Turn) -> str:
    return "; ".join(f"{name} {each['ours']:.2f} against {each['theirs']:.2f}" for name, each in turn.items())


def print_result(result: Mapping[str, Any]) -> None:
    """Rates and passes, then the bars."""
    for each in result["results"]:
        times, ours, theirs = each["times_ms"], each["tokens_per_s"], each["llamacpp_tokens_per_s"]
        print(
            f"{each['precision']}: reading {times['stream']['median']:.1f} ms, 1 row {times['native 1']['median']:.1f}, "
            f"8 rows {times['native 8']['median']:.1f}; {ours['median']:.2f} tokens/s ({ours['low']:.2f} to "
            f"{ours['high']:.2f}), llama.cpp {each['weights']} {theirs['median']:.2f} ({theirs['low']:.2f} to "
            f"{theirs['high']:.2f})"
        )
    for bar in result["bars"]:
        limit = f"{'>=' if bar['at_least'] else '<='} {bar['limit']:g}"
        print(
            f"{bar['name']}: {bar['value']:.2f} ({bar['low']:.2f} to {bar['high']:.2f}), bar {limit}: {bar['verdict']}"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write the result; the model files go unless they are to be kept."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    head = {"kind": "shape_1b", **describe_run("benchmarks.shape_1b", arguments)}
    head["settings"] = {
        **{name: getattr(args, name) for name in ("layers", "turns", "tokens", "passes")},
        "threads": threads,
    }
    args.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="shape_1b-", dir=args.work))
    try:
        result = run(args, folder, threads)
    except (OutriderError, NotAvailable, Unavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    write_json(args.out, {**head, **result})
    print_result(result)
    print(f"result: {args.out}" + (f"\nmodel files: {folder}" if args.keep else ""))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shape_1b", description=__doc__)
    parser.add_argument(
        "--root", type=Path, default=cache_dir() / "peers", help="folder with (or for) llama.cpp's build"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for 4 GB of model files")
    parser.add_argument("--keep", action="store_true", help="leave the model files there")
    parser.add_argument("--turns", type=int, default=8, help="turns that count, after one that warms up")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded in a turn, by each arm")
    parser.add_argument("--passes", type=int, default=3, help="passes of each kind in a turn")
    parser.add_argument("--layers", type=int, default=LLAMA_1B.num_layers, help="fewer layers, for a quick look")
    parser.add_argument("--threads", type=int, help="of each engine (default: the processors of this process)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--out", type=Path, default=RESULTS / "shape_1b.json", help="result file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
