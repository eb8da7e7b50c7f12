"""Building, finding and doing without the library."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from outrider.native import build, library


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and no library loaded; the loaded one comes back afterwards."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "library", library.library.__wrapped__)
    monkeypatch.setattr(library, "_PACKAGED", tmp_path / "nothing-here")
    return tmp_path


def test_without_a_compiler_the_reason_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(library.Unavailable, match="no C\\+\\+ compiler"):
        library.library()
    assert not list(fresh.rglob("*.so"))


def test_a_failing_compiler_is_quoted_in_one_line(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fresh / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'boom: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(broken))
    with pytest.raises(library.Unavailable, match="no such thing") as caught:
        library.library()
    assert "\n" not in str(caught.value)
    assert not list(fresh.rglob("*.so"))


def test_a_broken_library_in_the_cache_is_named(fresh: Path) -> None:
    path = build.cache_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    with pytest.raises(library.Unavailable, match=path.name):
        library.library()


def test_the_native_path_can_be_switched_off() -> None:
    with pytest.raises(library.Unavailable, match="OUTRIDER_NATIVE=off"):
        library.open_context("off", 1)


def test_unknown_kernels_are_refused_with_those_that_run() -> None:
    with pytest.raises(library.Unavailable, match=r"'abacus'.*auto.*portable"):
        library.open_context("abacus", 1)


def test_the_name_changes_with_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = build.library_name()
    (tmp_path / "one.cpp").write_text("int x;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    changed = build.library_name()
    (tmp_path / "one.cpp").write_text("int y;")
    assert len({before, changed, build.library_name()}) == 3


def test_streaming_reads_every_word() -> None:
    words = torch.arange(64 * 1000, dtype=torch.int32)
    for num_threads in (1, 3):
        total = library.open_context("auto", num_threads).stream(words.data_ptr(), words.numel() * 4)
        assert total == int(words.sum()) % 2**32


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """All instruction sets, odd shapes, several threads, under address and undefined-behaviour checks."""
    program = build.build(tmp_path / "selftest", sanitizers="address,undefined", with_selftest=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout
