"""A peer that needs nothing: a real process that counts on from the prompt's last token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.setups import DRIVERS, Ready

COUNTING = f"""
import os, sys, time
sys.path.insert(0, {str(DRIVERS)!r})
from wire import cut, serve

def load(start):
    options = start["options"]
    if options.get("fails"):
        raise RuntimeError("no such weights")
    print("libraries print to standard output")
    def answer(request):
        if not request:
            return dict(read_gb_per_s=1.0, bf16_tflop_per_s=1.0)
        if options.get("dies"):
            os._exit(3)
        if options.get("hangs"):
            time.sleep(60)
        if options.get("refuses"):
            raise ValueError("too long")
        begun = time.perf_counter()
        outputs = [[(p[-1] + i) % 50 for i in range(1, request["max_tokens"] + 1)] for p in request["prompts"]]
        answers = [dict(tokens=cut(each, request["stop_ids"]), first_s=1e-6) for each in outputs]
        return dict(answers=answers, wall_s=time.perf_counter() - begun + 1e-3, passes=3, process=os.getpid())
    return answer, dict(versions=dict(counting="1.0"), note="counts")

serve(load)
"""


@pytest.fixture
def counting(tmp_path: Path) -> Any:
    """Makes a ready arm of the counting peer."""
    script = tmp_path / "drive_counting.py"
    script.write_text(COUNTING, encoding="utf-8")

    def ready(**options: Any) -> Ready:
        return Ready(python=Path(sys.executable), driver=script, model="none", options=options)

    return ready
