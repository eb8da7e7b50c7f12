"""Where the public prompts come from: pinned downloads, and their conversion into one normalised form.

The normalised form is one JSON object a line: ``id``, ``category``, ``source``, ``messages`` (OpenAI chat form) and, for
tool calls, ``tools`` (OpenAI function form). Downloads go to the user's cache directory, never into this repository.
What a run measures is pinned by the digest of the selected rows' content (``subset.json``), so that a file given by path
and a file fetched here must hold the same prompts, letter for letter.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import DataError

__all__ = [
    "GITHUB_RAW",
    "SOURCES",
    "RawFile",
    "Source",
    "cache_dir",
    "content_digest",
    "fetch_file",
    "fetch_rows",
    "git_blob_sha1",
    "read_jsonl",
]

Row = dict[str, Any]

GITHUB_RAW = "https://raw.githubusercontent.com"
_SPEC_BENCH_BLOB = "2498d09719b92937c9408f9d7e6efbeaaceb0413"
_HUMAN_EVAL_COMMIT = "6d43fb980f9fee3c892a914eda09951f772ad10d"
_BFCL_COMMIT = "6ea57973c7a6097fd7c5915698c54c17c5b1b6c8"
_BFCL_FOLDER = "berkeley-function-call-leaderboard/bfcl_eval/data"
_BFCL_KINDS = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "irrelevance",
)

MASKED_IDS = frozenset({"spec_bench/316"})
"""Rows that hold a private person's address: it is masked, and the row stays outside the content digest."""

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_HUMAN_EVAL_TASK = "Complete the following Python function. Reply with the full function in one Python code block."
_MT_BENCH_IDS = range(81, 161)
_JSON_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFile:
    """One file to download.

    Attributes:
        name: its name in the cache directory.
        urls: places to ask, in order.
        blob_sha1: git's own hash of the file where it is known; ``None`` leaves the check to the content digest.
    """

    name: str
    urls: tuple[str, ...]
    blob_sha1: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A public prompt set: what to download and how a raw row becomes a normalised one."""

    name: str
    files: tuple[RawFile, ...]
    convert: Callable[[Row], Row]


def convert_spec_bench(raw: Row) -> Row:
    """``{question_id, category, turns, reference?}`` to the normalised form; the first turn is the prompt."""
    number = raw["question_id"]
    turns = [
        _EMAIL.sub("[email removed]", turn) if f"spec_bench/{number}" in MASKED_IDS else turn for turn in raw["turns"]
    ]
    row: Row = {
        "id": f"spec_bench/{number}",
        "category": "multi_turn" if number in _MT_BENCH_IDS else raw["category"],
        "source": "Spec-Bench",
        "messages": [{"role": "user", "content": turns[0]}],
        "question_id": number,
    }
    if len(turns) > 1:
        row["turns"] = turns
    return row


def convert_human_eval(raw: Row) -> Row:
    """``{task_id, prompt, ...}`` to the normalised form: one sentence and a code block."""
    content = f"{_HUMAN_EVAL_TASK}\n\n```python\n{raw['prompt']}```"
    return {
        "id": "humaneval/" + raw["task_id"].rsplit("/", 1)[1],
        "category": "code_completion",
        "source": "openai/human-eval",
        "messages": [{"role": "user", "content": content}],
    }


def convert_bfcl(raw: Row) -> Row:
    """``{id, question, function}`` to the normalised form: OpenAI tools, JSON Schema types, plain function names."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": re.sub(r"[^A-Za-z0-9_-]", "_", function["name"]),
                "description": function["description"],
                "parameters": _json_schema(function["parameters"]),
            },
        }
        for function in raw["function"]
    ]
    kind = re.sub(r"_\d[\d-]*$", "", raw["id"])
    return {
        "id": f"bfcl/{raw['id']}",
        "category": f"tool_call/{kind}",
        "source": "ShishirPatil/gorilla BFCL v4",
        "messages": raw["question"][0],
        "tools": tools,
    }


def _json_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_json_schema(part) for part in node]
    if not isinstance(node, dict):
        return node
    out = {key: _json_schema(value) for key, value in node.items()}
    if isinstance(out.get("type"), str):
        out["type"] = _JSON_SCHEMA_TYPES.get(out["type"], out["type"])
    return out


def _bfcl_file(kind: str) -> RawFile:
    name = f"BFCL_v4_{kind}.json"
    return RawFile(name=name, urls=(f"{GITHUB_RAW}/ShishirPatil/gorilla/{_BFCL_COMMIT}/{_BFCL_FOLDER}/{name}",))


