"""The section of a head's README that names each prompt source with its licence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.head_prompts.table import PromptSource
from outrider.errors import DataError
from outrider.files import replace_file

__all__ = ["TITLE", "section", "write_section"]

TITLE = "## Prompt sources"


def section(table: Sequence[PromptSource]) -> str:
    """Markdown: a heading and one table row for each source."""
    head = "| source | rows | licence | repository, commit | note |\n|---|---|---|---|---|"
    lines = [_line(source) for source in table]
    total = sum(source.rows for source in table)
    intro = (
        f"The prompts are {total} rows of the public sources below; the answers are the target's own. "
        "`python -m benchmarks.head_prompts` (in the repository) checks a prompt file against this table, "
        "and rebuilds what it can of it."
    )
    return f"{TITLE}\n\n{intro}\n\n" + "\n".join([head, *lines]) + "\n"


def _line(source: PromptSource) -> str:
    place = f"[{source.repository}](https://github.com/{source.repository}/tree/{source.commit}) `{source.commit[:12]}`"
    cells = (source.name, str(source.rows), source.licence, place, source.note)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_section(folder: Path, table: Sequence[PromptSource]) -> Path:
    """Put the section at the end of the head's README, in place of an older one.

    Raises:
        DataError: no README lies there.
    """
    path = folder / "README.md"
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give the folder of a trained head") from None
    rest = re.sub(rf"^{re.escape(TITLE)}\n.*?(?=^## |\Z)", "", page, flags=re.MULTILINE | re.DOTALL)
    text = f"{rest.rstrip()}\n\n{section(table)}"
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path
