"""Drafters that are no heads: other tokens, traffic that does not repeat, options that keep quiet, and cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.audit.doctor.examine import examine
from outrider.audit.doctor.other import repeats
from outrider.errors import ConfigError, ModelNotFound
from outrider.models.base import LoadedTarget
from outrider.models.checkpoint import expected_shapes
from outrider.models.llama_weights import RandomWeights
from tests.models import _files

from .ward import SHAPE, case, prompts, write_target


def test_another_tokenizer_is_named_by_its_first_token(target: LoadedTarget, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "draft")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"A": 68', '"B": 68').replace('"B": 69', '"A": 69', 1))
    report = examine(case(target, folder))
    [finding] = report.findings
    assert (finding.cause, finding.status) == ("vocabulary", "refused")
    assert "token id 68 is 'B' in draft model" in finding.evidence


def test_a_padded_draft_model_is_no_fault(target: LoadedTarget, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "draft", shape=replace(SHAPE, vocab_size=SHAPE.vocab_size + 128))
    report = examine(case(target, folder))
    assert [finding.status for finding in report.findings if finding.cause == "vocabulary"] == ["clear"]


def test_traffic_that_does_not_repeat(target: LoadedTarget) -> None:
    report = examine(case(target, "ngram:min_match=3"))
    assert "no_repetition" in {finding.cause for finding in report.found}
    assert repeats([[1, 2, 3, 1, 2]], [[3, 4, 1, 2, 3]]) == pytest.approx(2 / 5)


def test_options_that_keep_a_drafter_quiet(target: LoadedTarget) -> None:
    loops = [[7 + index] * 30 for index in range(6)]
    report = examine(case(target, "ngram:max_match=64,min_match=60", prompts=loops))
    assert (report.found[0].cause, report.found[0].status) == ("options", "proved"), report.to_json()


def slow_copy(folder: Path) -> Path:
    """The target itself, with forty more layers that add nothing: right every time, and never worth its time."""
    shape = replace(SHAPE, num_layers=SHAPE.num_layers + 40)
    source = RandomWeights(config=SHAPE, seed=5)
    tensors = {}
    for name, size in expected_shapes(shape).items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        ends = name.endswith(("o_proj.weight", "down_proj.weight"))
        tensors[name] = torch.zeros(size) if layer >= SHAPE.num_layers and ends else torch.ones(size)
        if layer < SHAPE.num_layers:
            tensors[name] = source.tensor(name)
    return _files.write_folder(folder, shape, tensors)


def test_a_drafter_too_slow_for_its_acceptance(target: LoadedTarget, tmp_path: Path) -> None:
    report = examine(case(target, slow_copy(tmp_path / "draft"), prompts=prompts(count=2), is_timed=True))
    assert [(finding.cause, finding.status) for finding in report.found] == [("cost", "seen")], report.to_json()
    assert report.acceptance["acceptance_rate"] == 1.0
    assert report.speed["speed_up"] < 0.5 < 1 < report.speed["break_even"]
    assert "what drafting costs" in report.verdict


def test_a_model_that_knows_nothing(target: LoadedTarget) -> None:
    report = examine(case(target, "random"))
    assert report.found[0].cause == "unlike_model"


@pytest.mark.parametrize("draft", ["none", "ngrm"])
def test_what_cannot_be_examined(target: LoadedTarget, draft: str) -> None:
    with pytest.raises((ConfigError, ModelNotFound)):
        examine(case(target, draft, offline=True))
    with pytest.raises(ConfigError, match="no requests"):
        examine(case(target, "ngram", prompts=[]))
