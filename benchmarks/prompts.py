"""The fixed stratified prompt subset, and how a row becomes token ids.

``subset.json`` names ids only. ``copy_heavy`` and ``prose`` are this repository's own (``data/``); the public sets come
from ``--traffic DIR`` (normalised JSON Lines files) or are fetched by pin (:mod:`benchmarks.sources`).

Run ``python -m benchmarks.prompts`` to fetch and check everything without measuring.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.sources import SOURCES, content_digest, fetch_rows, read_jsonl
from outrider.errors import DataError, OutriderError

__all__ = ["GROUPS", "PromptRow", "add_prompt_options", "encode", "load_group", "load_groups"]

HERE = Path(__file__).parent
OWN_GROUPS = ("copy_heavy", "prose")
GROUPS = ("spec_bench", "humaneval", "tool_calls", *OWN_GROUPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt: a chat, and the tools that come with it."""

    id: str
    group: str
    category: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@cache
def subset() -> dict[str, Any]:
    """``subset.json``: for each group its ids, the digest of their content, and the digest of the whole set."""
    data: dict[str, Any] = json.loads((HERE / "subset.json").read_text(encoding="utf-8"))
    return data


def load_group(group: str, *, traffic: Path | None = None, full: bool = False) -> list[PromptRow]:
    """The subset's rows of one group (``full``: all rows of the set), checked against their digest.

    Args:
        group: one of ``GROUPS``.
        traffic: folder of normalised files; ``None`` fetches the public sets by pin.
        full: all rows instead of the subset.

    Raises:
        DataError: a missing file or id, or content that is not the pinned one.
    """
    if group not in GROUPS:
        raise DataError(f"prompt group {group!r} is unknown; allowed: {', '.join(GROUPS)}")
    rows = _all_rows(group, traffic)
    entry = subset()[group]
    if not full:
        rows = _select(rows, entry["ids"], group)
    expected = entry["full_sha256"] if full else entry["sha256"]
    if expected is not None and content_digest(rows) != expected:
        raise DataError(
            f"prompts of {group} are not the pinned ones: content digest {content_digest(rows)}, not {expected}"
        )
    return [_prompt_row(row, group) for row in rows]


def load_groups(groups: Sequence[str], *, traffic: Path | None = None) -> list[PromptRow]:
    """The subset's rows of several groups, in order."""
    return [row for group in groups for row in load_group(group, traffic=traffic)]


def _all_rows(group: str, traffic: Path | None) -> list[dict[str, Any]]:
    if group not in OWN_GROUPS and traffic is None:
        return fetch_rows(SOURCES[group])
    folder = HERE / "data" if group in OWN_GROUPS or traffic is None else traffic
    path = folder / f"{group}.jsonl"
    try:
        return read_jsonl(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"prompt file {path} cannot be read: {error.strerror}") from None


def _select(rows: Sequence[dict[str, Any]], ids: Sequence[str], group: str) -> list[dict[str, Any]]:
    by_id = {row.get("id"): row for row in rows}
    missing = [wanted for wanted in ids if wanted not in by_id]
    if missing:
        raise DataError(f"prompts of {group} lack {len(missing)} ids of the subset, first {missing[0]!r}")
    return [by_id[wanted] for wanted in ids]


def _prompt_row(row: dict[str, Any], group: str) -> PromptRow:
    return PromptRow(
        id=row["id"], group=group, category=row["category"], messages=row["messages"], tools=row.get("tools")
    )


def encode(tokenizer: Any, row: PromptRow) -> list[int]:
    """Token ids of the rendered chat.

    The tokenizer must render tools into the system message (``tool_rendering="system"``): this model's own template would
    ignore them, and is refused for rows with tools.
    """
    return list(tokenizer.encode_chat(row.messages, tools=row.tools))


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """``--traffic DIR``, shared by all scripts."""
    parser.add_argument(
        "--traffic",
        type=Path,
        metavar="DIR",
        help="folder of normalised prompt files (spec_bench.jsonl, humaneval.jsonl, tool_calls.jsonl); "
        "without it they are fetched by pinned commit into the user's cache directory",
    )


def main() -> int:
    """Fetch (or read) every group and check its digest."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompts", description=__doc__)
    add_prompt_options(parser)
    parser.add_argument("--full", action="store_true", help="check the whole sets too, not only the subset")
    args = parser.parse_args()
    try:
        for group in GROUPS:
            print(f"{group}: {len(load_group(group, traffic=args.traffic))} prompts of the subset, content as pinned")
            if args.full and subset()[group]["full_sha256"] is not None:
                rows = load_group(group, traffic=args.traffic, full=True)
                print(f"{group}: all {len(rows)} prompts, content as pinned")
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
