"""A run that is killed outright leaves whole lines, and the same command finishes the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NUM_ROWS = 40


def test_a_killed_run_goes_on_where_it_stopped(tiny_gguf: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"prompt {i}"}) + "\n" for i in range(NUM_ROWS)))
    command = [
        sys.executable,
        "-m",
        "outrider",
        "generate",
        "-f",
        str(rows),
        "-o",
        str(out),
        "--target",
        str(tiny_gguf),
    ]
    command += ["--dtype", "float32", "--threads", "1", "--batch-size", "1", "-t", "60", "--ignore-eos"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        if out.exists() and out.read_bytes().count(b"\n") >= 3:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    process.communicate(timeout=30)
    before = out.read_bytes()
    assert process.returncode == -signal.SIGKILL and 3 <= before.count(b"\n") < NUM_ROWS
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert "prompts are done already" in again.stderr
    after = out.read_bytes()
    assert after.startswith(before[: before.rindex(b"\n") + 1])
    assert [json.loads(line)["id"] for line in after.splitlines()] == [f"r{i}" for i in range(NUM_ROWS)]
