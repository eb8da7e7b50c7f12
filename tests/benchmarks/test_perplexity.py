"""Perplexity and divergence of laws that are known."""

from __future__ import annotations

import math

import torch
from benchmarks.perplexity import TEXT, Tally, table


def test_a_law_compared_with_itself_and_with_a_uniform_one() -> None:
    peaked = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 3).log()
    uniform = torch.full((3, 4), 0.25).log()
    same, other = Tally(), Tally()
    same.add(peaked, peaked, [0, 0])  # the last row has no next token
    other.add(uniform, peaked, [0, 1])
    assert math.isclose(same.summary()["perplexity"], 1 / 0.7, rel_tol=1e-6)
    assert same.summary()["kl_nats"] == 0 and same.summary()["same_best_token"] == 1
    assert math.isclose(other.summary()["perplexity"], 4, rel_tol=1e-6)
    expected = 0.7 * math.log(0.7 / 0.25) + 0.3 * math.log(0.1 / 0.25)
    assert math.isclose(other.summary()["kl_nats"], expected, rel_tol=1e-5)


def test_the_table_has_a_line_for_each_precision() -> None:
    tally = Tally()
    tally.add(torch.zeros(2, 4).log_softmax(-1), torch.zeros(2, 4).log_softmax(-1), [1, 2])
    rows = [{"precision": name, "path": "pytorch", "weight_bytes": 10, **tally.summary()} for name in ("int8", "int4")]
    rows[1]["note"] = "on the grid"
    lines = table(rows).splitlines()
    assert len(lines) == 4 and "| int4* |" in lines[3] and "*" not in lines[2]


def test_the_text_is_long_enough_to_mean_something() -> None:
    assert len(TEXT.read_text(encoding="utf-8").split()) > 1500
