"""What each precision costs in fidelity: perplexity, and the divergence of its law from float32's, on one text.

All precisions read the same tokens in the same chunks, side by side, so that only one chunk's logits are in memory.
The divergence is KL(float32 || precision) in nats, averaged over positions: perplexity alone hides errors that happen to
help. The text is ours (``data/perplexity.txt``): fiction, letters, figures, a recipe, a little code.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.provenance import describe_run
from outrider.device import PRECISIONS, resolve_placement
from outrider.models.base import LoadedTarget, PackedRows
from outrider.models.checkpoint import Checkpoint
from outrider.models.grid import GROUP_WIDTHS
from outrider.models.load import build_target, load_checkpoint

ROOT = Path(__file__).parent
TEXT = ROOT / "data" / "perplexity.txt"
CHUNK = 128
NOTE = (
    "*) The linear weights of this GGUF are on the Q4_1 grid already, so int4 holds them exactly and loses only "
    "what rounding the rows and the LM head costs. int4-g128 rounds them a second time; a model that was trained in more "
    "bits would lose more in int4 than is shown here."
)


@dataclass(slots=True)
class Tally:
    """What one precision has shown so far."""

    surprise: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    num_agreed: int = 0

    def add(self, logits_RV: Tensor, reference_RV: Tensor, next_tokens: Sequence[int]) -> None:
        """Count rows: log-laws of this precision and of the reference, and the tokens that follow (one fewer at the end)."""
        kl_R = (reference_RV.exp() * (reference_RV - logits_RV)).sum(dim=-1)
        self.divergence += kl_R.tolist()
        self.num_agreed += int((logits_RV.argmax(-1) == reference_RV.argmax(-1)).sum())
        targets = torch.tensor(next_tokens)
        self.surprise += (-logits_RV[: len(next_tokens)].gather(1, targets.unsqueeze(1)).squeeze(1)).tolist()

    def summary(self) -> dict[str, float]:
        """Means over positions."""
        count = len(self.divergence)
        worst = sorted(self.divergence)[math.ceil(0.99 * count) - 1]
        return {
            "perplexity": math.exp(sum(self.surprise) / len(self.surprise)),
            "kl_nats": max(0.0, sum(self.divergence) / count),
            "kl_nats_99th_percentile": max(0.0, worst),
            "same_best_token": self.num_agreed / count,
        }


class Reader:
    """A target that reads one text from the start."""

    def __init__(self, target: LoadedTarget) -> None:
        self.target = target
        self._cache = target.new_cache()
        self._slot = self._cache.allocate(1)

    def read(self, tokens: Sequence[int], start: int) -> Tensor:
        """Log-probabilities behind each of the tokens, ``[R, V]``."""
        rows = PackedRows.pack([tokens], slots=[self._slot], starts=[start], device=self.target.spec.device)
        return self.target.forward(rows, self._cache).logits_RV.log_softmax(dim=-1)


def measure(
    checkpoint: Checkpoint, tokens: Sequence[int], precisions: Sequence[str], backend: str
) -> list[dict[str, Any]]:
    """All precisions against float32, which is read too if it is not among them."""
    reference = Reader(build_target(checkpoint, resolve_placement("float32", "cpu")))
    readers = {name: _reader(checkpoint, name, backend, reference) for name in precisions}
    tallies = {name: Tally() for name in precisions}
    for start, chunk, following in _chunks(tokens):
        exact = reference.read(chunk, start)
        for name, reader in readers.items():
            tallies[name].add(exact if reader is reference else reader.read(chunk, start), exact, following)
    return [
        {
            "precision": name,
            "path": reader.target.spec.path,
            "weight_bytes": reader.target.num_weight_bytes(),
            **tallies[name].summary(),
            **({"note": NOTE} if name in GROUP_WIDTHS else {}),
        }
        for name, reader in readers.items()
    ]


def _reader(checkpoint: Checkpoint, precision: str, backend: str, reference: Reader) -> Reader:
    if precision == "float32":
        return reference
    return Reader(build_target(checkpoint, resolve_placement(precision, "cpu"), backend=backend))


def _chunks(tokens: Sequence[int]) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
    for start in range(0, len(tokens), CHUNK):
        yield start, tokens[start : start + CHUNK], tokens[start + 1 : start + CHUNK + 1]


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| precision | path | MB a pass | perplexity | KL to float32, nats | 99th percentile | same best token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results:
        mark = "*" if "note" in row else ""
        lines.append(
            f"| {row['precision']}{mark} | {row['path']} | {row['weight_bytes'] / 1e6:.1f} | {row['perplexity']:.3f} "
            f"| {row['kl_nats']:.5f} | {row['kl_nats_99th_percentile']:.4f} | {row['same_best_token']:.1%} |"
        )
    return "\n".join(lines)


@torch.inference_mode()
def main() -> int:
    """Measure, print one table, write one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perplexity", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="alias, file or folder")
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--backend", default="auto", choices=["auto", "native", "pytorch"])
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file; default: the one in data/")
    parser.add_argument("--limit", type=int, help="read this many tokens only")
    parser.add_argument("--out", type=Path, help="JSON file; default: a new one in results/")
    args = parser.parse_args()
    checkpoint = load_checkpoint(args.model)
    if checkpoint.tokenizer is None:
        parser.error(f"{args.model} has no tokenizer")
    tokens = checkpoint.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.limit]
    if len(tokens) < 2:
        parser.error("give a text, and a limit, of two tokens or more")
    run = describe_run("benchmarks.perplexity", [f"--model={args.model}", f"--limit={args.limit}"])
    results = measure(checkpoint, tokens, args.precision, args.backend)
    print(
        f"{checkpoint.name} ({checkpoint.note}), {len(tokens)} tokens of {args.text.name}\n\n{table(results)}\n\n{NOTE}"
    )
    out = args.out or ROOT / "results" / f"perplexity-{datetime.now(UTC):%Y-%m-%dT%H%M%S}.json"
    out.write_text(json.dumps({"run": run, "num_tokens": len(tokens), "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
