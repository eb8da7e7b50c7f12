"""What the acceptance scenarios are made of, whoever runs them: prompts, sampling fields, drafters, and the test of a law."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    "joint",
    "per_position",
    "permutation_test",
    "prompt_rows",
]

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


def permutation_test(left: Counter[Any], right: Counter[Any], *, rounds: int = 2000) -> float:
    """p-value of a two-sample test: how often a random split of all outcomes differs at least as much (G statistic)."""
    pool = [cell for counts in (left, right) for cell in sorted(counts, key=repr) for _ in range(counts[cell])]
    cells = {cell: index for index, cell in enumerate(sorted(set(pool), key=repr))}
    labels = torch.tensor([cells[cell] for cell in pool])
    size = sum(left.values())
    generator = torch.Generator().manual_seed(0)

    def statistic(order: torch.Tensor) -> float:
        one = torch.bincount(labels[order[:size]], minlength=len(cells)).double()
        two = torch.bincount(labels[order[size:]], minlength=len(cells)).double()
        share = size / len(pool)
        both = one + two
        return float(2 * (torch.xlogy(one, one / (both * share)) + torch.xlogy(two, two / (both * (1 - share)))).sum())

    seen = statistic(torch.arange(len(pool)))
    larger = sum(statistic(torch.randperm(len(pool), generator=generator)) >= seen for _ in range(rounds))
    return (larger + 1) / (rounds + 1)


def joint(outputs: Iterable[tuple[int, ...]]) -> Counter[Any]:
    """Cells: the first six tokens together (at most 64 of them where two tokens are left at each position)."""
    return Counter(output[:6] for output in outputs)


def per_position(outputs: Sequence[tuple[int, ...]]) -> Counter[Any]:
    """Cells: tokens two and three together, rare ones pooled. The first comes from prefill, where nothing is drafted."""
    pairs = Counter(output[1:3] for output in outputs)
    common = {cell for cell, _ in pairs.most_common(15)}
    firsts = Counter(output[1] for output in outputs)
    frequent = {token for token, _ in firsts.most_common(15)}
    counts: Counter[Any] = Counter()
    for output in outputs:
        pair = output[1:3]
        counts[pair if pair in common else (output[1],) if output[1] in frequent else ()] += 1
    return counts
