"""Arms with their own budgets, bars of merged drafters, the tables, and the head's card, on hand-made runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.arms import Bench, Comparison, Run, Settings
from benchmarks.make_docs import render
from benchmarks.prompts import PromptRow

from benchmarks import drafts, head_card
from outrider.drafters.head_folder import read_head, save_head
from outrider.drafters.shipped import FASTEST
from outrider.errors import ConfigError
from tests.drafters.heads import tiny_head, tiny_info, tiny_target

ARMS = ("suffix@8", "head@4", "merged:head:num_nodes=9@9", "merged:head@16")
SECONDS = dict(zip(("none", *ARMS), (1.0, 0.5, 0.6, 0.25, 0.4), strict=True))
PROMPTS = [
    (PromptRow(group="spec_bench", id="a", category="math", messages=(), tools=None), [1]),
    (PromptRow(group="humaneval", id="b", category="code", messages=(), tools=None), [2]),
]


def runs(seconds: float) -> list[Run]:
    return [Run(tokens=(1, 2), decoded=10, first_s=0.1, decode_s=seconds, passes=5) for _ in PROMPTS]


@pytest.fixture
def section(monkeypatch: pytest.MonkeyPatch) -> Any:
    bench = Bench(Settings(drafts=ARMS))
    comparison = Comparison(prompts=["a", "b"], runs={name: runs(seconds) for name, seconds in SECONDS.items()})
    monkeypatch.setattr(Bench, "prompts", lambda self, group: [each for each in PROMPTS if each[0].group == group])
    monkeypatch.setattr(drafts, "_compare", lambda *_: comparison)
    return drafts.section_drafts(bench)


def test_the_best_merged_arm_is_held_against_plain_and_its_parts(section: Any) -> None:
    values = {bar.name: round(bar.value, 3) for bar in section.bars if bar.name.endswith("int8")}
    best = "merged:head:num_nodes=9@9 against"
    assert values == {
        f"{best} plain, int8": 4.0,
        f"{best} suffix@8, int8": 2.0,
        f"{best} head@4, int8": 2.4,
    }
    assert section.summary["bfloat16"]["head@4"]["math"]["tokens_per_pass"] == 2.0
    assert section.summary["bfloat16"]["head@4"]["all"]["speed_up"]["value"] == pytest.approx(1 / 0.6, abs=1e-3)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ConfigError, match="--drafts names"):
        drafts.section_drafts(Bench(Settings()))


def test_the_table_shows_every_arm(section: Any, tmp_path: Path) -> None:
    result = {"kind": "engine_speed", "started": "2026-01-01", "sections": {"drafts": section.to_json()}, **PROVENANCE}
    (tmp_path / "drafts.json").write_text(json.dumps(result))
    text = render("<!-- benchmarks:drafts -->\n<!-- /benchmarks -->", tmp_path)
    assert all(arm in text for arm in ARMS) and "2.00, 4.00x (4.00 to 4.00)" in text


def test_a_card_learns_what_was_fastest_and_how_much_was_kept(section: Any, tmp_path: Path) -> None:
    target = tiny_target()
    head = tiny_head(target)
    folder = tmp_path / "head"
    save_head(folder, head, tiny_info(target))
    weights = (folder / "model.safetensors").read_bytes()
    speed, acceptance = tmp_path / "speed.json", tmp_path / "acceptance.json"
    speed.write_text(json.dumps({"sections": {"drafts": section.to_json()}}))
    each = {"tokens_per_pass": 2.5, "accepted_length": 2.75}
    kept = [{"drafter": name, "prompts": {"math": 80}, "categories": {"all": each}} for name in ("head", "suffix")]
    acceptance.write_text(json.dumps({"measurements": kept}))
    assert head_card.main([str(folder), "--speed", str(speed), "--acceptance", str(acceptance)]) == 0
    found = read_head(folder).info
    assert found.acceptance[FASTEST] == {"bfloat16": "merged:{}:num_nodes=9", "int8": "merged:{}:num_nodes=9"}
    assert found.acceptance["spec_bench"] == {"HEAD": {**each, "prompts": 80}}
    assert found.data == tiny_info(target).data
    assert (folder / "model.safetensors").read_bytes() == weights
    assert "merged:{}:num_nodes=9" in (folder / "README.md").read_text()


PROVENANCE = {
    "machine": {"processor": "p", "flags": ["avx2"], "threads": 1},
    "versions": {"torch": "2"},
    "git": {"commit": "0123456789ab"},
    "command": "c",
}
