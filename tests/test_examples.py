"""Every example runs on the real model; the code that docs show is the code that runs."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def test_there_are_examples_and_each_can_be_run_as_a_script() -> None:
    assert {path.stem for path in EXAMPLES} >= {"quickstart", "streaming", "batch", "own_drafter"}
    for path in EXAMPLES:
        assert 'if __name__ == "__main__":\n    main(' in path.read_text()


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["quickstart", "own_drafter"])
def test_examples_of_one_prompt(name: str, real_target_f32: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = load(name)["main"](real_target_f32, max_tokens=12)
    assert len(result.token_ids) <= 12 and result.text in capsys.readouterr().out


@pytest.mark.real_model
def test_the_batch_is_identical_with_drafts(real_target_f32: Any) -> None:
    plain, drafted = load("batch")["main"](real_target_f32, max_tokens=12)
    assert [result.token_ids for result in plain] == [result.token_ids for result in drafted]
    assert sum(result.stats.accepted for result in drafted) > 0


@pytest.mark.real_model
def test_streams_join_to_whole_texts(real_target_f32: Any) -> None:
    texts = load("streaming")["main"](real_target_f32, max_tokens=8)
    assert len(texts) == 2 and all(texts)


def test_the_drafter_in_the_docs_is_the_one_that_runs() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-drafter.md").read_text(), re.DOTALL)[0]
    source = (ROOT / "examples" / "own_drafter.py").read_text()
    assert shown[shown.index("class ") :].strip() in source


@pytest.fixture
def without_loading(monkeypatch: pytest.MonkeyPatch, real_target_f32: Any) -> Callable[..., Any]:
    """``load_target`` hands out the model that the test session has loaded already."""
    import outrider

    monkeypatch.setitem(vars(outrider), "load_target", lambda name: real_target_f32)
    return lambda code: exec(compile(code, "README.md", "exec"), {})


@pytest.mark.real_model
def test_the_code_in_the_readme_runs(without_loading: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        without_loading(block)
    assert "tokens a pass" in capsys.readouterr().out
