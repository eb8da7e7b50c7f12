"""SIGTERM to the command under load: what runs and what waits is finished, whoever comes later is told so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import gguf
from benchmarks.load.process import serving
from benchmarks.serve_drain import drain

from tests.models import _files


def test_nothing_accepted_is_lost(tmp_path: Path) -> None:
    shape = _files.config(max_positions=512)
    tensors = _files.random_tensors(shape)
    path = _files.write_gguf(tmp_path / "tiny.gguf", shape, tensors, kind=gguf.GGMLQuantizationType.F32)
    flags = ["--target", str(path), "--dtype", "float32", "--draft", "ngram", "--max-batch-size", "3", "--threads", "1"]
    with serving(flags, log=tmp_path / "server.log") as server:
        found = asyncio.run(drain(server, num_streams=3, tokens=400, patience_s=120))
    assert found["running"] == found["waiting"] == 3 and found["finished"] == 6 and found["later"]["503"] > 0
    said = server.log.read_text(encoding="utf-8")
    assert "running requests are finished first" in said and "Traceback" not in said
