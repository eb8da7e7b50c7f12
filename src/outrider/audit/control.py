"""Teacher forcing, and the control that says how far rounding alone moves a plain model's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.result import GenerationResult
from outrider.models.base import PackedRows, Target

__all__ = ["FLOAT32_CAP", "Control", "forced_logits", "run_control"]

FLOAT32_CAP = 1e-4
"""In float32 no gap above this is ever called a tie, whatever the control says."""
SAFETY = 2.0
"""The tolerance is this many times the largest deviation seen: the control sees only a sample of all positions."""
CONTROL_ROWS = 8
"""Sequences decoded together in the control's second arm."""
CONTROL_TOKENS = 32
"""Most output tokens of each text that the control compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Plain against plain at another batch shape: how far rounding alone moves logits.

    Attributes:
        tolerance: largest score gap that counts as a tie, in logits.
        deviation: largest change of the gap between the two likeliest tokens' logits.
        num_positions: positions compared; num_flips: those whose likeliest token changed.
        batch_size: sequences decoded together in the second arm (the first decodes each alone).
    """

    tolerance: float
    deviation: float
    num_positions: int
    num_flips: int
    batch_size: int


@torch.inference_mode()
def forced_logits(
    target: Target,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    *,
    prefill_chunk: int = 512,
    is_last_only: bool = False,
) -> list[Tensor]:
    """Teacher forcing exactly as plain decoding of these sequences together would run.

    Args:
        target: the model.
        prompts, continuations: token ids; sequence i is read as ``prompts[i]``, then ``continuations[i]`` row by row.
        prefill_chunk: most prompt tokens read in one pass.
        is_last_only: keep only the logits behind the last token.

    Returns:
        For each sequence logits ``[len(continuation) + 1, V]`` (or ``[1, V]``): row t is the law of output token t.
    """
    cache = target.new_cache()
    rows: list[list[Tensor]] = []
    slots = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        slot = cache.allocate(len(prompt) + len(continuation) + 1)
        slots.append(slot)
        for start in range(0, len(prompt), prefill_chunk):
            chunk = list(prompt[start : start + prefill_chunk])
            packed = PackedRows.pack(
                [chunk], slots=[slot], starts=[start], device=target.spec.device, logit_rows=(len(chunk) - 1,)
            )
            logits_RV = target.forward(packed, cache).logits_RV
        rows.append([logits_RV])
    for step in range(max(map(len, continuations), default=0)):
        active = [index for index, continuation in enumerate(continuations) if step < len(continuation)]
        packed = PackedRows.pack(
            [[continuations[index][step]] for index in active],
            slots=[slots[index] for index in active],
            starts=[len(prompts[index]) + step for index in active],
            device=target.spec.device,
        )
        logits_RV = target.forward(packed, cache).logits_RV
        for row, index in enumerate(active):
            rows[index] = [] if is_last_only else rows[index]
            rows[index].append(logits_RV[row : row + 1])
    return [torch.cat(each) for each in rows]


def run_control(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    results: Sequence[GenerationResult],
    *,
    prefill_chunk: int = 512,
) -> Control:
    """Read plain outputs again, each alone and ``CONTROL_ROWS`` together, and measure how far the logits move.

    Args:
        target: the model.
        prompts: token ids by name, in the order of ``results``.
        results: plain outputs.
        prefill_chunk: as in the engine.
    """
    texts = [
        (list(prompt), list(result.token_ids[:CONTROL_TOKENS]))
        for prompt, result in zip(prompts.values(), results, strict=True)
    ][:CONTROL_ROWS]
    crowd = [texts[index % len(texts)] for index in range(CONTROL_ROWS)]
    together = forced_logits(target, [p for p, _ in crowd], [c for _, c in crowd], prefill_chunk=prefill_chunk)
    deviation, positions, flips = 0.0, 0, 0
    for index, (prompt, continuation) in enumerate(texts):
        [alone] = forced_logits(target, [prompt], [continuation], prefill_chunk=prefill_chunk)
        deviation = max(deviation, _deviation(alone, together[index]))
        flips += int((alone.argmax(dim=-1) != together[index].argmax(dim=-1)).sum())
        positions += alone.shape[0]
    tolerance = SAFETY * deviation
    if target.spec.precision == "float32":
        tolerance = min(tolerance, FLOAT32_CAP)
    return Control(
        tolerance=tolerance,
        deviation=deviation,
        num_positions=positions,
        num_flips=flips,
        batch_size=CONTROL_ROWS,
    )


def _deviation(alone_TV: Tensor, together_TV: Tensor) -> float:
    """Largest change of the gap between the two likeliest tokens of a position: only a gap that closes can flip."""
    ids_T2 = alone_TV.topk(2, dim=-1).indices
    change_T2 = together_TV.gather(1, ids_T2).double() - alone_TV.gather(1, ids_T2).double()
    return float((change_T2[:, 0] - change_T2[:, 1]).abs().max())
