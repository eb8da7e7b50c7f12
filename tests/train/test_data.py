"""Draft vocabulary, start weights, forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.drafters.eagle_head import EagleHead
from outrider.errors import ConfigError
from outrider.models.llama import LlamaTarget
from outrider.train.config import TrainConfig
from outrider.train.corpus import Text
from outrider.train.data import choose_vocabulary, split_held_out, to_draft_ids, vocabulary_of
from outrider.train.forecast import Plan, matrix_rate, run_trial
from outrider.train.packing import TextStates
from outrider.train.start import Start, initialise
from tests.drafters.heads import head_config

TEXT = Text(id="a", line=1, tokens=(9, 9, 3, 5, 5, 5, 3, 7), trained=(False, False, *[True] * 6))


def test_vocabulary_is_what_was_trained_most_often() -> None:
    found = choose_vocabulary([TEXT], size=2, target_size=12)
    assert found.ids == (3, 5) and found.coverage == pytest.approx(5 / 6)
    filled = choose_vocabulary([TEXT], size=6, target_size=12)
    assert filled.ids == (0, 1, 2, 3, 5, 7) and filled.coverage == 1
    assert filled.draft_index().tolist() == [0, 1, 2, 3, -1, 4, -1, 5, -1, -1, -1, -1]


def test_a_vocabulary_that_is_given_is_kept() -> None:
    found = vocabulary_of((3, 7), [TEXT], target_size=12)
    assert found.ids == (3, 7) and found.coverage == pytest.approx(3 / 6)


def test_laws_lose_what_cannot_be_said() -> None:
    state = TextStates(
        taps_SD=torch.zeros(1, 1),
        law_ids_QK=torch.tensor([[5, 9, 3]], dtype=torch.int32),
        law_probs_QK=torch.tensor([[0.5, 0.25, 0.125]], dtype=torch.float16),
    )
    index = choose_vocabulary([TEXT], size=2, target_size=12).draft_index()
    found = to_draft_ids(state, index, dtype=torch.float32)
    assert found.law_ids_QK.tolist() == [[1, 0, 0]] and found.law_probs_QK.tolist() == [[0.5, 0, 0.125]]


def test_held_out_texts_are_fixed_and_apart() -> None:
    texts = [replace(TEXT, id=str(index)) for index in range(20)]
    train, held = split_held_out(texts, 5, seed=1)
    assert len(held) == 5 and {t.id for t in train} | {t.id for t in held} == {t.id for t in texts}
    assert split_held_out(texts, 5, seed=1) == (train, held) != split_held_out(texts, 5, seed=2)


def test_start_weights(target: LlamaTarget) -> None:
    shape = head_config(num_heads=4, num_kv_heads=2, head_width=8, intermediate_size=48)
    ids = tuple(range(shape.draft_vocab_size))
    head = EagleHead(shape)
    initialise(head, ids, target.checkpoint, Start.parse("target-layer:2", 4), seed=0)
    read = target.checkpoint.tensor
    assert torch.equal(head.lm_head.weight, read("lm_head.weight")[list(ids)])
    width = shape.hidden_size
    query = read("model.layers.2.self_attn.q_proj.weight")
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, width:], query)
    assert all(bool(p.isfinite().all()) for p in head.parameters())
    other = EagleHead(shape)
    initialise(other, ids, target.checkpoint, Start(kind="random"), seed=0)
    assert not torch.equal(other.lm_head.weight, head.lm_head.weight)
    for text in ("target-layer:4", "target-layer", "best", "random:1"):
        with pytest.raises(ConfigError, match="--init"):
            Start.parse(text, 4)


def test_a_layer_of_another_shape_is_refused(target: LlamaTarget) -> None:
    head = EagleHead(head_config())  # six query heads, where the target has four
    with pytest.raises(ConfigError, match="the head's layer has another shape"):
        initialise(head, tuple(range(24)), target.checkpoint, Start(kind="target-layer", layer=1), seed=0)


def test_forecast_counts_what_is_planned(target: LlamaTarget, texts: list[Text]) -> None:
    config = TrainConfig(num_epochs=4, batch_positions=50)
    keep = run_trial(target, texts, head_config(), config, Plan(answer_tokens=0, batch_size=1, is_stored=True))
    assert keep.answers_s == 0 and keep.disk_bytes > 0 and keep.updates_s > 0 and keep.memory_bytes > 1e7
    assert "forecast: " in keep.to_text()
    ask = run_trial(target, texts, head_config(), config, Plan(answer_tokens=9, batch_size=4, is_stored=False))
    assert ask.answers_s > 0


def test_matrix_rate_is_a_rate() -> None:
    assert 1e6 < matrix_rate(head_config(), 64, torch.float32) < 1e14


@pytest.mark.parametrize("name", ["num_epochs", "unroll", "learning_rate", "loss", "weight_decay"])
def test_impossible_recipes_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        TrainConfig(**{name: -1 if name != "loss" else "mse"})  # type: ignore[arg-type]
