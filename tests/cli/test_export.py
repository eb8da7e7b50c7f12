"""``outrider export`` and ``outrider import``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import HeadInfo, save_head
from outrider.models.load import load_checkpoint
from tests.cli.conftest import Ran

Run = Callable[..., Ran]


@pytest.fixture
def head(tmp_path: Path, tiny_gguf: Path) -> Path:
    """A random head of the tiny model, which knows its target by path."""
    checkpoint = load_checkpoint(tiny_gguf)
    made = EagleHead(EagleConfig.for_target(checkpoint.config, draft_vocab_size=50, tap_layers=(0, 1, 2)))
    made.initialise(range(50), seed=1)
    save_head(tmp_path / "head", made, HeadInfo(target_name=str(tiny_gguf), target_fingerprint=checkpoint.fingerprint))
    return tmp_path / "head"


def test_out_checked_and_back(run: Run, head: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    shown = run("export", head, "--to", "vllm", "--out", out)
    assert shown.status == 0 and shown.err == ""
    lines = shown.out.splitlines()
    assert "used     eagle_aux_hidden_state_layer_ids = [0, 1, 2] (taps: residual stream before layer i)" in lines
    assert 'ignored  torch_dtype = "float32" (a head runs in the target\'s precision)' in lines
    assert lines[-2] == f"{out}: sound for vllm 0.32.0" and lines[-1].startswith("vllm serve MODEL ")
    assert run("import", out, "--check").out.splitlines() == lines[:-1]
    imported = run("import", out, "--out", back)
    assert imported.status == 0 and imported.out.startswith(f"{back}: 15 tensors, for target ")
    for name in ("model.safetensors", "config.json"):
        assert (back / name).read_bytes() == (head / name).read_bytes()


def test_json(run: Run, head: Path, tmp_path: Path) -> None:
    [row] = run("export", head, "--to", "vllm", "--out", tmp_path / "out", "--with-embedding", "--json").rows
    assert row["is_sound"] and len(row["tensors"]) == 16 and row["problems"] == []
    [row] = run("import", tmp_path / "out", "--out", tmp_path / "back", "--json").rows
    assert row["tensors"] == 16 and row["head"] == str(tmp_path / "back")


def test_an_unsound_folder_is_status_1(run: Run, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("export", head, "--to", "vllm", "--out", out)
    values: dict[str, Any] = json.loads((out / "config.json").read_text())
    del values["norm_output"]
    (out / "config.json").write_text(json.dumps(values))
    shown = run("import", out, "--check")
    assert shown.status == 1 and "problem: key norm_output is missing" in shown.out
    assert shown.out.splitlines()[-1] == f"{out}: not sound for vllm 0.32.0"


def test_mistakes_are_one_line(run: Run, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for argv, text in (
        (("export", head, "--to", "vlm", "--out", out), "did you mean 'vllm'"),
        (("export", head, "--to", "sglang", "--out", out), "sglang 0.5.23 cannot run this head: tap_layers holds 0"),
        (("export", head, "--to", "vllm", "--out", head), "which no export wrote"),
        (("export", tmp_path, "--to", "vllm", "--out", out), "holds no config.json"),
        (("export", head, "--to", "vllm", "--out", out, "--target", "nowhere"), "nowhere"),
        (("import", head, "--out", out), "head of Outrider's own already"),
        (("import", head), "give either --out"),
        (("import", head, "--out", out, "--check"), "give either --out"),
        (("import", head, "--out", out, "--from", "tgi"), "engine 'tgi' is unknown"),
    ):
        ran = run(*argv)
        assert ran.status == 2 and ran.out == "" and text in ran.err and ran.err.count("\n") == 1, ran.err
    assert not out.exists()
