"""Driver processes: the conversation, standing still between turns, and every way in which one can fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.installs import NotAvailable
from benchmarks.peers.process import Driver, DriverError

START = {"threads": 1, "streams": 1, "context": 64}
REQUEST = {"prompts": [[4, 7], [9]], "max_tokens": 4, "stop_ids": [10]}


def _driver(ready: Any, tmp_path: Path, *, request_s: float = 20) -> Driver:
    return Driver(ready, START, log=tmp_path / "logs" / "arm.log", start_s=20, request_s=request_s)


def test_a_driver_answers_and_stands_still_between_turns(counting: Any, tmp_path: Path) -> None:
    driver = _driver(counting(), tmp_path)
    try:
        assert driver.about["versions"] == {"counting": "1.0"}
        assert driver.is_stopped()
        replies = [driver.ask(REQUEST) for _ in range(2)]
        assert driver.is_stopped()
    finally:
        driver.close()
    assert [answer["tokens"] for answer in replies[0]["answers"]] == [[8, 9, 10], [10]]
    assert replies[0]["process"] == replies[1]["process"]
    assert "libraries print" in (tmp_path / "logs" / "arm.log").read_text(encoding="utf-8")


def test_an_arm_that_does_not_load_is_not_available(counting: Any, tmp_path: Path) -> None:
    with pytest.raises(NotAvailable, match=r"RuntimeError: no such weights \(log: .*arm\.log\)"):
        _driver(counting(fails=True), tmp_path)


@pytest.mark.parametrize(
    ("option", "text"),
    [("dies", "ended without an answer"), ("refuses", "ValueError: too long"), ("hangs", "no answer")],
)
def test_failures_in_a_turn_are_named(counting: Any, tmp_path: Path, option: str, text: str) -> None:
    driver = _driver(counting(**{option: True}), tmp_path, request_s=1.0 if option == "hangs" else 20)
    try:
        with pytest.raises(DriverError, match=text):
            driver.ask(REQUEST)
    finally:
        driver.close()
    with pytest.raises(DriverError):
        driver.ask(REQUEST)


PARENT = """
import os, sys
from pathlib import Path
from benchmarks.peers.process import Driver
from benchmarks.peers.setups import Ready
ready = Ready(python=Path(sys.executable), driver=Path(sys.argv[1]), model="", options={})
start = dict(threads=1, streams=1, context=8)
driver = Driver(ready, start, log=Path(sys.argv[2]), start_s=20, request_s=20)
print(driver.ask(dict(prompts=[[1]], max_tokens=2, stop_ids=[]))["process"], flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux's")
def test_a_standing_driver_ends_with_the_run_that_is_killed(counting: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(counting().driver), str(tmp_path / "arm.log")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    driver_id = int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    deadline = time.monotonic() + 10
    while _is_alive(driver_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(driver_id)


def _is_alive(process_id: int) -> bool:
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
