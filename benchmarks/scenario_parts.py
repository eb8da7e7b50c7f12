"""What the acceptance scenarios are made of, whoever runs them: prompts, sampling fields, drafters, and the test of a law."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from outrider import SamplingParams

__all__ = [
    "COPY_CHAT",
    "DRAFTERS",
    "HELLO_CHAT",
    "LAWS",
    "LAW_PARAMS",
    "ODD_PROMPTS",
    "OPEN_CHAT",
    "PENALTIES",
    "REPEATING",
    "ROBOT",
    "STOP_STRINGS",
    "TREE",
    "WEATHER",
    "cells_of",
    "joint",
    "per_position",
    "permutation_test",
    "prompt_rows",
]

Outputs = Sequence[tuple[int, ...]]
"""Token ids, as many of each output."""
Cells = tuple[Hashable, ...]
"""The cell of an outcome in each column of a test."""

DATA = Path(__file__).parent / "data" / "scenario_prompts.jsonl"
DRAFTERS = ("ngram", "suffix", "slice:10", "random")
"""A lookup, a suffix tree, a slice of the target itself, and a model that knows nothing."""
TREE = "slice:10:depth=4,width=4,num_nodes=12"
LAWS = ("top_k 2", "top_p 0.9", "no cut")
"""How S2 cuts the law that it draws from."""
LAW_PARAMS: Mapping[str, SamplingParams] = {
    "top_k 2": SamplingParams(temperature=1.3, top_k=2, max_tokens=8, ignore_eos=True),
    "top_p 0.9": SamplingParams(temperature=1.3, top_p=0.9, max_tokens=8, ignore_eos=True),
    "no cut": SamplingParams(temperature=1.3, max_tokens=8, ignore_eos=True),
}
WEATHER, REPEATING = "The weather today is", "the sea the sea the sea the"
"""Prompts of S2; the second one for drafters that look text up."""
ROBOT = "A robot may not injure a human being"
OPEN_CHAT = [{"role": "user", "content": "Write the first sentences of a story about the sea."}]
COPY_CHAT = [{"role": "user", "content": "Repeat exactly, 5 times: I will never miss any tokens."}]
HELLO_CHAT = [{"role": "user", "content": "Repeat the word hello many times: hello"}]
PENALTIES: Mapping[str, tuple[float, float, float]] = {
    "frequency_penalty": (1.5, 0.0, -1.5),
    "presence_penalty": (1.5, 0.0, -1.5),
    "repetition_penalty": (1.5, 1.0, 0.7),
}
"""Much, none, and the opposite."""
STOP_STRINGS = ("miss any", "never", "ken", "s. I", ".")
"""Of the answer to :data:`COPY_CHAT`: across tokens, a whole token, inside one."""
ODD_PROMPTS: list[Any] = [
    "", " ", "a", "\n", "<|im_end|>", [], [{"role": "assistant", "content": "Yes"}],
    [{"role": "user", "content": None}], "one two three", "You are", "word " * 500, [0], [2], "é ﷽ 👩‍👩‍👧",
]  # fmt: skip


def prompt_rows(per_category: int) -> list[dict[str, Any]]:
    """Chats of S1: so many of each of its categories."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if int(row["id"].rsplit("-", 1)[1]) < per_category]


def permutation_test(left: Sequence[Cells], right: Sequence[Cells], *, rounds: int = 2000) -> float:
    """p-value of a two-sample test: how often a random split of all outcomes differs at least as much.

    Args:
        left, right: outcomes, as :func:`joint` or :func:`per_position` sorts them into cells, both in one call.
        rounds: random splits.

    Returns:
        The share of splits, this one counted, with at least its G statistic, summed over the columns.
    """
    pool = [*left, *right]
    columns: list[dict[Hashable, int]] = [{} for _ in pool[0]]
    labels = [[column.setdefault(cell, len(column)) for column, cell in zip(columns, row, strict=True)] for row in pool]
    offsets = [0, *accumulate(map(len, columns))]
    labels_NC = torch.tensor(labels) + torch.tensor(offsets[:-1])
    both = torch.bincount(labels_NC.flatten(), minlength=offsets[-1]).double()
    share = len(left) / len(pool)
    generator = torch.Generator().manual_seed(0)

    def statistic(order: torch.Tensor) -> float:
        one = torch.bincount(labels_NC[order[: len(left)]].flatten(), minlength=offsets[-1]).double()
        two = both - one
        return float(2 * (torch.xlogy(one, one / (both * share)) + torch.xlogy(two, two / (both * (1 - share)))).sum())

    seen = statistic(torch.arange(len(pool)))
    larger = sum(statistic(torch.randperm(len(pool), generator=generator)) >= seen - 1e-9 for _ in range(rounds))
    return (larger + 1) / (rounds + 1)


def cells_of(params: SamplingParams, left: Outputs, right: Outputs) -> tuple[list[Cells], list[Cells]]:
    """Two samples of outputs in the same cells, for :func:`permutation_test`."""
    sort = joint if params.top_k == 2 else per_position
    cells = sort([*left, *right])
    return cells[: len(left)], cells[len(left) :]


def joint(outputs: Outputs) -> list[Cells]:
    """One cell each: the first six tokens together (at most 64 of them where two tokens are left at each position)."""
    return [(output[:6],) for output in outputs]


def per_position(outputs: Outputs) -> list[Cells]:
    """A column for each position but the first (it comes from prefill, where nothing is drafted), and one for the second
    and third together. Of each column the 15 likeliest outcomes *of all outputs given* are cells, the others one cell.

    Both samples of a test must be sorted in one call: cells chosen within a sample are those in which it happens to be rich.
    """
    rows = [(*((token,) for token in output[1:]), output[1:3]) for output in outputs]
    commons = [{cell for cell, _ in Counter(column).most_common(15)} for column in zip(*rows, strict=True)]
    return [tuple(cell if cell in common else () for cell, common in zip(row, commons, strict=True)) for row in rows]
