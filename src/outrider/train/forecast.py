"""What a run will take, from a trial of a few seconds: one decoding pass, one pass over texts, a few updates."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from outrider.device import one_torch_thread
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.models.base import LoadedTarget, PackedRows
from outrider.train.capture import LiveStates
from outrider.train.config import TrainConfig
from outrider.train.corpus import Text
from outrider.train.data import Schedule
from outrider.train.loop import Trainer
from outrider.train.packing import rows_of
from outrider.train.start import Start, initialise

__all__ = ["Forecast", "Plan", "matrix_rate", "run_trial"]

_BYTES_A_WEIGHT = 14
"""Of the state of a run (the weight and AdamW's two moments, in float32) and of the head itself (bfloat16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done with the texts.

    Attributes:
        answer_tokens: most tokens of an answer, 0 if answers are there already. batch_size: rows answered together.
        is_stored: taps are stored once; else the target runs in every epoch.
    """

    answer_tokens: int
    batch_size: int
    is_stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds of each stage, bytes on disk, peak memory of the process so far; rates that they came from."""

    answers_s: float
    states_s: float
    updates_s: float
    disk_bytes: int
    memory_bytes: int
    positions_per_s: float

    @property
    def total_s(self) -> float:
        """All stages."""
        return self.answers_s + self.states_s + self.updates_s

    def to_text(self) -> str:
        """One line."""
        return (
            f"forecast: {_duration(self.total_s)} (answers {_duration(self.answers_s)}, target's taps "
            f"{_duration(self.states_s)}, updates {_duration(self.updates_s)}, evaluations not counted), "
            f"disk {self.disk_bytes / 1e9:.2f} GB, memory {self.memory_bytes / 1e9:.1f} GB"
        )


def run_trial(
    target: LoadedTarget, texts: Sequence[Text], shape: EagleConfig, config: TrainConfig, plan: Plan
) -> Forecast:
    """Time each stage on a few texts. Prompts that wait for answers are tried with answers of the longest size."""
    expected = texts if not plan.answer_tokens else [_filled(text, plan.answer_tokens) for text in texts]
    live = LiveStates(target=target, tap_layers=shape.tap_layers, num_law_tokens=config.num_law_tokens)
    sample = _first(expected, config.batch_positions)
    states_s = _timed(lambda: live.states(sample)) / sum(len(text.tokens) for text in sample)
    trainer = _trial_trainer(target, sample, shape, config, live)
    trainer.step()
    report = trainer.step()
    num_tokens = sum(len(text.tokens) for text in expected)
    per_epoch = sum(len(rows_of(text).queries) for text in expected)
    positions = min(per_epoch * config.num_epochs, config.max_positions or sys.maxsize)
    epochs = positions / max(per_epoch, 1)
    disk = live.stored_bytes(expected) if plan.is_stored else 0
    return Forecast(
        answers_s=_answer_seconds(target, texts, states_s, plan) if plan.answer_tokens else 0.0,
        states_s=states_s * num_tokens * (1 if plan.is_stored else epochs),
        updates_s=report.compute_s / report.num_queries * positions,
        disk_bytes=disk + _BYTES_A_WEIGHT * sum(p.numel() for p in trainer.head.parameters()),
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        positions_per_s=report.num_queries / report.compute_s,
    )


def matrix_rate(shape: EagleConfig, num_rows: int, dtype: torch.dtype) -> float:
    """Operations a second of plain matrix products at the training's shapes, forward and both gradients; best of three."""
    width = shape.hidden_size
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_width
    sizes = (
        (2 * width, heads),
        (shape.num_heads * shape.head_width, width),
        (width, 2 * shape.intermediate_size),
        (shape.intermediate_size, width),
        (width, shape.draft_vocab_size),
    )
    flop = seconds = 0.0
    for num_in, num_out in sizes:
        x, weight = torch.randn(num_rows, num_in).to(dtype), torch.randn(num_out, num_in).to(dtype)
        slope = torch.randn(num_rows, num_out).to(dtype)
        for product in (
            lambda x=x, weight=weight: F.linear(x, weight),
            lambda slope=slope, weight=weight: slope @ weight,
            lambda slope=slope, x=x: slope.T @ x,
        ):
            seconds += min(_timed(product) for _ in range(3))
            flop += 2.0 * num_rows * num_in * num_out
    return flop / seconds


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _filled(text: Text, num_tokens: int) -> Text:
    """The prompt with a made-up answer: tokens of the prompt itself, over and over."""
    answer = [text.tokens[index % len(text.tokens)] for index in range(num_tokens)]
    return text.answered(answer)


def _first(texts: Sequence[Text], num_positions: int) -> list[Text]:
    chosen: list[Text] = []
    size = 0
    for text in texts:
        chosen.append(text)
        size += len(rows_of(text).queries)
        if size >= num_positions:
            break
    return chosen


def _trial_trainer(
    target: LoadedTarget, texts: Sequence[Text], shape: EagleConfig, config: TrainConfig, live: LiveStates
) -> Trainer:
    head = EagleHead(shape)
    ids = tuple(range(shape.draft_vocab_size))
    initialise(head, ids, target.checkpoint, Start(kind="random"), seed=0)
    schedule = Schedule(texts, batch_positions=config.batch_positions, num_epochs=2, max_positions=None, seed=0)
    index_V = torch.arange(shape.target_vocab_size)
    index_V[shape.draft_vocab_size :] = -1
    short = replace(config, num_epochs=2, max_positions=None)
    dtype = target.placement.activation_dtype
    return Trainer(head, schedule, source=live, draft_index_V=index_V, config=short, dtype=dtype)


def _answer_seconds(target: LoadedTarget, texts: Sequence[Text], row_s: float, plan: Plan) -> float:
    """Reading all prompts, and one pass a token of every batch."""
    cache = target.new_cache()
    num_rows = min(plan.batch_size, len(texts))
    with one_torch_thread(target.spec.path.startswith("native")):
        slots = [cache.allocate(8) for _ in range(num_rows)]

        def decode() -> None:
            starts = [cache.length(slot) for slot in slots]
            rows = PackedRows.pack([[1]] * num_rows, slots=slots, starts=starts, device=target.spec.device)
            target.forward(rows, cache)

        decode()
        pass_s = min(_timed(decode) for _ in range(3))
    num_passes = plan.answer_tokens * len(texts) / num_rows
    return row_s * sum(len(text.tokens) for text in texts) + pass_s * num_passes


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
