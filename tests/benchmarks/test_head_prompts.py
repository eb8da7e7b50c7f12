"""Prompt sources of the shipped head: digests, converters on small files of the real form, and what is named when it differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.head_prompts import __main__ as command
from benchmarks.head_prompts.card import TITLE, section, write_section
from benchmarks.head_prompts.convert import CONVERTERS, candidates
from benchmarks.head_prompts.rebuild import build, fetched, from_folder
from benchmarks.head_prompts.table import TABLE, PromptSource, by_source, check_rows, digest, load_table, mark
from benchmarks.sources import read_jsonl

from outrider.errors import DataError

Row = dict[str, Any]

SUMS = [{"question": "Two and three?", "answer": "2+3=5\n#### 5"}, {"question": "One and one?", "answer": "#### 2"}]


def jsonl(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def sum_rows() -> list[Row]:
    return [
        {
            "id": f"gsm8k_train/{number}",
            "category": "math",
            "messages": [{"role": "user", "content": raw["question"]}],
            "reference": raw["answer"],
            "source": "sums",
        }
        for number, raw in enumerate(SUMS)
    ]


def sums(**changed: Any) -> PromptSource:
    rows = sum_rows()
    known: dict[str, Any] = {
        "name": "sums",
        "repository": "someone/sums",
        "commit": "0123456789abcdef",
        "files": ("data/sums.jsonl",),
        "licence": "MIT",
        "note": "a | b",
        "rows": len(rows),
        "sha256": digest(rows),
        "converter": "gsm8k",
        "marks": {row["id"]: mark(row) for row in rows},
    }
    return PromptSource(**{**known, **changed})


def contents(converter: str, files: Mapping[str, bytes]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in candidates(converter, files):
        found.setdefault(row["id"], []).append(row["messages"][0]["content"])
    return found


def test_the_digest_knows_neither_the_order_of_rows_nor_of_fields() -> None:
    rows = sum_rows()
    turned = [dict(reversed(row.items())) for row in reversed(rows)]
    assert digest(turned) == digest(rows)
    # Pinned: another canonical form would make every digest of the table worthless.
    expected = "edad294aad12d6033b5fcffb4203e0fbded84367488bdeee4708414c1d82e930"
    assert digest([{"id": "a", "text": "é"}]) == expected
    assert mark({"id": "a", "text": "é"}) == "6b72"


def test_the_table_is_whole_and_small() -> None:
    table = load_table()
    assert len({source.name for source in table}) == len(table) == 39
    assert sum(source.rows for source in table) == 11987
    assert TABLE.stat().st_size < 150_000
    assert {source.converter for source in table} - {None} == set(CONVERTERS)
    for source in table:
        assert source.licence and source.note and len(source.sha256) == 64 and len(source.commit) >= 8
        assert source.repository.count("/") == 1
        if source.converter:
            assert source.files and len(source.marks) == source.rows


@pytest.mark.parametrize(
    ("converter", "raw", "expected"),
    [
        (
            "svamp",
            [{"ID": "chal-1", "Body": "Ann had 3", "Question": "How many?", "Answer": 3.0}],
            "Ann had 3. How many?",
        ),
        (
            "aqua",
            [{"question": "Half of 4?", "options": ["A)1", "B)2"], "correct": "B"}],
            "Half of 4?\n\nOptions: A)1 B)2\nExplain your reasoning, then give the letter.",
        ),
        (
            "mbpp",
            [{"task_id": 7, "text": "Add.", "code": "x\r\ny", "test_list": ["assert a", "assert b"]}],
            "Add.\n\nYour code should pass this test:\n\nassert a",
        ),
        (
            "cruxeval",
            [{"id": "sample_1", "code": "def f(x): return x", "input": "1, 2", "output": "3"}],
            "```python\ndef f(x): return x\n```\n\nTrace `f(1, 2)` line by line and state the final return value.",
        ),
        (
            "commitpackft",
            [{"prompt": "Say hello\nprint(1)\n", "completion": ""}],
            "Apply this change to the file and return the complete updated file.\n\nChange: Say hello\n\n"
            "```\nprint(1)\n```",
        ),
        ("t0_reading", [{"prompt": "Who?\n", "completion": "Ann<|endoftext|>"}], "Who?"),
        (
            "user_oriented",
            [{"id": "user_oriented_task_3", "instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]}],
            "Sort.\n\nb a",
        ),
        (
            "scitldr",
            [{"paper_id": "x", "source": ["We try.", "It works."], "target": ["Works."]}],
            "We try. It works.\n\nTL;DR in one sentence:",
        ),
    ],
)
def test_converters_of_lines_and_lists(converter: str, raw: list[Row], expected: str) -> None:
    data = json.dumps(raw).encode() if converter == "svamp" else jsonl(raw)
    ((_, found),) = contents(converter, {"folder/file.jsonl": data}).items()
    assert expected in found


def test_pubmedqa_numbers_and_names_its_passages() -> None:
    raw = {
        "12": {
            "QUESTION": "Does it?",
            "CONTEXTS": ["A.", "B."],
            "LABELS": ["AIMS", "MAIN OUTCOME"],
            "LONG_ANSWER": "Yes.",
        }
    }
    (row,) = candidates("pubmedqa", {"a.json": json.dumps(raw).encode()})
    assert row["messages"][0]["content"].endswith("[1] (Aims) A.\n\n[2] (Main Outcome) B.\n\nQuestion: Does it?")
    assert (row["id"], row["reference"]) == ("pubmedqa/12", "Yes.")


def test_xquad_pairs_paragraphs_across_languages() -> None:
    def file(context: str) -> bytes:
        asked = [{"question": "Q?", "answers": [{"text": "x"}]}]
        return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": asked}]}]}).encode()

    found = contents("xquad", {"xquad.de.json": file("Hallo"), "xquad.en.json": file("Hello")})
    assert found["xquad_translate/de_en_0"] == ["Hallo\n\nTranslate the text above from German to English."]
    assert found["xquad_qa/de_0"] == ["Hallo\n\nQ?"]
    assert found["xquad_qa/en_0"] == ["Hello\n\nQuestion: Q?\nAnswer in a full sentence and quote the supporting text."]


def test_prompts_of_a_csv_file_are_numbered_with_and_without_other_types() -> None:
    data = b'act,prompt,type\r\nA,"Be\nkind.",IMAGE\r\nB,Be brief.,TEXT\r\n'
    found = contents("awesome_prompts", {"prompts.csv": data})
    assert found == {"awesome_prompts/0": ["Be\nkind.", "Be brief."], "awesome_prompts/1": ["Be brief."]}


def test_a_line_may_hold_a_line_separator_of_unicode() -> None:
    assert read_jsonl('{"a": "x\u2028y"}\n{"a": "z"}\r\n'.encode(), "here") == [{"a": "x\u2028y"}, {"a": "z"}]


def test_a_source_is_rebuilt_from_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "someone" / "sums" / "data" / "sums.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(jsonl(SUMS))
    assert list(build(sums(), from_folder(tmp_path)).rows) == sum_rows()
    wrong = build(sums(sha256="0" * 64), from_folder(tmp_path))
    assert not wrong.rows and "not rebuilt: 2 rows of sums: digest" in str(wrong)
    path.write_bytes(jsonl([SUMS[0], {**SUMS[1], "question": "One and two?"}]))
    assert "1 rows are not the pinned ones, first gsm8k_train/1" in str(build(sums(), from_folder(tmp_path)))
    path.write_bytes(jsonl([{"q": 1}]))
    assert "another form (KeyError" in str(build(sums(), from_folder(tmp_path)))
    path.unlink()
    assert "cannot be read" in str(build(sums(), from_folder(tmp_path)))
    assert str(build(sums(converter=None), from_folder(tmp_path))) == "not rebuilt: 2 rows of sums: no converter"


def test_downloads_go_to_the_cache_by_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("benchmarks.head_prompts.rebuild.GITHUB_RAW", tmp_path.as_uri())
    path = tmp_path / "someone" / "sums" / "0123456789abcdef" / "data" / "sums.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(jsonl(SUMS))
    assert list(build(sums(), fetched).rows) == sum_rows()
    path.unlink()
    assert list(build(sums(), fetched).rows) == sum_rows(), "read from the cache"


def test_check_names_a_changed_row_a_lost_row_and_an_unknown_source() -> None:
    table, rows = [sums()], sum_rows()
    assert check_rows(rows, table) == []
    changed = [rows[0], {**rows[1], "reference": "#### 3"}]
    (finding,) = check_rows(changed, table)
    assert finding.source == "sums" and finding.changed == ("gsm8k_train/1",)
    (finding,) = check_rows(rows[:1], table)
    assert str(finding) == "sums: 1 rows, not 2"
    (finding,) = check_rows([*rows, {"id": "x", "source": "elsewhere"}], table)
    assert str(finding) == "elsewhere: unknown source, 1 rows"
    with pytest.raises(DataError, match="holds no rows"):
        check_rows([], table)
    assert by_source(changed).keys() == {"sums"}


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_table", lambda: (sums(), sums(name="others", converter=None)))


@pytest.mark.usefixtures("small_table")
def test_the_command_writes_part_of_the_file_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "someone" / "sums" / "data" / "sums.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(jsonl(SUMS))
    out = tmp_path / "prompts.jsonl"
    arguments = ["--out", str(out), "--offline", str(tmp_path)]
    assert command.main(arguments) == 1 and not out.exists()
    assert "not rebuilt: 2 rows of others: no converter" in capsys.readouterr().out
    assert command.main([*arguments, "--partial"]) == 0
    assert read_jsonl(out.read_bytes(), "out") == sum_rows()
    assert command.main(["--check", str(out)]) == 1
    assert "others: 0 rows, not 2" in capsys.readouterr().out
    assert command.main(["--check", str(tmp_path / "none")]) == 2


def test_the_card_holds_the_section_once(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"# head\n\n{TITLE}\n\nold\n\n## Recipe\n\n* a: 1\n")
    write_section(tmp_path, [sums()])
    write_section(tmp_path, [sums()])
    text = page.read_text()
    assert (
        text.count(TITLE) == 1 and "old" not in text and text.startswith("# head\n\n## Recipe\n\n* a: 1\n\n## Prompt")
    )
    assert "| sums | 2 | MIT | [someone/sums]" in section([sums()]) and "a \\| b" in text
    with pytest.raises(DataError, match="trained head"):
        write_section(tmp_path / "none", [sums()])
