"""The fixed subset, conversion of raw rows, and the checks that hold both to their pins."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.prompts import GROUPS, OWN_GROUPS, load_group, subset
from benchmarks.sources import (
    SOURCES,
    RawFile,
    Source,
    content_digest,
    convert_bfcl,
    convert_human_eval,
    convert_spec_bench,
    fetch_rows,
    git_blob_sha1,
    read_jsonl,
)

from benchmarks import prompts
from outrider.errors import DataError

BFCL_RAW: dict[str, Any] = {
    "id": "live_simple_7-3-0",
    "question": [[{"role": "user", "content": "Is it warm in Oslo?"}]],
    "function": [
        {
            "name": "weather.now",
            "description": "Weather of a place.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "place": {"type": "string"},
                    "limit": {"type": "float"},
                    "type": {"type": "tuple", "items": {"type": "dict", "properties": {}}},
                },
                "required": ["place"],
            },
        }
    ],
}


def test_subset_names_ids_only_and_the_agreed_numbers() -> None:
    assert {name: len(entry["ids"]) for name, entry in subset().items()} == {
        "spec_bench": 30,
        "humaneval": 10,
        "tool_calls": 10,
        "copy_heavy": 10,
        "prose": 10,
    }
    assert set(subset()) == set(GROUPS)
    assert all(set(entry) == {"ids", "sha256", "full_sha256"} for entry in subset().values())


@pytest.mark.parametrize("group", OWN_GROUPS)
def test_own_prompts_are_the_pinned_ones(group: str) -> None:
    rows = load_group(group)
    assert len(rows) == 10
    assert all(row.messages[-1]["role"] == "user" and row.tools is None for row in rows)


def test_an_altered_prompt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read_jsonl((prompts.HERE / "data" / "prose.jsonl").read_bytes(), "prose")
    rows[3]["messages"][0]["content"] += " "
    altered = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prose.jsonl").write_text(altered, encoding="utf-8")
    pinned = subset()
    monkeypatch.setattr(prompts, "subset", lambda: pinned)
    monkeypatch.setattr(prompts, "HERE", tmp_path)
    with pytest.raises(DataError, match="not the pinned ones"):
        load_group("prose")


def test_a_missing_file_an_unknown_group_and_a_missing_id_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"humaneval\.jsonl cannot be read"):
        load_group("humaneval", traffic=tmp_path)
    with pytest.raises(DataError, match="allowed: spec_bench"):
        load_group("poems")
    (tmp_path / "humaneval.jsonl").write_text('{"id": "humaneval/0"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="lack 10 ids of the subset, first 'humaneval/5'"):
        load_group("humaneval", traffic=tmp_path)


def test_broken_lines_are_named_by_number() -> None:
    with pytest.raises(DataError, match="file line 3 is not JSON"):
        read_jsonl(b'{"id": 1}\n\n{"id": \n', "file")
    with pytest.raises(DataError, match="file line 1 is not a JSON object"):
        read_jsonl(b"[1]\n", "file")


def test_spec_bench_rows() -> None:
    raw = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["x"]}
    row = convert_spec_bench(raw)
    assert row["id"] == "spec_bench/81"
    assert row["category"] == "multi_turn"
    assert row["messages"] == [{"role": "user", "content": "Write."}]
    assert row["turns"] == ["Write.", "Again."]
    plain = convert_spec_bench({"question_id": 321, "category": "qa", "turns": ["Who?"]})
    assert plain["category"] == "qa"
    assert "turns" not in plain


def test_the_private_address_is_masked_and_outside_the_digest() -> None:
    raw = {"question_id": 316, "category": "summarization", "turns": ["Mail a.b@example.co.uk. Thanks."]}
    row = convert_spec_bench(raw)
    assert row["messages"][0]["content"] == "Mail [email removed]. Thanks."
    assert content_digest([row]) == content_digest([])
    other = convert_spec_bench(raw | {"question_id": 317})
    assert other["messages"][0]["content"] == raw["turns"][0]


def test_human_eval_rows() -> None:
    row = convert_human_eval({"task_id": "HumanEval/12", "prompt": "def f():\n    pass\n", "test": ""})
    assert row["id"] == "humaneval/12"
    assert row["messages"][0]["content"].endswith("\n\n```python\ndef f():\n    pass\n```")


def test_bfcl_rows_become_openai_tools() -> None:
    row = convert_bfcl(BFCL_RAW)
    function = row["tools"][0]["function"]
    assert (row["id"], row["category"]) == ("bfcl/live_simple_7-3-0", "tool_call/live_simple")
    assert function["name"] == "weather_now"
    properties = function["parameters"]["properties"]
    assert function["parameters"]["type"] == "object"
    assert properties["limit"] == {"type": "number"}
    assert properties["type"] == {"type": "array", "items": {"type": "object", "properties": {}}}
    assert convert_bfcl(BFCL_RAW | {"id": "parallel_multiple_196"})["category"] == "tool_call/parallel_multiple"


def test_digest_sees_what_is_measured_and_nothing_else() -> None:
    row = {"id": "a", "messages": [{"role": "user", "content": "x"}], "tools": None, "reference": "y"}
    same = content_digest([row, row | {"id": "b"}])
    assert same == content_digest([row | {"id": "b", "reference": "z"}, row])
    assert same != content_digest([row, row | {"id": "b", "messages": []}])
    assert same != content_digest([row, row | {"id": "b", "tools": []}])


def _raw_source(tmp_path: Path, data: bytes, name: str, sha1: str | None) -> Source:
    place = tmp_path / "remote"
    place.write_bytes(data)
    return Source(
        name="made_up", files=(RawFile(name=name, urls=(place.as_uri(),), blob_sha1=sha1),), convert=convert_spec_bench
    )


def test_fetch_checks_converts_and_caches(tmp_path: Path) -> None:
    data = b'{"question_id": 400, "category": "qa", "turns": ["Who?"]}\n'
    source = _raw_source(tmp_path, data, "q.jsonl", git_blob_sha1(data))
    cache = tmp_path / "cache"
    assert [row["id"] for row in fetch_rows(source, folder=cache)] == ["spec_bench/400"]
    (tmp_path / "remote").unlink()
    assert [row["id"] for row in fetch_rows(source, folder=cache)] == ["spec_bench/400"]
    (cache / "q.jsonl").write_bytes(data + b"\n")
    with pytest.raises(DataError, match="not the pinned file"):
        fetch_rows(source, folder=cache)


def test_fetch_unpacks_gzip_and_refuses_another_file(tmp_path: Path) -> None:
    data = gzip.compress(b'{"question_id": 401, "category": "qa", "turns": ["Why?"]}\n')
    rows = fetch_rows(_raw_source(tmp_path, data, "q.jsonl.gz", None), folder=tmp_path / "cache")
    assert [row["id"] for row in rows] == ["spec_bench/401"]
    wrong = _raw_source(tmp_path, data, "r.jsonl.gz", "0" * 40)
    with pytest.raises(DataError, match="give --traffic DIR"):
        fetch_rows(wrong, folder=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_git_hash_is_gits() -> None:
    assert git_blob_sha1(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_public_sources_are_pinned_by_full_commit_or_by_git_blob() -> None:
    for source in SOURCES.values():
        for file in source.files:
            assert file.blob_sha1 is not None or all(len(url.split("/")[5]) == 40 for url in file.urls), file
    assert SOURCES["spec_bench"].files[0].blob_sha1 == "2498d09719b92937c9408f9d7e6efbeaaceb0413"
