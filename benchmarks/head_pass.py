"""Milliseconds of an EAGLE-3 head's passes, native and in PyTorch, with random weights of a target's shape.

python -m benchmarks.head_pass                             # the default target, 8192 draft tokens, 256 entries
python -m benchmarks.head_pass --rows 4 --sequences 1

``catch_up`` is the pass over two kept tokens of each sequence, ``level`` the pass over so many nodes of each; both with the
search for the likeliest tokens. All paths are interleaved, one round after the other.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.device import Placement
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.eagle_native import NativeEntries
from outrider.drafters.eagle_native_head import NativeHead
from outrider.drafters.eagle_pass import EaglePass
from outrider.drafters.eagle_reader import EagleReader
from outrider.drafters.eagle_walk import TorchEntries
from outrider.models.load import load_checkpoint
from outrider.native.library import open_context, requested_kernels

NEW_TOKENS = 2
Times = dict[str, list[float]]


class Arm:
    """One way to run the head, with as many sequences as are measured."""

    def __init__(self, name: str, head: EagleHead, given: argparse.Namespace) -> None:
        self.name = name
        path, precision = name.split()
        placement = Placement(device=torch.device("cpu"), precision="int8" if precision == "int8" else "bfloat16")
        self._width = max(given.rows)
        if path == "pytorch":
            packed: EaglePass | NativeHead = EaglePass(head, placement)
            self._reader = EagleReader(TorchEntries(packed), window=1 << 16)
        else:
            packed = NativeHead(head, placement.precision, open_context(requested_kernels(), given.threads))
            self._reader = EagleReader(NativeEntries(packed), window=1 << 16)
        self.megabytes = packed.num_weight_bytes() / 1e6
        self._tap_width = head.config.num_taps * head.config.target_hidden_size
        self._texts = [list(range(5, 6 + given.entries)) for _ in range(max(given.sequences))]
        for sequence in range(len(self._texts)):
            self._reader.open(sequence)
            self._reader.absorb(sequence, 0, self._taps(given.entries))

    def _taps(self, count: int) -> Tensor:
        return torch.randn(count, self._tap_width).bfloat16()

    def round(self, num_sequences: int, num_rows: int, times: dict[str, Times]) -> None:
        """One draft of one level below the root."""
        texts = self._texts[:num_sequences]
        found = times[f"{self.name}, {num_sequences} x {num_rows}"]
        for sequence, text in enumerate(texts):
            self._reader.absorb(sequence, len(text) - 1, self._taps(NEW_TOKENS))
            text += [7] * NEW_TOKENS
        begun = time.perf_counter()
        walk = self._reader.catch_up(list(enumerate(texts)), levels=1, width=self._width)
        walk.best()
        found["catch_up"].append((time.perf_counter() - begun) * 1e3)
        tokens, parents = [list(range(num_rows))] * num_sequences, [[0] * num_rows] * num_sequences
        begun = time.perf_counter()
        walk.step(tokens, parents)
        walk.best()
        found["level"].append((time.perf_counter() - begun) * 1e3)


@torch.inference_mode()
def measure(arms: Sequence[Arm], given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median milliseconds of each arm and shape."""
    shapes = [(sequences, rows) for sequences in given.sequences for rows in given.rows]
    names = [f"{arm.name}, {sequences} x {rows}" for arm in arms for sequences, rows in shapes]
    times: dict[str, Times] = {name: {"catch_up": [], "level": []} for name in names}
    order = [(arm, *shape) for arm in arms for shape in shapes]
    for index in range(given.repeats + 1):
        random.shuffle(order)
        for arm, sequences, rows in order:
            arm.round(sequences, rows, times)
        if index == 0:  # first touches of memory
            times.update({name: {"catch_up": [], "level": []} for name in names})
    return {name: {part: sorted(values)[len(values) // 2] for part, values in times[name].items()} for name in names}


def main() -> None:
    """Print one JSON line for each arm and shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--entries", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--arms", nargs="+", default=["pytorch bfloat16", "native bfloat16", "native int8"])
    given = parser.parse_args()
    torch.set_num_threads(1)  # as the engine does beside the native pool
    checkpoint = load_checkpoint(given.target)
    head = EagleHead(EagleConfig.for_target(checkpoint.config, draft_vocab_size=given.draft_vocab))
    head.initialise(list(range(given.draft_vocab)), seed=0)
    head.attach_embedding(checkpoint.tensor("model.embed_tokens.weight"))
    arms = [Arm(name, head, given) for name in given.arms]
    for name, found in measure(arms, given).items():
        arm = next(arm for arm in arms if name.startswith(arm.name))
        print(json.dumps({"arm": name, "threads": given.threads, "megabytes": arm.megabytes, **found}))


if __name__ == "__main__":
    main()
