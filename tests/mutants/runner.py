"""Plant one fault in a copy of the package and let the suite's own tests judge the copy.

The copy comes first on the child's module path; the child refuses to test anything else (an editable installation also
puts the real package on the path).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant

__all__ = ["REPOSITORY", "Outcome", "copy_package", "plant", "run_tests"]

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300
"""A fault may well loop for ever; that is a failure of the mutant, not a rejection by a test."""

ALL_PASSED, SOME_FAILED, TIMED_OUT, WRONG_PACKAGE = 0, 1, 124, 97

_CHILD = f"""
import sys, outrider, pytest
if not outrider.__file__.startswith(sys.argv[1]):
    sys.exit({WRONG_PACKAGE})
sys.exit(pytest.main(sys.argv[2:]))
"""

_CRASHES = re.compile(r"^E\s+(NameError|TypeError|AttributeError|ImportError|ModuleNotFoundError|SyntaxError)\b", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run of tests against a copy ended.

    Attributes:
        code: pytest's exit code, or one of this module's own.
        output: what pytest printed.
    """

    code: int
    output: str

    @property
    def all_passed(self) -> bool:
        """Nothing failed, and something ran."""
        return self.code == ALL_PASSED

    @property
    def is_rejection(self) -> bool:
        """A test failed on what the code did. Code that cannot even run is a mistake in the mutant, not a fault found."""
        return self.code == SOME_FAILED and _CRASHES.search(self.output) is None


def copy_package(folder: Path) -> Path:
    """Copy the package into ``folder``; returns the copy's root.

    Times of files are copied too, so that compiled modules stay valid and need not be compiled again for each mutant.
    """
    return Path(shutil.copytree(REPOSITORY / "src" / "outrider", folder / "outrider"))


def plant(mutant: Mutant, package: Path) -> None:
    """Replace the mutant's text in a copy of the package.

    Raises:
        ValueError: the text does not occur exactly once: the code moved on and the catalogue must follow.
    """
    path = package / mutant.file
    code = path.read_text(encoding="utf-8")
    count = code.count(mutant.old)
    if count != 1:
        raise ValueError(
            f"mutant {mutant.name}: its text occurs {count} times in {mutant.file}, not once: {mutant.old!r}"
        )
    changed = code.replace(mutant.old, mutant.new)
    compile(changed, str(path), "exec")
    path.write_text(changed, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def run_tests(package: Path, tests: Sequence[str], scratch: Path) -> Outcome:
    """Run tests of this repository against a copy of the package, in a process of its own.

    Args:
        package: root of the copy.
        tests: files or node ids.
        scratch: an existing folder for whatever the tests' tools write.
    """
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--tb=short"]
    command = [sys.executable, "-c", _CHILD, str(package.parent), *options, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=_environment(package.parent, scratch),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return Outcome(code=TIMED_OUT, output=f"no end after {TIMEOUT_S} s\n{late.stdout!s}")
    return Outcome(code=done.returncode, output=done.stdout)


def _environment(first: Path, scratch: Path) -> dict[str, str]:
    """This process's, without what steers the pytest that runs now, with the copy first and one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch),
        "OMP_NUM_THREADS": "1",
    }
