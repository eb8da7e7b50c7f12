"""Every fault that people plant in heads, settings and traffic comes out first."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.audit.doctor.card import Card
from outrider.audit.doctor.case import temperature
from outrider.audit.doctor.examine import examine
from outrider.audit.doctor.live import LiveRun
from outrider.audit.doctor.report import DoctorReport
from outrider.drafters.head_folder import read_head
from outrider.metrics import SpeculationStats
from outrider.models.base import LoadedTarget
from outrider.models.load import load_target
from outrider.sampling.params import SamplingParams
from tests.models import _files

from .ward import NUM_TOKENS, SHAPE, case, edited, open_target, prompts, rewired, with_config, write_target


def first(report: DoctorReport) -> tuple[str, str]:
    """Cause and status of the first finding."""
    assert report.found, [(each.cause, each.status, each.evidence) for each in report.findings]
    return report.found[0].cause, report.found[0].status


def test_a_sound_head_is_healthy(target: LoadedTarget, head: Path) -> None:
    card = read_head(head).info.acceptance["tokens_per_pass"]
    assert card > 2, "the head has not learnt its texts by heart; the faults below would not show"
    report = examine(case(target, head))
    assert report.is_healthy, report.to_json()
    assert report.verdict.startswith("Healthy") and report.acceptance["served"] > 2
    looked_at = {finding.cause for finding in report.findings}
    assert {"d2t", "tap_layers", "norm_flags", "tensors", "checkpoint", "template", "context", "traffic"} <= looked_at
    assert {"temperature", "quantised_target", "head_precision", "cost"} <= looked_at
    for finding in report.findings:
        assert finding.status == ("not checked" if finding.cause == "cost" else "clear"), finding


WIRINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "one too high": ("tap_layers", {"tap_layers": (2, 4, 6)}),
    "one of three": ("tap_layers", {"tap_layers": (1, 4, 5)}),
    "residual": ("norm_flags", {"norm_before_residual": True}),
    "output": ("norm_flags", {"norm_output": True}),
    "padded": ("vocabulary", {"target_vocab_size": SHAPE.vocab_size + 128}),
}


@pytest.mark.parametrize("name", WIRINGS)
def test_wrong_wiring_is_proved_by_mending_it(target: LoadedTarget, head: Path, tmp_path: Path, name: str) -> None:
    cause, changes = WIRINGS[name]
    folder = rewired(head, tmp_path / "head", keep_record=False, **changes)
    report = examine(case(target, folder))
    assert first(report) == (cause, "proved"), report.to_json()
    gain = report.found[0].gain
    assert gain is not None and gain.low > 0.1 and gain.num_requests == 6
    assert "wired" in report.verdict and report.acceptance["mended"] > 2
    if cause == "tap_layers":
        assert "[1, 3, 5]" in report.found[0].remedy


def test_two_mistakes_are_mended_one_after_the_other(target: LoadedTarget, head: Path, tmp_path: Path) -> None:
    folder = rewired(head, tmp_path / "head", tap_layers=(2, 4, 6), norm_output=True)
    report = examine(case(target, folder))
    assert {finding.cause for finding in report.found if finding.status == "proved"} == {"tap_layers", "norm_flags"}
    assert report.acceptance["mended"] > 2


def test_two_files_of_which_the_weights_are_right(target: LoadedTarget, head: Path, tmp_path: Path) -> None:
    folder = edited(head, tmp_path / "head", lambda tensors: None)
    values = json.loads((folder / "config.json").read_text())
    values["head"]["norm_output"] = True
    (folder / "config.json").write_text(json.dumps(values))
    report = examine(case(target, folder))
    assert first(report) == ("norm_flags", "proved") and "False in the weights" in report.found[0].title
    assert "norm_output is False, but True in config.json" in report.found[1].evidence


def as_ids(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def as_offsets_of_offsets(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize(
    ("change", "title"), [(as_ids, "token ids where offsets"), (as_offsets_of_offsets, "was read as ids")]
)
def test_d2t_read_the_other_way(
    target: LoadedTarget, head: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], title: str
) -> None:
    report = examine(case(target, edited(head, tmp_path / "head", change)))
    assert first(report) == ("d2t", "proved") and title in report.found[0].title
    assert report.found[1].status == "refused", "and the loader's own words stand behind it"


def test_layers_that_the_config_does_not_name(target: LoadedTarget, head: Path, tmp_path: Path) -> None:
    folder = with_config(head, tmp_path / "head", lambda values: values["head"].pop("tap_layers"))
    report = examine(case(target, folder))
    assert first(report) == ("tap_layers", "refused") and not report.is_healthy
    assert "tap_layers is missing" in report.found[0].evidence and "[1, 3, 5]" in report.found[0].remedy


def test_layers_against_the_record_need_no_measured_loss(target: LoadedTarget, head: Path, tmp_path: Path) -> None:
    """Two requests prove nothing, whatever they gain; the record of the training says it."""
    folder = rewired(head, tmp_path / "head", tap_layers=(2, 4, 6))
    report = examine(case(target, folder, prompts=prompts()[:2]))
    assert first(report) == ("tap_layers", "seen") and not report.is_healthy
    assert "[2, 4, 6]" in report.found[0].evidence and "[1, 3, 5]" in report.found[0].remedy
    assert [finding.cause for finding in report.findings].count("tap_layers") == 1


def dropped(tensors: dict[str, Tensor]) -> None:
    del tensors["midlayer.mlp.down_proj.weight"]


def not_finite(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][0, 0] = torch.nan


@pytest.mark.parametrize(("change", "name"), [(dropped, "midlayer.mlp.down_proj.weight"), (not_finite, "fc.weight")])
def test_missing_or_broken_tensors(
    target: LoadedTarget, head: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], name: str
) -> None:
    report = examine(case(target, edited(head, tmp_path / "head", change)))
    assert first(report) == ("tensors", "refused") and name in report.found[0].evidence


def random_alike(tensors: dict[str, Tensor]) -> None:
    """Random numbers of the same spread."""
    old = tensors["fc.weight"].float()
    new = torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    tensors["fc.weight"] = (new * old.square().mean().sqrt()).to(tensors["fc.weight"].dtype)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_random_tensor(target: LoadedTarget, head: Path, tmp_path: Path, is_recorded: bool) -> None:
    source = head if is_recorded else rewired(head, tmp_path / "bare", keep_record=False)
    report = examine(case(target, edited(source, tmp_path / "head", random_alike)))
    assert first(report) == ("tensors", "seen"), report.to_json()
    evidence = report.found[0].evidence
    assert "fc.weight" in evidence and ("instead of" in evidence) == is_recorded
    assert "the head itself" in report.verdict


def test_a_head_for_another_checkpoint(head: Path, tmp_path: Path) -> None:
    other = open_target(write_target(tmp_path / "other", seed=6))
    report = examine(case(other, head))
    assert first(report) == ("checkpoint", "seen"), report.to_json()
    recorded = read_head(head).info.target_fingerprint
    assert recorded in report.found[0].evidence and other.spec.fingerprint in report.found[0].evidence


def test_a_quantised_target(target_folder: Path, head: Path) -> None:
    report = examine(case(open_target(target_folder, "int4"), head))
    assert first(report) == ("quantised_target", "proved"), report.to_json()
    assert "int4" in report.found[0].title


def test_a_window_shorter_than_the_texts(target: LoadedTarget, head: Path) -> None:
    report = examine(case(target, f"{head}:window=2"))
    assert first(report) == ("window", "proved"), report.to_json()


def test_temperature(target: LoadedTarget, head: Path) -> None:
    report = examine(case(target, head, params=SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0)))
    assert first(report) == ("temperature", "proved"), report.to_json()
    assert "the traffic" in report.verdict


def test_traffic_that_it_was_not_trained_on(target: LoadedTarget, head: Path) -> None:
    report = examine(case(target, head, prompts=prompts(seed=3, low=150, high=250)))
    assert first(report) == ("traffic", "seen"), report.to_json()
    assert "in the draft vocabulary" in report.found[0].evidence and "the traffic" in report.verdict


def test_another_template(target_folder: Path, head: Path) -> None:
    """The other template puts other tokens around the same requests."""
    target = open_target(target_folder)
    target.tokenizer = _files.tokenizer(chat_template=_files.CHATML.replace("<|im_start|>", "<|endoftext|>"))
    report = examine(case(target, head, prompts=[[0, 60, 61, *prompt, 0, 62] for prompt in prompts()]))
    assert first(report) == ("template", "seen"), report.to_json()


def test_another_rendering_is_measured(target: LoadedTarget, head: Path) -> None:
    bare = [[0, 60, 61, *prompt, 0, 62] for prompt in prompts()]
    report = examine(case(target, head, prompts=bare, renderings={"as chats": prompts()}))
    assert first(report) == ("template", "proved"), report.to_json()


def test_a_template_is_only_noted_where_nothing_is_lost(target_folder: Path, head: Path) -> None:
    target = open_target(target_folder)
    target.tokenizer = _files.tokenizer(chat_template="{{ messages }}")
    report = examine(case(target, head))
    assert report.is_healthy
    assert [finding.status for finding in report.findings if finding.cause == "template"] == ["noted"]


def test_who_rendered_the_tools_is_no_other_template(target: LoadedTarget, target_folder: Path, head: Path) -> None:
    from outrider.audit.doctor.card import template

    other = load_target(target_folder, dtype="float32", device="cpu", backend="pytorch", tool_rendering="system")
    assert target.tokenizer is not None and other.tokenizer is not None
    info = replace(read_head(head).info, template_hash=other.tokenizer.template_hash)
    assert info.template_hash != target.tokenizer.template_hash
    [finding, *_] = template(info, target, [], is_low=True)
    assert finding.status == "clear" and "who renders tools" in finding.evidence


def test_a_head_that_does_what_its_poor_card_says(target: LoadedTarget, head: Path, tmp_path: Path) -> None:
    """Nothing is wrong with it but the training: few texts, and the requests are others."""

    def poor(values: dict[str, Any]) -> None:
        values["acceptance"] = {"tokens_per_pass": 1.05, "kept_at_depth": [0.05, 0, 0, 0]}
        values["record"], values["data"] = {}, {"draft vocabulary covers": 0.1}

    folder = with_config(head, tmp_path / "head", poor)
    report = examine(case(target, folder, prompts=prompts(seed=3, low=150, high=250)))
    assert first(report) == ("weak_head", "seen"), report.to_json()
    assert "the head itself" in report.verdict


def test_a_loss_without_a_cause_is_not_called_healthy(target: LoadedTarget, head: Path, tmp_path: Path) -> None:
    def better(values: dict[str, Any]) -> None:
        values["acceptance"] = {"tokens_per_pass": 4.99, "kept_at_depth": [1.0, 1.0, 1.0, 0.99]}

    report = examine(case(target, with_config(head, tmp_path / "head", better)))
    assert not report.found and report.verdict.startswith("Less is kept than the card says"), report.to_json()


def test_answers_that_think(target: LoadedTarget, head: Path) -> None:
    from outrider.audit.doctor.card import template

    info = replace(read_head(head).info, record={"answers": {"thinking": 1.0}})
    finding = template(info, target, ["no thought"], is_low=True)[-1]
    assert (finding.cause, finding.status) == ("thinking", "seen") and "100 %" in finding.evidence
    assert template(info, target, ["<think>a</think>b"], is_low=True)[-1].status == "clear"


def run_of(*counts: tuple[int, int]) -> LiveRun:
    """A run of requests that committed so many tokens in so many passes."""
    stats = tuple(SpeculationStats(passes=passes, committed=committed) for committed, passes in counts)
    return LiveRun(answers=(), texts=(), stats=stats, draft_ms=0.0)


def test_a_temperature_that_explains_what_the_card_misses(target: LoadedTarget, head: Path) -> None:
    """Two requests prove nothing; but the card is met at temperature 0, and not at theirs."""
    hot = case(target, head, params=SamplingParams(max_tokens=NUM_TOKENS, temperature=2.0))
    served, greedy = run_of((14, 10), (13, 10)), run_of((16, 10), (17, 10))
    assert temperature(hot, served, greedy).status == "clear"
    assert temperature(hot, served, greedy, explains=True).status == "seen"
    assert temperature(hot, greedy, served, explains=True).status == "clear"


@pytest.mark.parametrize(("card", "status"), [(1.88, "clear"), (1.2, "seen"), (None, "seen")])
def test_only_a_poor_card_makes_a_poor_head(card: float | None, status: str) -> None:
    assert Card(tokens=card).weakness(1.41, None).status == status
