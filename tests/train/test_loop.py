"""Updates, schedules, exact resumption, and the guard against numbers that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafters.eagle_head import EagleHead
from outrider.errors import DataError
from outrider.models.llama import LlamaTarget
from outrider.train.capture import LiveStates, StateSource
from outrider.train.checkpoint import load_state, save_state
from outrider.train.config import TrainConfig
from outrider.train.corpus import Text
from outrider.train.data import Schedule, choose_vocabulary
from outrider.train.loop import Trainer
from outrider.train.packing import TextStates, rows_of
from tests.drafters.heads import VOCAB, head_config

CONFIG = TrainConfig(num_epochs=6, batch_positions=60, learning_rate=0.02, unroll=3)


# In bfloat16 a processor with AMX runs the native kernels.
in_both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def make_trainer(
    target: LlamaTarget,
    texts: Sequence[Text],
    config: TrainConfig = CONFIG,
    *,
    source: StateSource | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trainer:
    shape = replace(head_config(), draft_vocab_size=30)
    head = EagleHead(shape)
    vocabulary = choose_vocabulary(texts, size=30, target_size=VOCAB)
    head.initialise(vocabulary.ids, seed=config.seed)
    head.attach_embedding(target.checkpoint.tensor("model.embed_tokens.weight"))
    schedule = Schedule(
        texts,
        batch_positions=config.batch_positions,
        num_epochs=config.num_epochs,
        max_positions=config.max_positions,
        seed=config.seed,
    )
    live = LiveStates(target=target, tap_layers=shape.tap_layers, num_law_tokens=20)
    return Trainer(
        head,
        schedule,
        source=source or live,
        draft_index_V=vocabulary.draft_index(),
        config=config,
        dtype=dtype,
    )


@in_both_precisions
def test_the_loss_falls(target: LlamaTarget, texts: list[Text], dtype: torch.dtype) -> None:
    trainer = make_trainer(target, texts, dtype=dtype)
    losses = []
    while not trainer.is_done:
        losses.append(trainer.step().loss)
    assert len(losses) == len(trainer.schedule) > 20
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_schedule_shows_every_text_once_an_epoch_in_another_order(texts: list[Text]) -> None:
    schedule = Schedule(texts, batch_positions=60, num_epochs=2, max_positions=None, seed=1)
    orders: list[list[str]] = [[], []]
    for update in range(len(schedule)):
        orders[schedule.epoch(update)] += [text.id for text in schedule.batch(update)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(text.id for text in texts)
    assert orders[0] != orders[1]
    again = Schedule(texts, batch_positions=60, num_epochs=2, max_positions=None, seed=1)
    assert [again.batch(i) for i in range(len(again))] == [schedule.batch(i) for i in range(len(schedule))]
    one_epoch = sum(len(rows_of(text).queries) for text in texts)
    short = Schedule(texts, batch_positions=60, num_epochs=2, max_positions=one_epoch // 2, seed=1)
    assert one_epoch // 2 <= short.num_positions < one_epoch // 2 + 120


@in_both_precisions
def test_resuming_is_exact(target: LlamaTarget, texts: list[Text], tmp_path: Path, dtype: torch.dtype) -> None:
    whole = make_trainer(target, texts, dtype=dtype)
    expected = [whole.step() for _ in range(8)]
    first = make_trainer(target, texts, dtype=dtype)
    for _ in range(3):
        first.step()
    save_state(tmp_path / "state.pt", first, recipe={"lr": 1}, best=1.5)
    second = make_trainer(target, texts, replace(CONFIG, seed=CONFIG.seed), dtype=dtype)
    assert load_state(tmp_path / "state.pt", second, recipe={"lr": 1}) == 1.5
    found = [second.step() for _ in range(5)]
    assert [r.loss for r in found] == [r.loss for r in expected[3:]]
    assert [r.learning_rate for r in found] == [r.learning_rate for r in expected[3:]]
    for name, parameter in whole.head.named_parameters():
        assert torch.equal(parameter, dict(second.head.named_parameters())[name]), name


def test_another_recipe_cannot_go_on(target: LlamaTarget, texts: list[Text], tmp_path: Path) -> None:
    trainer = make_trainer(target, texts)
    save_state(tmp_path / "state.pt", trainer, recipe={"lr": 1}, best=1.0)
    with pytest.raises(DataError, match="lr = 1, now it is 2"):
        load_state(tmp_path / "state.pt", trainer, recipe={"lr": 2})
    (tmp_path / "state.pt").write_bytes(b"nothing")
    with pytest.raises(DataError, match="is not the state of a training run"):
        load_state(tmp_path / "state.pt", trainer, recipe={})


class Spoiled:
    """Gives infinite taps, or a law that is no number, for one text."""

    def __init__(self, source: LiveStates, id: str, what: str) -> None:
        self._source, self._id, self._what = source, id, what

    def states(self, texts: Sequence[Text]) -> list[TextStates]:
        found: list[Any] = self._source.states(texts)
        for text, state in zip(texts, found, strict=True):
            if text.id == self._id and self._what == "taps":
                state.taps_SD[1, 0] = torch.inf
            elif text.id == self._id:
                state.law_probs_QK[1] = torch.nan
        return found


@in_both_precisions
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("taps", "row 'text-5': the target's hidden states are not finite"),
        ("laws", "row 'text-5': its loss is not finite"),
    ],
)
def test_infinite_numbers_stop_with_the_rows_name(
    target: LlamaTarget, texts: list[Text], what: str, message: str, dtype: torch.dtype
) -> None:
    live = LiveStates(target=target, tap_layers=(1, 2, 4), num_law_tokens=20)
    trainer = make_trainer(target, texts, source=Spoiled(live, "text-5", what), dtype=dtype)
    with pytest.raises(DataError, match=message):
        while True:
            trainer.step()
    assert all(bool(p.isfinite().all()) for p in trainer.head.parameters())


def test_rate_warms_up_and_ends_low(target: LlamaTarget, texts: list[Text]) -> None:
    trainer = make_trainer(target, texts, replace(CONFIG, warmup_share=0.2))
    rates = [trainer.learning_rate(update) for update in range(len(trainer.schedule))]
    assert rates[0] < rates[1] < max(rates) == CONFIG.learning_rate
    assert rates[-1] < 0.1 * CONFIG.learning_rate
