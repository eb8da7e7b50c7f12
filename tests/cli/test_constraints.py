"""What the output must look like, said on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from tests.cli.conftest import Ran

Run = Callable[..., Ran]

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"enum": ["yes", "no"]}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
def generate(run: Run, tiny_gguf: Path) -> Run:
    """``outrider generate`` with the tiny model, whose tokens are bytes."""

    def call(*argv: object, stdin: str = "") -> Ran:
        return run("generate", "hi", *argv, "--target", tiny_gguf, "--dtype", "float32", "-t", "40", stdin=stdin)

    return call


@pytest.mark.parametrize("draft", ["none", "suffix", "forced"])
def test_each_flag_holds_the_output_to_its_constraint(generate: Run, tmp_path: Path, draft: str) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text(json.dumps(SCHEMA))
    lark.write_text('start: "[" /[a-c]{2}/ ("," /[a-c]{2}/)? "]"')
    tight = generate("--json-schema", schema, "--no-whitespace", "--draft", draft)
    jsonschema.validate(json.loads(tight.out), SCHEMA)
    assert generate("--choice", "maybe", "--choice", "never", "--draft", draft).out in ("maybe\n", "never\n")
    assert re.fullmatch(r"\d{3}-[a-f]{2}\n", generate("--regex", r"\d{3}-[a-f]{2}", "--draft", draft).out)
    assert re.fullmatch(r"\[[a-c]{2}(,[a-c]{2})?\]\n", generate("--grammar", lark, "--draft", draft).out)
    assert generate("--json-object", "--draft", draft).out.lstrip().startswith("{")


def test_a_schema_comes_from_standard_input_or_from_the_settings_file(generate: Run, tmp_path: Path) -> None:
    piped = generate("--json-schema", "-", "--no-whitespace", stdin=json.dumps(SCHEMA))
    settings = tmp_path / "settings.toml"
    settings.write_text(f"[structured_outputs]\ndisable_any_whitespace = true\njson = '{json.dumps(SCHEMA)}'\n")
    assert json.loads(piped.out)["ok"] in ("yes", "no")
    assert generate("--config", settings).out == piped.out


def test_rows_of_a_file_have_constraints_of_their_own(run: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"id": "a", "prompt": "x", "structured_outputs": {"choice": ["left"]}}\n{"id": "b", "prompt": "x"}\n'
        '{"id": "c", "prompt": "x", "structured_outputs": {"regex": "[z"}}\n'
    )
    ran = run("generate", "-f", rows, "--choice", "right", "--target", tiny_gguf, "--dtype", "float32", "--json")
    assert {row["id"]: row["text"] for row in ran.rows} == {"a": "left", "b": "right"}, ran.err
    assert ran.status == 2 and "line 3: structured_outputs.regex is not possible" in ran.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--regex", "[z"], "structured_outputs.regex is not possible"),
        (["--regex", "a", "--json-object"], "json_object and regex were given"),
        (["--json-schema", "nowhere.json"], "nowhere.json cannot be read"),
        (["--json-object", "--min-tokens", "3"], "min_tokens contradicts structured_outputs"),
        (["--no-whitespace"], "nothing was given"),
        (["--json-schema", "-", "--grammar", "-"], "give one of them"),
    ],
)
def test_mistakes_are_one_line(generate: Run, flags: list[str], said: str) -> None:
    ran = generate(*flags, stdin="{}")
    assert ran.status == 2 and ran.out == ""
    assert said in ran.err and ran.err.count("\n") == 1


def test_a_prediction_is_read_from_a_file(generate: Run, tmp_path: Path) -> None:
    answer = generate("--json", "--draft", "none").rows[0]
    text = tmp_path / "answer.txt"
    text.write_text(answer["text"], encoding="utf-8")
    helped = generate("--json", "--draft", "prediction", "--prediction", text, "--schedule", "fixed").rows[0]
    assert helped["token_ids"] == answer["token_ids"]
