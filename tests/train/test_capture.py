"""Stored states are the live ones; shards go on after an interruption, and damage is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outrider.cache.dense import DenseCache
from outrider.errors import ConfigError, DataError
from outrider.models.base import PackedRows
from outrider.models.llama import LlamaTarget
from outrider.train import capture
from outrider.train.capture import LiveStates, StoredStates, capture_shards
from outrider.train.corpus import Text
from outrider.train.packing import TextStates, rows_of

TAPS = (1, 2, 4)
BUDGET = 10**9


def live_of(target: LlamaTarget) -> LiveStates:
    return LiveStates(target=target, tap_layers=TAPS, num_law_tokens=6)


def same(left: list[TextStates], right: list[TextStates]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(
        torch.equal(a.taps_SD, b.taps_SD)
        and torch.equal(a.law_ids_QK, b.law_ids_QK)
        and torch.equal(a.law_probs_QK, b.law_probs_QK)
        for a, b in pairs
    )


def close(left: list[TextStates], right: list[TextStates]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(
        torch.allclose(a.taps_SD, b.taps_SD, atol=1e-5) and torch.equal(a.law_ids_QK, b.law_ids_QK) for a, b in pairs
    )


def test_states_are_the_targets(target: LlamaTarget, texts: list[Text]) -> None:
    text = texts[3]
    [state] = live_of(target).states([text])
    rows = rows_of(text)
    cache: DenseCache = target.new_cache()
    packed = PackedRows.pack([text.tokens], slots=[cache.allocate(4)], starts=[0], device=torch.device("cpu"))
    result = target.forward(packed, cache, taps=TAPS)
    taps = torch.cat([result.taps[layer] for layer in TAPS], dim=-1)
    torch.testing.assert_close(state.taps_SD, taps[: rows.num_keys], rtol=1e-4, atol=1e-5)
    laws = result.logits_RV.softmax(-1)[[query + 1 for query in rows.queries]].topk(6, dim=-1)
    assert torch.equal(state.law_ids_QK.long(), laws.indices)
    torch.testing.assert_close(state.law_probs_QK.float(), laws.values, rtol=1e-3, atol=1e-3)


def test_stored_is_live(
    target: LlamaTarget, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_SHARD_BYTES", 20_000)
    monkeypatch.setattr(capture, "_ROWS_A_PASS", 64)
    live = live_of(target)
    done: list[int] = []
    stored = capture_shards(tmp_path, texts, live, disk_budget_bytes=BUDGET, on_texts=done.append)
    assert done[-1] == len(texts) and len(list(tmp_path.glob("shard-*"))) > 2
    expected = [state for text in texts for state in live.states([text])]
    found = stored.states(texts[::-1])[::-1]
    assert close(expected, found)
    forecast = live.stored_bytes(texts)
    assert forecast == pytest.approx(stored.num_bytes, rel=0.1)


def test_capture_goes_on(
    target: LlamaTarget, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_SHARD_BYTES", 20_000)
    monkeypatch.setattr(capture, "_ROWS_A_PASS", 64)
    whole = capture_shards(tmp_path / "whole", texts, live_of(target), disk_budget_bytes=BUDGET)

    class Stop(Exception):
        pass

    def stop_late(done: int) -> None:
        if done >= 9:
            raise Stop

    with pytest.raises(Stop):
        capture_shards(tmp_path / "cut", texts, live_of(target), disk_budget_bytes=BUDGET, on_texts=stop_late)
    before = len(json.loads((tmp_path / "cut" / "manifest.json").read_text())["shards"])
    assert 0 < before < len(json.loads((tmp_path / "whole" / "manifest.json").read_text())["shards"])
    resumed: list[int] = []
    again = capture_shards(tmp_path / "cut", texts, live_of(target), disk_budget_bytes=BUDGET, on_texts=resumed.append)
    assert resumed[0] > 0
    assert same(whole.states(texts), again.states(texts))


def test_more_texts_are_added_to_those_captured(target: LlamaTarget, texts: list[Text], tmp_path: Path) -> None:
    capture_shards(tmp_path, texts[:4], live_of(target), disk_budget_bytes=BUDGET)
    [first] = tmp_path.glob("shard-*")
    before = first.read_bytes()
    done: list[int] = []
    wanted = [*texts[5:], *texts[1:4]]
    stored = capture_shards(tmp_path, wanted, live_of(target), disk_budget_bytes=BUDGET, on_texts=done.append)
    assert done[0] == 3 and done[-1] == len(wanted)
    assert first.read_bytes() == before and len(list(tmp_path.glob("shard-*"))) == 2
    total = stored.num_bytes
    with pytest.raises(ConfigError, match=r"--disk-budget of .* GB, of which .* GB are taken"):
        capture_shards(tmp_path, texts, live_of(target), disk_budget_bytes=total + 100)
    assert close(stored.states(wanted), [live_of(target).states([text])[0] for text in wanted])


def test_refusals(target: LlamaTarget, texts: list[Text], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs .* GB, more than the --disk-budget"):
        capture_shards(tmp_path / "a", texts, live_of(target), disk_budget_bytes=1000)
    assert not list((tmp_path / "a").glob("shard-*"))
    capture_shards(tmp_path / "b", texts, live_of(target), disk_budget_bytes=BUDGET)
    other = LiveStates(target=target, tap_layers=(0, 2, 4), num_law_tokens=6)
    with pytest.raises(DataError, match=r"tap_layers = \[1, 2, 4\], now it is \[0, 2, 4\]"):
        capture_shards(tmp_path / "b", texts, other, disk_budget_bytes=BUDGET)
    [shard] = (tmp_path / "b").glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="missing or damaged"):
        StoredStates(tmp_path / "b", texts).states(texts[:1])
