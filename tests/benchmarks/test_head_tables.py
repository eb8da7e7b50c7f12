"""Tables about heads are rendered from results alone; what ablations share is linked; a changed target is another target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.ablations import BASE, Study, _share_taps
from benchmarks.make_docs import render
from benchmarks.perturbed_target import perturbed

from outrider.models.checkpoint import MemoryTensors
from outrider.models.load import load_checkpoint
from tests.models import _files

RUN: dict[str, Any] = {
    "started": "2026-11-30T12:00:00+00:00",
    "command": "python -m benchmarks.something",
    "git": {"commit": "0123456789abcdef"},
    "machine": {"processor": "abacus", "flags": ["avx2"], "threads": 1},
    "versions": {"torch": "2.13"},
}


def _variant(name: str, *agreement: float) -> dict[str, Any]:
    kept = [0.4, 0.2]
    return {"variant": name, "agreement_along_texts": agreement, "best": 1.5, "kept_at_depth": kept, "updates": 7}


def _counts(length: float) -> dict[str, Any]:
    return {"steps": 9, "accepted_length": length, "rates": [0.5, 0.25]}


def _measurement(temperature: float) -> dict[str, Any]:
    found = {"accepted_length": 1.8, "tokens_per_pass": 1.7, "per_position": [{"accepted": 1, "reached": 4}]}
    return {
        "drafter": "head",
        "num_draft_tokens": 4,
        "temperature": temperature,
        "prompts": {"qa": 5},
        "categories": {"qa": found, "all": found},
    }


_TOLD = {
    "verdict": "Healthy.",
    "acceptance": {"served": 1.75},
    "findings": [{"cause": "checkpoint", "status": "noted", "evidence": "another fingerprint"}],
}
_ARM = {"sampling": "greedy", "num_identical": 3, "num_outputs": 4}
RESULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ablations": (
        {
            "kind": "ablations",
            "positions": 1000,
            "results": [
                _variant("base", 0.4, 0.1),
                _variant("other", 0.5, 0.1),
                _variant("off-policy 0", 0.3, 0.0),
                _variant("off-policy 50", 0.2, 0.0),
            ],
            "long_run": [{"positions": 90000, "tokens_per_pass": 1.8, "agreement_along_texts": [0.5, 0.4]}],
        },
        [
            "| positions of the long run | 90,000 |\n|---|---|\n| along the texts | 1.90 |",
            "| other | 1.600 | +0.100 | 1.500 | 0.40 0.20 | 7 |\n| base | 1.500 |  |",
            "| off-policy 0 | 1.300 |  |",
            "| off-policy 50 | 1.200 | -0.100 |",
            "1,000 loss-masked positions",
        ],
    ),
    "interop_vllm": (
        {
            "kind": "interop_vllm",
            "counts": {"whole steps": {"outrider": _counts(1.8), "vllm": _counts(1.79)}},
            "gaps": {"whole steps": 0.01},
            "tolerance": 0.05,
            "agrees": True,
            "prompts": 5,
            "identical_outputs": 2,
            "shared_tokens": 77,
        },
        [
            "| whole steps | vllm | 9 | 1.790 | 0.500 | 0.250 |",
            "over whole steps: 0.05, met",
            "2 of 5 outputs identical",
        ],
    ),
    "temperatures": (
        {"kind": "temperatures", "measurements": [_measurement(0.0), _measurement(0.8)]},
        ["| head@4 | 0.8 | 1.80 (1.70) | 1.80 (1.70) | 0.25 |", "prompts: qa 5"],
    ),
    "changed_target": (
        {
            "kind": "perturbed",
            "results": [{"share": 0.05, "doctor": {"named": _TOLD}, "identity": {"arms": [_ARM]}}],
        },
        ["| 5% | named | 1.75 | noted | another fingerprint | greedy: 3 of 4 |"],
    ),
    "head_scenarios": (
        {"kind": "head_scenarios", "results": [{"check": "S15", "verdict": "passed", "seen": "a|b"}]},
        ["| S15 | passed | a\\|b |"],
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_tables(tmp_path: Path, name: str) -> None:
    result, expected = RESULTS[name]
    (tmp_path / f"{result['kind']}.json").write_text(json.dumps({**RUN, **result}), encoding="utf-8")
    text = render(f"<!-- benchmarks:{name} -->\n<!-- /benchmarks -->\n", tmp_path)
    for part in [*expected, "commit 0123456789; 2026-11-30; `python -m benchmarks.something`"]:
        assert part in text, text


def test_only_variants_of_the_same_layers_share_taps(tmp_path: Path) -> None:
    taps = tmp_path / "taps"
    taps.mkdir()
    (taps / "shard-00000.safetensors").write_bytes(b"states")
    manifest = taps / "manifest.json"
    manifest.write_text(json.dumps({"made_from": {"tap_layers": [2, 15, 27]}}), encoding="utf-8")
    study = Study(traffic=tmp_path, answers=tmp_path, taps=taps, work=tmp_path, positions=1, model="m", common=())
    for _ in range(2):  # once more where a run was cut off
        assert _share_taps(study, BASE, tmp_path / "base")
    shared = tmp_path / "base" / "training" / "taps"
    assert (shared / "shard-00000.safetensors").samefile(taps / "shard-00000.safetensors")
    assert (shared / "manifest.json").read_bytes() == manifest.read_bytes()
    assert not (shared / "manifest.json").samefile(manifest), "a run may write it anew"
    assert not _share_taps(study, BASE | {"--tap-layers": "9,20,30"}, tmp_path / "other")


def test_a_perturbed_target_is_another_one(tmp_path: Path) -> None:
    shape = _files.config()
    checkpoint = load_checkpoint(_files.write_folder(tmp_path, shape, _files.random_tensors(shape)))
    changed = perturbed(checkpoint, 0.05)
    assert changed.fingerprint != checkpoint.fingerprint and isinstance(changed.tensors, MemoryTensors)
    assert changed.fingerprint == perturbed(checkpoint, 0.05).fingerprint != perturbed(checkpoint, 0.06).fingerprint
    for name in checkpoint.tensor_names():
        before, after = checkpoint.tensor(name).float(), changed.tensor(name).float()
        if before.dim() == 1:
            assert torch.equal(before, after)
        else:
            noise = float((after - before).square().mean().sqrt() / before.square().mean().sqrt())
            assert noise == pytest.approx(0.05, rel=0.2), name
