"""``outrider generate`` on a tiny model: every way in, every way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]


@pytest.fixture
def generate(run: Run, tiny_gguf: Path) -> Run:
    """``outrider generate`` with the tiny model, float32, 8 tokens."""

    def call(*argv: object, stdin: str = "") -> Ran:
        return run("generate", *argv, "--target", tiny_gguf, "--dtype", "float32", "--max-tokens", "8", stdin=stdin)

    return call


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_text_json_and_standard_input_agree(generate: Run) -> None:
    text = generate("hello")
    [row] = generate("hello", "--json").rows
    assert text.status == 0 and text.out == row["text"] + "\n" and text.err == ""
    assert generate("-", stdin="hello").out == text.out


def test_json_has_the_promised_names(generate: Run) -> None:
    [row] = generate("hello", "--json", "--logprobs", "2").rows
    assert row["id"] == "0" and row["finish_reason"] in ("stop", "length")
    assert set(row["usage"]) == {"prompt_tokens", "completion_tokens"}
    assert row["usage"]["completion_tokens"] == len(row["token_ids"]) == len(row["logprobs"])
    assert {
        "drafter",
        "passes",
        "steps",
        "drafted",
        "accepted",
        "accepted_length",
        "tokens_per_pass",
        "per_position",
    } <= set(row["speculation"])
    assert set(row["timing_ms"]) == {"queue", "first_token", "prefill", "draft", "verify", "other", "total"}
    assert row["settings"]["precision"] == "float32" and row["settings"]["sampling"]["max_tokens"] == 8
    assert "logprobs" not in generate("hello", "--json").rows[0]


@pytest.mark.parametrize("draft", ["ngram", "suffix", "self", "slice:1", "random"])
@pytest.mark.parametrize("sampling", [[], ["--temperature", "1.5", "--seed", "3"]])
def test_no_drafter_changes_the_output(generate: Run, draft: str, sampling: list[str]) -> None:
    flags = ["--json", "--schedule", "fixed", *sampling]
    [plain] = generate("hello", "--draft", "none", *flags).rows
    [row] = generate("hello", "--draft", draft, "-k", "3", *flags).rows
    assert row["token_ids"] == plain["token_ids"]
    assert plain["speculation"]["drafted"] == 0 and plain["settings"]["drafter"] == "none"


def test_raw_and_chat_differ_and_a_file_can_say_which(generate: Run, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("chat = false\n")
    chat, raw = generate("hello", "--json").rows[0], generate("hello", "--raw", "--json").rows[0]
    assert chat["usage"]["prompt_tokens"] > raw["usage"]["prompt_tokens"]
    assert generate("hello", "--config", config, "--json").rows[0]["token_ids"] == raw["token_ids"]
    assert generate("hello", "--chat", "--config", config, "--json").rows[0]["token_ids"] == chat["token_ids"]


def test_choices_are_numbered(generate: Run) -> None:
    flags = ["--n", "3", "--temperature", "2", "--seed", "1"]
    rows = generate("hello", "--json", *flags).rows
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert len({tuple(row["token_ids"]) for row in rows}) > 1
    text = generate("hello", *flags).out
    assert "== 0, choice 2" in text


def test_verbose_says_what_auto_came_to(generate: Run) -> None:
    err = generate("hello", "--verbose").err
    assert "precision = float32" in err and "drafter = suffix" in err and "  num_draft_tokens = 8" in err
    assert "tokens a pass" in err


def test_a_file_of_every_kind_of_row(generate: Run, tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        {"id": "chat", "messages": [{"role": "user", "content": "a"}]},
        {"id": "text", "prompt": "b", "max_tokens": 2},
        {"id": "ids", "prompt": [5, 6, 7]},
        {"id": "sharegpt", "conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
    )
    ran = generate("--file", path, "--json")
    rows = {row["id"]: row for row in ran.rows}
    assert ran.status == 0 and set(rows) == {"chat", "text", "ids", "sharegpt"}
    assert rows["text"]["usage"]["completion_tokens"] <= 2
    assert rows["ids"]["usage"]["prompt_tokens"] == 3
    assert rows["chat"]["token_ids"] == generate("a", "--json").rows[0]["token_ids"]
    assert rows["sharegpt"]["token_ids"] == generate("c", "--json").rows[0]["token_ids"]
    assert "== chat" in generate("--file", path).out


def test_broken_rows_are_named_and_the_others_done(generate: Run, tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        {"prompt": "a"},
        "{broken",
        {"prompt": "a", "temperature": -3},
        {"prompt": "b " * 400},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"prompt": "a", "stop": 5},
        {"prompt": [999999]},
        {"prompt": "c"},
    )
    ran = generate("--file", path, "--json")
    assert ran.status == 2
    assert sorted(row["id"] for row in ran.rows) == ["1", "8"]
    lines = [line for line in ran.err.splitlines() if "line" in line]
    assert [line.split("line ")[1].split(":")[0] for line in lines] == ["2", "3", "4", "5", "6", "7"]
    for line, words in zip(lines, ("not JSON", "temperature", "window", "tool", "wrong kind", "999999"), strict=True):
        assert words in line, line


def test_only_broken_rows_is_an_error_before_anything_loads(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", "{", "[]")
    ran = run("generate", "--file", path, "--target", "/nothing.gguf")
    assert ran.status == 2 and ran.err.count("\n") == 2 and "line 1" in ran.err and "does not exist" not in ran.err


def test_an_interrupted_file_goes_on_where_it_stopped(generate: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *({"id": str(i), "prompt": f"p{i}"} for i in range(5)))
    out = tmp_path / "out.jsonl"
    assert generate("--file", path, "--output", out).status == 0
    whole = out.read_bytes().splitlines(keepends=True)
    before = {json.loads(line)["id"]: json.loads(line)["token_ids"] for line in whole}
    out.write_bytes(b"".join(whole[:2]) + whole[2][:40])
    again = generate("--file", path, "--output", out)
    assert again.status == 0 and again.out == ""
    assert "dropped 1 torn" in again.err and "2 of 5 prompts are done" in again.err
    assert out.read_bytes().splitlines(keepends=True)[:2] == whole[:2]
    assert {row["id"]: row["token_ids"] for row in map(json.loads, out.read_bytes().splitlines())} == before


def test_results_of_other_settings_are_refused(generate: Run, tmp_path: Path) -> None:
    path, out = write_rows(tmp_path / "rows.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    assert generate("--file", path, "--output", out).status == 0
    ran = generate("--file", path, "--output", out, "--temperature", "1", "--seed", "1")
    assert ran.status == 2 and "seed" in ran.err
    assert len(out.read_bytes().splitlines()) == 1


def painted(text: str) -> tuple[str, list[str]]:
    """The text without marks and refused drafts, and the kept drafts."""
    kept: list[str] = []
    plain = ""
    while text:
        if text[0] == "{":
            end = text.index("}")
            kept.append(text[1:end])
            plain, text = plain + text[1:end], text[end + 1 :]
        elif text[0] == "~":
            text = text[text.index("~", 1) + 1 :]
        else:
            plain, text = plain + text[0], text[1:]
    return plain, kept


def test_show_drafts_marks_what_was_kept(run: Run, tiny_gguf: Path) -> None:
    flags = ["--target", tiny_gguf, "--dtype", "float32", "--max-tokens", "24", "--schedule", "fixed", "--raw"]
    # Only two letters may be generated: no token looks like a mark, and the text repeats itself.
    bias = [f"--logit-bias={3 + ord(letter)}=100" for letter in "ab"]
    [row] = run("generate", "abba", *flags, *bias, "--draft", "ngram", "--json").rows
    ran = run("generate", "abba", *flags, *bias, "--draft", "ngram", "--show-drafts")
    legend, text = ran.out.split("\n", 1)
    plain, kept = painted(text.rstrip("\n"))
    assert "{kept draft tokens}" in legend and "~refused draft tokens~" in legend
    assert plain == row["text"]
    assert sum(map(len, kept)) == row["speculation"]["accepted"] > 0


def test_a_target_of_another_vocabulary_is_refused_as_drafter(generate: Run) -> None:
    ran = generate("hello", "--draft", "smollm2-135m-instruct")
    assert ran.status == 2 and ran.err.count("\n") == 1 and "smollm2-135m-instruct" in ran.err and "token" in ran.err
