"""The target's processed law in the order in which an engine applies its sampling fields.

Ours (vLLM's) runs through the very functions that the engine runs. Other engines' orders are chains of small stages over a
block of logits, written for reading, not for speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import ConfigError, nearest
from outrider.sampling.laws import process_logits
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.sampling.warp import warp_logits

__all__ = ["ORDERS", "History", "ProcessorOrder", "order_of", "warped_logits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorOrder:
    """An engine's order.

    Attributes:
        name: of the engine, or the stages as the user wrote them.
        stages: names of :data:`STAGES`, first to last; empty for the engine's own functions.
        repetition_counts_prompt: the repetition penalty looks at the prompt, too.
        counts_prompt: frequency and presence penalties look at the prompt, too.
        adds_first: frequency and presence penalties come before the repetition penalty.
        refused: fields that the engine does not know, or reads another way.
    """

    name: str
    stages: tuple[str, ...] = ()
    repetition_counts_prompt: bool = True
    counts_prompt: bool = False
    adds_first: bool = False
    refused: tuple[str, ...] = ()


ORDERS = {
    "vllm": ProcessorOrder(name="vllm"),
    "sglang": ProcessorOrder(
        name="sglang",
        stages=("penalties", "masks", "bias", "temperature", "top_k", "top_p", "min_p"),
        repetition_counts_prompt=False,
        adds_first=True,
    ),
    "llama.cpp": ProcessorOrder(
        name="llama.cpp",
        stages=("masks", "bias", "penalties", "top_k", "top_p", "min_p", "temperature"),
        counts_prompt=True,
        refused=("bad_words", "bad_words_token_ids", "min_tokens"),
    ),
    "transformers": ProcessorOrder(
        name="transformers",
        stages=("bias", "penalties", "masks", "temperature", "top_k", "top_p", "min_p"),
        refused=("frequency_penalty", "presence_penalty"),
    ),
    "tgi": ProcessorOrder(
        name="tgi",
        stages=("penalties", "temperature", "top_k", "top_p"),
        refused=(
            "frequency_penalty",
            "presence_penalty",
            "min_p",
            "logit_bias",
            "bad_words",
            "bad_words_token_ids",
            "min_tokens",
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What precedes each row of a block.

    Attributes:
        state: of the request, committed up to the block.
        prompt: its token ids.
        paths: output tokens of the block before each row.
    """

    state: SamplingState
    prompt: Sequence[int]
    paths: Sequence[Sequence[int]]


def order_of(name: str) -> ProcessorOrder:
    """An engine's order, or one written as stages: ``bias,penalties,temperature,top_p``.

    Raises:
        ConfigError: neither.
    """
    if name in ORDERS:
        return ORDERS[name]
    stages = tuple(part.strip() for part in name.split(","))
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or len(set(stages)) != len(stages):
        raise ConfigError(
            f"processor order {name!r} is unknown{nearest(name, ORDERS)}; allowed: {', '.join(ORDERS)}, "
            f"or stages joined by commas, each once: {', '.join(STAGES)}"
        )
    return ProcessorOrder(name=name, stages=stages)


def warped_logits(logits_TV: Tensor, history: History, order: ProcessorOrder) -> Tensor:
    """Logits of the processed law of each row, -inf where a token cannot come out.

    Args:
        logits_TV: raw logits of consecutive positions of one output; overwritten.
        history: what precedes them.
        order: how fields are applied.
    """
    params = history.state.params
    if not order.stages:
        logits_TV = process_logits(logits_TV, [history.state] * len(history.paths), history.paths)
        return warp_logits(logits_TV, [params] * len(history.paths))
    for stage in order.stages:
        logits_TV = STAGES[stage](logits_TV, history, params, order)
    return logits_TV


def _masks(logits_TV: Tensor, history: History, params: SamplingParams, order: ProcessorOrder) -> Tensor:
    for row, path in enumerate(history.paths):
        banned = sorted(history.state.banned_tokens(path))
        logits_TV[row, banned] = -math.inf
    return logits_TV


def _bias(logits_TV: Tensor, history: History, params: SamplingParams, order: ProcessorOrder) -> Tensor:
    for token, value in params.logit_bias.items():
        logits_TV[:, token] += value
    return logits_TV


def _penalties(logits_TV: Tensor, history: History, params: SamplingParams, order: ProcessorOrder) -> Tensor:
    if not params.has_penalties:
        return logits_TV
    in_prompt = Counter(history.prompt)
    for row, path in enumerate(history.paths):
        output = {token: n for token, n in history.state.seen_counts(path).items() if n > 0}
        seen = sorted({*output, *in_prompt} if order.repetition_counts_prompt else output)
        counts = Counter(output) + in_prompt if order.counts_prompt else Counter(output)
        steps: list[Callable[[Tensor], None]] = [
            lambda row_V, seen=seen: _repeat(row_V, seen, params.repetition_penalty),  # type: ignore[misc]
            lambda row_V, counts=counts: _subtract(row_V, counts, params),  # type: ignore[misc]
        ]
        for step in reversed(steps) if order.adds_first else steps:
            step(logits_TV[row])
    return logits_TV


def _repeat(row_V: Tensor, seen: Sequence[int], penalty: float) -> None:
    values = row_V[seen]
    row_V[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _subtract(row_V: Tensor, counts: Counter[int], params: SamplingParams) -> None:
    tokens = list(counts)
    times = torch.tensor([counts[token] for token in tokens], dtype=row_V.dtype, device=row_V.device)
    row_V[tokens] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)


def _temperature(logits_TV: Tensor, history: History, params: SamplingParams, order: ProcessorOrder) -> Tensor:
    return logits_TV / params.temperature


def _top_k(logits_TV: Tensor, history: History, params: SamplingParams, order: ProcessorOrder) -> Tensor:
    if not 0 < params.top_k < logits_TV.shape[1]:
        return logits_TV
    lowest_T1 = logits_TV.topk(params.top_k, dim=-1).values[:, -1:]
    return logits_TV.masked_fill(logits_TV < lowest_T1, -math.inf)


def _top_p(logits_TV: Tensor, history: History, params: SamplingParams, order: ProcessorOrder) -> Tensor:
    """Keep the smallest set of likeliest tokens whose share of what is left reaches ``top_p``."""
    if params.top_p >= 1:
        return logits_TV
    sorted_TV, ids_TV = logits_TV.sort(dim=-1, descending=True, stable=True)
    probs_TV = sorted_TV.double().softmax(dim=-1)
    is_out_TV = probs_TV.cumsum(dim=-1) - probs_TV >= params.top_p
    return logits_TV.masked_fill(torch.zeros_like(is_out_TV).scatter(1, ids_TV, is_out_TV), -math.inf)


def _min_p(logits_TV: Tensor, history: History, params: SamplingParams, order: ProcessorOrder) -> Tensor:
    if params.min_p == 0:
        return logits_TV
    floor_T1 = logits_TV.amax(dim=-1, keepdim=True) + math.log(params.min_p)
    return logits_TV.masked_fill(logits_TV < floor_T1, -math.inf)


STAGES: dict[str, Callable[[Tensor, History, SamplingParams, ProcessorOrder], Tensor]] = {
    "masks": _masks,
    "bias": _bias,
    "penalties": _penalties,
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
}
