"""A whole run on a tiny random target: imported by tests, and run as a process that tests kill."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.train.answers import AnswerSettings, EngineAnswers
from outrider.train.config import TrainConfig
from outrider.train.corpus import Corpus, Text
from outrider.train.run import Job, train_eagle
from outrider.train.start import Start
from tests.drafters.heads import VOCAB, head_config, tiny_target

CONFIG = TrainConfig(
    num_epochs=30, batch_positions=40, learning_rate=0.01, unroll=3, save_every_s=0.2, evaluate_every=25
)


class Quiet:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, stage: str, done: float, total: float, note: str = "") -> None:
        pass


def make_job(out: Path, **changes: Any) -> Job:
    target = tiny_target()
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(1, VOCAB, (20, 6), generator=generator).tolist()
    texts = [
        Text(id=f"row-{i}", line=i + 1, tokens=tuple(tokens), trained=(False,) * 6) for i, tokens in enumerate(prompts)
    ]
    settings = AnswerSettings(temperatures=(0.0,), max_tokens=16, seed=0)
    values: dict[str, Any] = {
        "target": target,
        "corpus": Corpus(texts=tuple(texts)),
        "out": out,
        "config": CONFIG,
        "shape": replace(head_config(), draft_vocab_size=30),
        "start": Start(kind="random"),
        "answers": (settings, EngineAnswers(target, batch_size=8)),
        "num_held_out": 4,
        "held_out_tokens": 12,
    }
    return Job(**{**values, **changes})


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_eagle(make_job(Path(sys.argv[1])), Quiet())
