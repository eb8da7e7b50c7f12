"""The machinery behind the mutants: whatever goes wrong in it is an error, never a rejection and never a pass."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.mutants import judge
from tests.mutants.mutant import Mutant
from tests.mutants.runner import REPOSITORY, Judges, Outcome, link_package, plant

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture(params=[False, pytest.param(True, marks=needs_fork)], ids=["afresh", "forked"])
def forked(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def outcome(folder: Path, *, forked: bool, test: str, package: str = "VALUE = 1\n", timeout_s: float = 60) -> Outcome:
    """Judge a package of one module by one test."""
    root = folder / "copy" / "outrider"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text(package)
    (folder / "test_it.py").write_text(test)
    with Judges(forked=forked, preloaded=(), timeout_s=timeout_s) as judges:
        return judges.run(root, [str(folder / "test_it.py")], folder)


def test_a_test_that_holds_passes(forked: bool, tmp_path: Path) -> None:
    test = "from outrider import VALUE\ndef test_it():\n    assert VALUE == 1\n"
    done = outcome(tmp_path, forked=forked, test=test)
    assert done.all_passed and not done.is_rejection and "1 passed" in done.output


def test_a_test_that_fails_is_a_rejection(forked: bool, tmp_path: Path) -> None:
    test = "from outrider import VALUE\ndef test_it():\n    assert VALUE == 2\n"
    done = outcome(tmp_path, forked=forked, test=test)
    assert done.is_rejection and not done.all_passed and "assert 1 == 2" in done.output


@pytest.mark.parametrize(
    ("package", "test", "code"),
    [
        ("VALUE = 1", "def test_it():\n    raise NameError('x')\n", 1),
        ("raise ValueError", "def test_it():\n    pass\n", judge.CANNOT_START),
        ("__file__ = '/elsewhere/__init__.py'", "def test_it():\n    assert False\n", judge.WRONG_PACKAGE),
        ("VALUE = 1", "import os\ndef test_it():\n    os._exit(7)\n", 7),
        ("VALUE = 1", "import os\ndef test_it():\n    os.kill(os.getpid(), 9)\n", -9),
        ("VALUE = 1", "no_such_name\n", 2),
        ("VALUE = 1", "", 5),
    ],
    ids=["crash", "no-import", "elsewhere", "exit", "killed", "no-collection", "nothing"],
)
def test_what_could_not_be_judged_is_neither(
    package: str, test: str, code: int, *, forked: bool, tmp_path: Path
) -> None:
    done = outcome(tmp_path, forked=forked, test=test, package=package)
    assert done.code == code, done.output
    assert not done.is_rejection and not done.all_passed


def test_what_does_not_end_is_killed_and_is_no_rejection(forked: bool, tmp_path: Path) -> None:
    test = "import time\ndef test_it():\n    time.sleep(600)\n"
    done = outcome(tmp_path, forked=forked, test=test, timeout_s=0.5)
    assert done.code == judge.TIMED_OUT and not done.is_rejection
    assert "no end after 0.5 s" in done.output


@needs_fork
def test_the_end_of_the_process_that_is_forked_from_is_an_error(tmp_path: Path) -> None:
    test = "import os\ndef test_it():\n    os.kill(os.getppid(), 9)\n"
    with pytest.raises(RuntimeError, match="ended with -9"):
        outcome(tmp_path, forked=True, test=test)


@needs_fork
def test_what_a_run_leaves_behind_is_killed(tmp_path: Path) -> None:
    test = 'import subprocess\ndef test_it():\n    print(f\'<{subprocess.Popen(["sleep", "600"]).pid}>\')\n    assert False\n'
    done = outcome(tmp_path, forked=True, test=test)
    assert done.is_rejection
    process = Path("/proc", done.output.split("<")[1].split(">")[0], "cmdline")
    deadline = time.monotonic() + 10
    while process.exists() and process.read_bytes():
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.01)


@needs_fork
@pytest.mark.parametrize("name", ["outrider", "tests.mutants.mutant"])
def test_nothing_of_ours_is_imported_before_forking(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    (tmp_path / "copy" / "outrider").mkdir(parents=True)
    with Judges(forked=True, preloaded=(name,)) as judges, pytest.raises(RuntimeError, match="ended with 1"):
        judges.run(tmp_path / "copy" / "outrider", ["test_it.py"], tmp_path)


def test_runs_do_not_see_each_other(judges: Judges, tmp_path: Path) -> None:
    """One process serves all mutants: neither modules nor settings go from one to the next."""
    test = (
        "import sys, outrider, torch\ndef test_it():\n    assert outrider.VALUE == 1 and not hasattr(torch, 'mark')\n"
    )
    (tmp_path / "test_it.py").write_text(test + "    torch.mark = True\n")
    for value, accepted in ((1, True), (2, False), (1, True)):
        root = tmp_path / f"{value}-{accepted}" / "outrider"
        root.mkdir(parents=True, exist_ok=True)
        (root / "__init__.py").write_text(f"VALUE = {value}\n")
        done = judges.run(root, [str(tmp_path / "test_it.py")], tmp_path)
        assert done.all_passed is accepted and done.is_rejection is not accepted, done.output


def test_a_fault_stays_in_its_own_copy(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "code.py").write_text("a = 1\n")
    (tmp_path / "other").mkdir()
    faulty = link_package(first, tmp_path / "other")
    plant(Mutant(name="two", file="code.py", old="a = 1", new="a = 2", tests=(), why=""), faulty)
    assert (first / "code.py").read_text() == "a = 1\n"
    assert (faulty / "code.py").read_text() == "a = 2\n"


def test_a_text_that_is_gone_or_stands_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    for old in ("c = 1", "= 1"):
        mutant = Mutant(name="stale", file="code.py", old=old, new="", tests=(), why="")
        with pytest.raises(ValueError, match="not once"):
            plant(mutant, tmp_path)
