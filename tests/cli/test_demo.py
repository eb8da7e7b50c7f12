"""``outrider demo`` on a tiny model, and once on the real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]


def test_the_demo_compares_and_proves(run: Run, wide_gguf: Path) -> None:
    ran = run("demo", "--quick", "--target", wide_gguf, "--dtype", "float32", "-t", 24, "--draft", "ngram")
    assert ran.status == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].startswith("target ") and "float32" in lines[0]
    [head] = [line.split() for line in lines if line.startswith("prompt ")]
    assert head == ["prompt", "tokens", "plain", "spec.", "tok/pass", "accepted", "predicted", "measured", "output"]
    assert sum(line.endswith("identical") for line in lines) == 4
    assert "All 3 outputs are identical" in ran.out


def test_the_demo_as_json(run: Run, wide_gguf: Path) -> None:
    ran = run("demo", "--target", wide_gguf, "--dtype", "float32", "-t", 6, "--json", "--temperature", 1, "--seed", 4)
    report = json.loads(ran.out)
    assert report["is_lossless"] and report["repeats"] == 2 and len(report["prompts"]) == 5
    assert report["overall"]["num_tokens"] == sum(pair["num_tokens"] for pair in report["prompts"])
    assert report["settings"]["sampling"]["temperature"] == 1.0
    assert all(pair["measured"] > 0 and pair["predicted"] > 0 for pair in report["prompts"])


def test_a_broken_verifier_ends_the_demo_with_1(
    run: Run, wide_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.engine import judge
    from outrider.types import Verdict

    honest = judge.verify

    def keeps_all(proposals, laws):  # type: ignore[no-untyped-def]
        verdicts = honest(proposals, laws)
        return [
            Verdict(path=tuple(range(len(p))), next_token=v.next_token)
            for p, v in zip(proposals, verdicts, strict=True)
        ]

    monkeypatch.setattr(judge, "verify", keeps_all)
    config = tmp_path / "always.toml"
    config.write_text('schedule = "fixed"\n')  # the planner would soon see that random drafts do not pay
    flags = ["--target", wide_gguf, "--dtype", "float32", "-t", 12, "--draft", "random", "--config", config]
    ran = run("demo", "--quick", *flags)
    assert ran.status == 1
    assert (
        "NOT lossless" in ran.out
        and "bug: " in ran.out
        and "first difference at output token" in ran.out
        and "control: " in ran.out
    )


@pytest.mark.real_model
def test_the_demo_on_the_real_model(run: Run) -> None:
    ran = run("demo", "--quick", "--threads", 1, "-t", 8, "--json")
    report = json.loads(ran.out)
    assert ran.status == 0 and report["is_lossless"]
    copying = [pair for pair in report["prompts"] if pair["kind"] == "copy"]
    assert copying and all(pair["tokens_per_pass"] >= 1 for pair in copying)
