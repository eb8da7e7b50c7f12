"""Files are whole or not there, and a torn last line is mended."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from outrider.files import append_line, read_lines, replace_file


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(partial: Path) -> None:
        partial.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_whoever_may_read_other_files_may_read_this_one(tmp_path: Path) -> None:
    def privately(partial: Path) -> None:
        os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))

    usual = tmp_path / "usual"
    usual.write_text("")
    replace_file(tmp_path / "a.bin", privately)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


def test_a_torn_line_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": 2')
    assert read_lines(path) == [{"a": 1}]
    append_line(path, {"a": 3})
    assert read_lines(path) == [{"a": 1}, {"a": 3}]
