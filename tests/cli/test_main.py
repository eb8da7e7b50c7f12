"""How mistakes are reported, by the real command in a process of its own where the exit status matters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import outrider
from outrider.cli import main as main_module
from tests.cli.conftest import Ran


def command(*argv: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "outrider", *map(str, argv)],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


def assert_one_line(err: str, *words: str) -> None:
    assert err.startswith("outrider: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


@pytest.mark.parametrize("argv", [["--help"], ["generate", "-h"], ["demo", "--help"], ["models", "--help"]])
def test_help_teaches(run: Callable[..., Ran], argv: list[str]) -> None:
    ran = run(*argv)
    assert ran.status == 0 and "Usage: outrider" in ran.out
    assert argv[0].startswith("-") or f"outrider {argv[0]}" in ran.out.split("Examples")[1]


@pytest.mark.parametrize("name", ["law", "identity"])
def test_help_of_audits_teaches(run: Callable[..., Ran], name: str) -> None:
    ran = run("audit", name, "--help")
    assert ran.status == 0 and f"outrider audit {name}" in ran.out.split("Examples")[1]


def test_version(run: Callable[..., Ran]) -> None:
    assert run("--version").out == f"outrider {outrider.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "hi", "--temprature", "1"], ["--temprature", "--temperature", "outrider generate --help"]),
        (["generate", "hi", "--top-k", "x"], ["--top-k", "integer"]),
        (["genrate"], ["genrate"]),
        (["generate", "hi", "--temperature", "-1"], ["temperature -1.0", "0 to 100"]),
        (["generate", "hi", "-k", "-1"], ["num_draft_tokens -1", "0 to 128"]),
        (["generate", "hi", "-k", "1000"], ["num_draft_tokens 1000"]),
        (["generate", "hi", "--min-tokens", "9", "--max-tokens", "3"], ["min_tokens 9", "max_tokens (3)"]),
        (["generate", "hi", "--n", "2"], ["n 2", "temperature 0"]),
        (["generate", "hi", "--logit-bias", "x=y"], ["ID=NUMBER"]),
        (["generate", "hi", "--show-drafts", "--json"], ["--show-drafts"]),
        (["generate", "hi", "--format", "csv"], ["csv", "jsonl"]),
        (["generate", "hi", "--target", "smollm"], ["smollm2-135m-instruct"]),
        (["generate", "hi", "--target", "/nothing/here.gguf"], ["/nothing/here.gguf does not exist"]),
        (["generate", "hi", "--dtype", "float16"], ["float16", "bfloat16"]),
        (["generate", "hi", "--threads", "0"], ["threads 0"]),
        (["generate", "hi", "--tool-rendering", "xml"], ["xml", "template, system"]),
        (["generate", "--file", "/nothing.jsonl"], ["/nothing.jsonl cannot be read"]),
        (["generate", "hi", "--config", "/nothing.toml"], ["/nothing.toml cannot be read"]),
        (["generate", "-"], ["standard input is empty"]),
        (["demo", "--draft", "none"], ["none"]),
        (["demo", "--temperature", "1"], ["--seed"]),
        (["audit", "law", "--cases", "1"], ["1 cases"]),
        (["audit", "identity", "--seeds", "-1"], ["--seeds -1"]),
        (["audit", "identity", "--file", "/nothing.jsonl"], ["/nothing.jsonl"]),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run: Callable[..., Ran], argv: list[str], words: list[str]) -> None:
    ran = run(*argv)
    assert ran.status == 2 and ran.out == ""
    assert_one_line(ran.err, *words)


def test_a_command_without_arguments_shows_its_help(run: Callable[..., Ran]) -> None:
    ran = run("generate")
    assert ran.status == 2 and "Examples" in ran.out + ran.err


def test_ctrl_c_exits_with_130(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.models._auto", interrupt)
    assert run("models").status == 130


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise AssertionError("broken invariant")

    monkeypatch.setattr("outrider.cli.models._auto", fail)
    with pytest.raises(AssertionError, match="broken invariant"):
        main_module.main(["models"])


def test_the_real_command_exits_with_2() -> None:
    done = command("generate", "hi", "--temprature", "1")
    assert done.returncode == 2
    assert_one_line(done.stderr, "--temprature")
    done = command("generate", "hi", "--target", "nothing-like-this")
    assert done.returncode == 2
    assert_one_line(done.stderr, "nothing-like-this")


def test_a_reader_that_goes_away_is_no_traceback(tiny_gguf: Path) -> None:
    script = f"{sys.executable} -m outrider generate x --target {tiny_gguf} --json | true; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.strip() in ("0", "1") and "Traceback" not in done.stderr
