"""The arrival of a long prompt is measured on the real engine, and by chunk."""

from __future__ import annotations

import torch
from benchmarks.scheduling import WARM_STEPS, Gaps, arrival, mixed_or_apart

from outrider.device import Placement
from outrider.models.llama import LlamaTarget
from tests.models._tiny import tiny_config

TARGET = LlamaTarget.random(tiny_config(), Placement(device=torch.device("cpu"), precision="float32"), seed=0)


def test_gaps_are_counted_while_the_prompt_is_read() -> None:
    gaps = Gaps()
    arrival(TARGET, chunk=20, streams=2, prompt=90, gaps=gaps)
    assert (len(gaps.calm), len(gaps.reading), len(gaps.first_token)) == (WARM_STEPS, 5, 1)
    assert sum(gaps.reading) <= gaps.first_token[0] + 1e-6
    assert gaps.to_json()["first_token_ms"]["count"] == 1


def test_mixed_and_separate_passes_read_the_same_rows() -> None:
    found = mixed_or_apart(TARGET, streams=2, chunk=8, rounds=2)
    assert found["chunk"] == 8 and found["mixed_ms"]["count"] == found["apart_ms"]["count"] == 2
