"""Which prompts the proofs take, how arms are named, and what they plant in a head's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.audit_proof import FIXED, PENALTIES, SAMPLED, short_prompts, split_arm
from benchmarks.doctor_faults import FAULTS, as_ids, as_offsets_of_offsets


def test_short_questions_spread_over_the_file(tmp_path: Path) -> None:
    rows = [{"id": str(i), "messages": [{"role": "user", "content": "x" * (600 if i % 2 else 5)}]} for i in range(40)]
    rows.append({"id": "tools", "messages": [{"role": "user", "content": "x"}], "tools": [{}]})
    path = tmp_path / "traffic.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["id"] for row in short_prompts(path, 5)] == ["0", "8", "16", "24", "32"]
    assert len(short_prompts(path, 100)) == 20


def test_an_arm_names_its_number_of_draft_tokens() -> None:
    assert split_arm("merged:a@b:depth=2@16") == ("merged:a@b:depth=2", 16)
    for wrong in ("suffix", "@3", "suffix@x"):
        with pytest.raises(ValueError, match="NAME@K"):
            split_arm(wrong)


def test_every_temperature_and_the_penalties_are_there() -> None:
    kinds = [*FIXED.values(), *SAMPLED.values()]
    assert {each.get("temperature", 0.0) for each in kinds} == {0.0, 0.8, 1.3}
    for temperature in (0.0, 0.8, 1.3):
        assert any(each.get("temperature", 0.0) == temperature and PENALTIES.items() <= each.items() for each in kinds)


def test_readings_of_d2t_are_planted_one_another_s_inverse() -> None:
    tensors = {"d2t": torch.tensor([3, 3, 5])}
    as_ids(tensors)
    assert tensors["d2t"].tolist() == [3, 4, 7]
    as_offsets_of_offsets(tensors)
    assert tensors["d2t"].tolist() == [3, 3, 5]


def test_faults_have_names_of_their_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) and [fault.name for fault in FAULTS if not fault.causes] == ["nothing"]
