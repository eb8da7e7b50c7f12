"""The command in a process of its own: what it prints, and that SIGTERM loses nothing that was accepted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Ran, run  # noqa: F401
from tests.serve.support import sse


def test_a_drain_under_load_loses_nothing(tiny_path: Path, tmp_path: Path) -> None:
    keys, config = tmp_path / "keys.txt", tmp_path / "serve.toml"
    keys.write_text("ann a-long-enough-key\n")
    config.write_text(f'target = "{tiny_path}"\nport = 1\nmax_waiting = 77\ndraft = "ngram"\ndtype = "float32"\n')
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--config", config, "--api-key-file", keys]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        ready = process.stdout.readline()
        assert ready.startswith("outrider: ready on http://127.0.0.1:"), process.stderr.read()
        url = ready.split()[-1]
        headers = {"authorization": "Bearer a-long-enough-key"}
        body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
        streams: dict[int, Any] = {}
        begun = threading.Barrier(5)

        def ask(number: int) -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
                parts = response.iter_text()
                text = next(parts)
                begun.wait(30)
                streams[number] = sse(text + "".join(parts))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(30)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert process.wait(30) == 0
        said = process.stderr.read()
    finally:
        process.kill()
        process.wait()
    assert len(streams) == 4
    for events in streams.values():
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert events[-2]["metrics"]["outrider"]["committed"] == 199
    assert "max_waiting = 77" in said and "port = 0" in said and "SIGTERM: running requests are finished first" in said
    assert "a-long-enough-key" not in said and "Traceback" not in said and "status=200" in said and "scope=ann" in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], "port 70000"),
        (["--host", "203.0.113.7", "--port", "0"], "cannot be had"),
        (["--tool-format", "hermse"], "hermes"),
        (["--api-key-file", "/nothing/here"], "cannot be read"),
        (["--max-waiting", "0"], "max_waiting 0"),
        (["--draft", "nonsense", "--offline"], "nonsense"),
    ],
)
def test_mistakes_are_one_line(run: Callable[..., Ran], tiny_path: Path, argv: list[str], words: str) -> None:  # noqa: F811
    ran = run("serve", "--target", tiny_path, "--port", "0", *argv)
    assert ran.status == 2 and words in ran.err and ran.err.count("\n") == 1, ran.err


def test_help_teaches(run: Callable[..., Ran]) -> None:  # noqa: F811
    out = run("serve", "--help").out
    assert "Examples" in out and "curl localhost:8000" in out and "OUTRIDER_API_KEYS" in " ".join(out.split())


def test_a_config_key_that_is_no_setting_of_a_server(run: Callable[..., Ran], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "serve.toml").write_text("temperature = 1.0\n")
    assert "'temperature' is unknown" in run("serve", "--config", tmp_path / "serve.toml").err
