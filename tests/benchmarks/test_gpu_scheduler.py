"""The device check of the scheduler: every situation happens and is exact, and what goes wrong is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu_check import plain_results
from benchmarks.gpu_scheduler import SITUATIONS, check_scheduler
from benchmarks.gpu_subject import OUT_OF_TIME, Clock, Size, Subject

from benchmarks import gpu_scheduler
from outrider.drafters.head_folder import save_head
from tests.drafters.heads import tiny_head, tiny_info, tiny_target

SIZE = Size(prompts=3, scheduled=3, tokens=160, num_draft_tokens=3, rounds=1, precisions=("float32",))
PROMPTS = {name: [1 + (index * step) % 14 for index in range(40)] for name, step in zip("abc", (1, 3, 5), strict=True)}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder: Path = tmp_path_factory.mktemp("heads") / "tiny"
    target = tiny_target()
    save_head(folder, tiny_head(target), tiny_info(target))
    return Subject(target=target, head=folder)  # type: ignore[arg-type]


def rows_of(subject: Subject, budget_s: float = 100.0) -> list[dict[str, Any]]:
    plain, tolerance = plain_results(subject, PROMPTS, SIZE)
    return check_scheduler(plain, subject, PROMPTS, SIZE, tolerance, Clock(budget_s))


def test_every_situation_happens_and_is_exact(subject: Subject) -> None:
    rows = rows_of(subject)
    assert [row["verdict"] for row in rows] == ["identical"] * (len(SITUATIONS) - 1)
    found = {row["situation"]: row for row in rows}
    assert "memory for a part of them" not in found, "slabs of a short answer never grow"
    assert found["every third is cancelled"]["cancelled"] > 0
    assert found["each prompt comes twice"]["equal"] == 12 and found["each prompt comes twice"]["reused_tokens"] > 0


def test_what_goes_wrong_is_said(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row["verdict"] for row in rows_of(subject, budget_s=-1.0)} == {OUT_OF_TIME}
    monkeypatch.setattr(gpu_scheduler, "SITUATIONS", (replace(SITUATIONS[0], expects="num_preemptions"),))
    assert rows_of(subject)[0]["verdict"] == "did not happen: they arrive one by one"
    plain, _ = plain_results(subject, PROMPTS, SIZE)
    plain["greedy"]["a"] = plain["greedy"]["b"]
    row = check_scheduler(plain, subject, PROMPTS, SIZE, 0.0, Clock(100.0))[0]
    assert row["different"] >= 1 and row["verdict"] != "identical"
