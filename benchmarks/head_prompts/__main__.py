"""Check, rebuild or cite the prompts that the shipped head was trained on.

    python -m benchmarks.head_prompts --check FILE       # is this the file? which source differs, in which rows?
    python -m benchmarks.head_prompts --out FILE         # fetch the pinned sources, convert, verify, write
    python -m benchmarks.head_prompts --card HEAD_DIR    # name sources and licences in the head's README

Fetching is untested beyond the checksums: this was written without a network. Sources without a converter, and those
whose rows are not the pinned ones, are named and left out; then nothing is written unless --partial is given. Rows come
source by source, so the rebuilt file holds the same prompts as the original, in another order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.head_prompts.card import write_section
from benchmarks.head_prompts.rebuild import build, fetched, from_folder
from benchmarks.head_prompts.table import PromptSource, check_rows, digest, load_table
from benchmarks.sources import read_jsonl
from outrider.errors import DataError, OutriderError
from outrider.files import replace_file

__all__ = ["main"]


def check(path: Path, table: Sequence[PromptSource]) -> int:
    """Print what differs from the table; 1 if anything does."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"prompt file {path} cannot be read: {error.strerror}") from None
    rows = read_jsonl(data, str(path))
    findings = check_rows(rows, table)
    for finding in findings:
        print(finding)
    print(f"file sha256 {hashlib.sha256(data).hexdigest()}")
    print(f"rows sha256 {digest(rows)} (in order of their ids)")
    if findings:
        print(f"{len(findings)} sources differ")
        return 1
    print(f"all {len(table)} sources agree: {len(rows)} rows")
    return 0


def rebuild(path: Path, table: Sequence[PromptSource], *, offline: Path | None, partial: bool) -> int:
    """Write the rows of all sources that agree; 1 if one does not and part of the file was not asked for."""
    reader = fetched if offline is None else from_folder(offline)
    built = []
    for source in table:
        built.append(build(source, reader))
        print(built[-1], flush=True)
    rows = [row for each in built for row in each.rows]
    total = sum(source.rows for source in table)
    if len(rows) < total and not partial:
        print(f"{len(rows)} of {total} rows agree; nothing written (--partial writes those)", file=sys.stderr)
        return 1
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_file(path, lambda place: place.write_text(text, encoding="utf-8"))
    print(f"{path}: {len(rows)} of {total} rows")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head_prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", type=Path, metavar="FILE", help="compare a prompt file with the table")
    what.add_argument("--out", type=Path, metavar="FILE", help="rebuild the prompt file from its public sources")
    what.add_argument("--card", type=Path, metavar="HEAD_DIR", help="write the table into this head's README.md")
    parser.add_argument(
        "--offline", type=Path, metavar="DIR", help="read DIR/OWNER/REPOSITORY/PATH instead of fetching (with --out)"
    )
    parser.add_argument("--partial", action="store_true", help="write the sources that agree, exit with 0 (with --out)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 all agrees, 1 something does not, 2 a mistake in what was given."""
    args = _parser().parse_args(arguments)
    table = load_table()
    try:
        if args.check is not None:
            return check(args.check, table)
        if args.card is not None:
            print(write_section(args.card, table))
            return 0
        return rebuild(args.out, table, offline=args.offline, partial=args.partial)
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