SOURCES: dict[str, Source] = {
    "spec_bench": Source(
        name="spec_bench",
        files=(
            RawFile(
                name="spec_bench_question.jsonl",
                urls=(
                    f"https://api.github.com/repos/yukiki-jc/Spec-Bench/git/blobs/{_SPEC_BENCH_BLOB}",
                    f"{GITHUB_RAW}/yukiki-jc/Spec-Bench/7d7f9c9903b0/data/cloud_spec_bench/question.jsonl",
                ),
                blob_sha1=_SPEC_BENCH_BLOB,
            ),
        ),
        convert=convert_spec_bench,
    ),
    "humaneval": Source(
        name="humaneval",
        files=(
            RawFile(
                name="HumanEval.jsonl.gz",
                urls=(f"{GITHUB_RAW}/openai/human-eval/{_HUMAN_EVAL_COMMIT}/data/HumanEval.jsonl.gz",),
            ),
        ),
        convert=convert_human_eval,
    ),
    "tool_calls": Source(name="tool_calls", files=tuple(map(_bfcl_file, _BFCL_KINDS)), convert=convert_bfcl),
}


def cache_dir() -> Path:
    """Folder for downloads: ``$OUTRIDER_BENCH_CACHE``, else ``outrider/benchmarks`` in the user's cache directory."""
    given = os.environ.get("OUTRIDER_BENCH_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "benchmarks"


def git_blob_sha1(data: bytes) -> str:
    """The name that git gives to a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def content_digest(rows: Iterable[Row]) -> str:
    """SHA-256 of what a run measures: id, messages and tools of each row, in order of id; masked rows left out."""
    kept = sorted((row for row in rows if row["id"] not in MASKED_IDS), key=lambda row: str(row["id"]))
    digest = hashlib.sha256()
    for row in kept:
        content = {name: row.get(name) for name in ("id", "messages", "tools")}
        digest.update(json.dumps(content, sort_keys=True, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()


def read_jsonl(data: bytes, where: str) -> list[Row]:
    """Rows of a JSON Lines text.

    Raises:
        DataError: a line that is not a JSON object, with its number.
    """
    rows: list[Row] = []
    # Not splitlines: JSON may hold U+2028 and its like unescaped.
    for number, line in enumerate(data.decode("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where} line {number} is not JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} line {number} is not a JSON object")
        rows.append(row)
    return rows


def fetch_rows(source: Source, *, folder: Path | None = None) -> list[Row]:
    """Normalised rows of a public set, downloaded once into ``folder`` and then read from there.

    Raises:
        DataError: no place answered, or a file is not the pinned one.
    """
    target = folder or cache_dir()
    rows: list[Row] = []
    for file in source.files:
        data = fetch_file(file, target)
        text = gzip.decompress(data) if file.name.endswith(".gz") else data
        rows.extend(source.convert(raw) for raw in read_jsonl(text, file.name))
    return rows


def fetch_file(file: RawFile, folder: Path) -> bytes:
    """Content of one file, downloaded once into ``folder`` (its name may hold folders) and then read from there.

    Raises:
        DataError: no place answered, or the file is not the pinned one.
    """
    path = folder / file.name
    if path.exists():
        data = path.read_bytes()
        _check_blob(file, data, str(path))
        return data
    data = _download(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + f".{os.getpid()}.part")
    partial.write_bytes(data)
    partial.replace(path)
    return data


def _download(file: RawFile) -> bytes:
    problems: Sequence[str] = []
    for url in file.urls:
        request = urllib.request.Request(
            url, headers={"Accept": "application/vnd.github.raw", "User-Agent": "outrider"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                data: bytes = reply.read()
            _check_blob(file, data, url)
            return data
        except (OSError, DataError) as error:
            problems = [*problems, f"{url}: {error}"]
    raise DataError(
        f"prompt file {file.name} could not be fetched ({'; '.join(problems)}); "
        "give --traffic DIR, a folder that holds the normalised files (head_prompts: --offline DIR, the files themselves)"
    )


def _check_blob(file: RawFile, data: bytes, where: str) -> None:
    if file.blob_sha1 is not None and git_blob_sha1(data) != file.blob_sha1:
        raise DataError(f"{where} is not the pinned file: git blob {git_blob_sha1(data)}, expected {file.blob_sha1}")
