"""The 1B shape: files that hold the weights, decoding that is one pass a token, the summary, the whole script on a tiny shape."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from benchmarks.make_docs import render
from benchmarks.native_pass import LLAMA_1B, CheapWeights
from benchmarks.shape_1b import decoding_rate, main, result_of, tensor_names, write_gguf

from benchmarks import shape_1b as script
from outrider.device import Placement
from outrider.models.native import NativeTarget
from outrider.native.library import Unavailable, library

TINY = replace(
    LLAMA_1B,
    vocab_size=300,
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=32,
    max_positions=2048,
)
SOURCE = CheapWeights(config=TINY, seed=0)


@pytest.fixture
def native() -> Iterator[None]:
    """The native path, and torch's number of threads as it was afterwards."""
    try:
        library()
    except Unavailable as error:
        pytest.skip(f"the native library is not there: {error}")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_file_holds_the_shape_and_the_weights(tmp_path: Path) -> None:
    write_gguf(SOURCE, tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {name for _, name in tensor_names(TINY)}
    assert len(tensors) == 2 + 9 * TINY.num_layers
    for ours, theirs in tensor_names(TINY):
        weight, found = SOURCE.tensor(ours), tensors[theirs]
        assert tuple(reversed(found.shape.tolist())) == tuple(weight.shape) == SOURCE.shape(ours)
        wide = gguf.quants.dequantize(found.data, found.tensor_type)
        assert np.array_equal(wide, (weight.bfloat16().float() if weight.dim() == 2 else weight).numpy()), theirs
    assert tensors["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.BF16
    assert tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    for key, value in (("block_count", 2), ("attention.head_count_kv", 2), ("vocab_size", 300)):
        assert reader.get_field(f"llama.{key}").contents() == value


@pytest.mark.usefixtures("native")
def test_decoding_is_one_pass_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    target = NativeTarget(SOURCE, Placement(device=torch.device("cpu"), precision="int8"), num_threads=1)
    calls: list[int] = []
    whole = target.forward_greedy

    def counted(rows: Any, cache: Any) -> Any:
        calls.append(int(rows.positions_R[0]))
        return whole(rows, cache)

    monkeypatch.setattr(target, "forward_greedy", counted)
    assert decoding_rate(target, 5) > 0
    assert calls == [0, 1, 2, 3, 4]


def _turns() -> list[dict[str, Any]]:
    passes = {"stream": [10.0, 10.0], "native 1": [11.0, 11.0], "native 8": [14.0, 14.0]}
    each = {"ours": 90.0, "theirs": 60.0, "passes": passes}
    return [{"bfloat16": each, "int8": {**each, "theirs": 100.0}}] * 3


def test_rates_and_passes_meet_or_miss_their_bars() -> None:
    result = result_of(_turns(), {"bfloat16": 2_000_000_000, "int8": 1_000_000_000})
    verdicts = {
        bar["name"].partition(", ")[0] + bar["name"].rpartition(":")[2]: bar["verdict"] for bar in result["bars"]
    }
    assert verdicts == {
        "bfloat16 1 row over reading the weights": "met",
        "bfloat16 8 rows over 1": "missed",
        "bfloat16 decoding over llama.cpp BF16": "met (fewer than 20 pairs)",
        "int8 1 row over reading the weights": "met",
        "int8 8 rows over 1": "missed",
        "int8 decoding over llama.cpp Q8_0": "missed (fewer than 20 pairs)",
    }
    assert [each["ratio"]["value"] for each in result["results"]] == [1.5, 0.9]
    assert result["results"][0]["one_row_over_stream"]["pairs"] == 6


STAND_IN = """#!{python}
import json, pathlib, shutil, sys
arguments = sys.argv[1:]
if "quantize" in sys.argv[0]:
    shutil.copy(arguments[0], arguments[1])
else:
    assert pathlib.Path(arguments[arguments.index("-m") + 1]).read_bytes()[:4] == b"GGUF"
    assert arguments[arguments.index("-n") + 1] == "3"
    print(json.dumps([dict(avg_ts=1000.0)]))
"""


class StandIn:
    """Where llama.cpp's programs would be: one that copies, and one that reads a file and prints a rate."""

    def __init__(self, folder: Path, *, jobs: int) -> None:
        self._folder = folder

    def server(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in ("llama-quantize", "llama-bench"):
            self.binary(name).write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
            self.binary(name).chmod(0o755)
        return self.binary("llama-server")

    def binary(self, name: str) -> Path:
        return self._folder / name


@pytest.mark.usefixtures("native")
def test_the_script_runs_and_leaves_no_model_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "LlamaCpp", StandIn)
    monkeypatch.setattr(script, "LLAMA_1B", TINY)
    arguments = ["--root", str(tmp_path / "root"), "--work", str(tmp_path / "work"), "--turns", "2", "--tokens", "3"]
    arguments += ["--layers", "2", "--passes", "1", "--threads", "1", "--out", str(tmp_path / "shape_1b.json")]
    assert main(arguments) == 0
    assert list((tmp_path / "work").iterdir()) == []
    result = json.loads((tmp_path / "shape_1b.json").read_text(encoding="utf-8"))
    assert [each["llamacpp_tokens_per_s"]["median"] for each in result["results"]] == [1000.0, 1000.0]
    assert len(result["raw"]) == 2
    assert all(len(turn["int8"]["passes"]["native 8"]) == 1 for turn in result["raw"])
    page = render("<!-- benchmarks:shape_1b -->\n<!-- /benchmarks -->\n", tmp_path)
    assert "| Q8_0: 1000.0 (1000.0 to 1000.0) |" in page
    assert "- bfloat16, shape of Llama 3.2 1B: 8 rows over 1: " in page
    assert main([*arguments, "--keep"]) == 0
    [kept] = (tmp_path / "work").iterdir()
    assert {path.suffix for path in kept.iterdir()} >= {".gguf"}


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1_000_000_000})())
    assert main(["--work", str(tmp_path), "--threads", str(torch.get_num_threads())]) == 2
    assert "has 1.0 GB free, 4.0 are needed; name another --work" in capsys.readouterr().err
