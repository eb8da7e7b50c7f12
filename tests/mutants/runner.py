"""Plant one fault in a copy of the package and let the suite's own tests judge the copy.

1. The package is copied and compiled once (:func:`copy_package`). Each fault gets a copy of that copy, made of hard
   links (:func:`link_package`); only the file with the fault is written anew (:func:`plant`).
2. The tests that the fault names run in a process of their own, with the faulty copy first on its module path. It
   refuses to test anything else (an editable installation also puts the real package on the path).
3. On Linux that process is forked from one that has already imported torch and the like, but nothing of the package or
   of its tests (:class:`Judges`). Elsewhere it is started afresh: the same, a few seconds slower for each fault.

What runs in that process is :mod:`tests.mutants.judge`.
"""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.mutants import judge
from tests.mutants.mutant import Mutant

__all__ = ["REPOSITORY", "Judges", "Outcome", "copy_package", "link_package", "plant"]

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300
"""A fault may well loop for ever; that is a failure of the mutant, not a rejection by a test."""

ALL_PASSED, SOME_FAILED = 0, 1

PRELOADED = (
    "torch",
    "torch.nn.attention.flex_attention",
    "numpy",
    "scipy.stats",
    "pytest",
    "hypothesis.stateful",
    "safetensors.torch",
    "tokenizers",
    "gguf",
    "jinja2.sandbox",
    "rich.console",
    "typer.testing",
    "fastapi.testclient",
    "uvicorn",
    "prometheus_client",
    "llguidance",
    "jsonschema",
    "httpx",
)
"""Other people's modules that tests of the mutants import: worth importing once."""

_SCRIPT = [sys.executable, "-P", str(Path(judge.__file__))]
_OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--tb=short"]
_CRASHES = re.compile(r"^E\s+(NameError|TypeError|AttributeError|ImportError|ModuleNotFoundError|SyntaxError)\b", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run of tests against a copy ended.

    Attributes:
        code: pytest's exit code, or one of the judge's own.
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
    """Copy the package into ``folder`` and compile it there; returns the copy's root."""
    package = Path(shutil.copytree(REPOSITORY / "src" / "outrider", folder / "outrider"))
    compileall.compile_dir(package, quiet=1)
    return package


def link_package(package: Path, folder: Path) -> Path:
    """Copy ``package`` into ``folder`` without its contents: the files are links to the same bytes. Returns the root.

    Whoever changes a file there must put a new one in its place.
    """
    return Path(shutil.copytree(package, folder / "outrider", copy_function=os.link))


def plant(mutant: Mutant, package: Path) -> None:
    """Replace the mutant's text in a copy of the package, breaking the link to what it was copied from.

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
    path.unlink()
    path.write_text(changed, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


class Judges:
    """Runs tests against copies, each in a process of its own; a context, which ends the process they are forked from.

    Args:
        forked: fork the processes from one that has imported ``preloaded``. Needs Linux.
        preloaded: names of modules, none of them the package's or the tests'.
        timeout_s: a run that takes longer is ended, with all that it started.
    """

    def __init__(
        self,
        *,
        forked: bool = sys.platform == "linux",
        preloaded: Sequence[str] = PRELOADED,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._server: subprocess.Popen[str] | None = None
        if forked:
            command = [*_SCRIPT, "serve", *preloaded]
            self._server = subprocess.Popen(
                command, cwd=REPOSITORY, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.communicate()

    def run(self, package: Path, tests: Sequence[str], scratch: Path) -> Outcome:
        """Run tests of this repository against a copy of the package.

        Args:
            package: root of the copy.
            tests: files or node ids.
            scratch: an existing folder for whatever the tests' tools write.

        Raises:
            RuntimeError: the process that is forked from has ended.
        """
        output = scratch / "output.txt"
        request = {
            "folder": str(package.parent),
            "arguments": [*_OPTIONS, *tests],
            "environment": _environment(package.parent, scratch=scratch),
            "output": str(output),
            "timeout_s": self._timeout_s,
        }
        code = _run_afresh(request) if self._server is None else _run_forked(request, self._server)
        printed = output.read_text(encoding="utf-8", errors="replace")
        if code == judge.TIMED_OUT:
            printed = f"no end after {self._timeout_s} s\n{printed}"
        return Outcome(code=code, output=printed)


def _run_forked(request: dict[str, Any], server: subprocess.Popen[str]) -> int:
    assert server.stdin is not None and server.stdout is not None
    try:
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        raise RuntimeError(f"the process that tests are forked from ended with {server.wait()}; see its errors above")
    return int(answer)


def _run_afresh(request: dict[str, Any]) -> int:
    command = [*_SCRIPT, "once", request["folder"], *request["arguments"]]
    with Path(request["output"]).open("wb") as written:
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=request["environment"],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                timeout=request["timeout_s"],
                check=False,
            )
        except subprocess.TimeoutExpired:
            return judge.TIMED_OUT
    return done.returncode


def _environment(*first: Path, scratch: Path | None = None) -> dict[str, str]:
    """This process's, without what steers the pytest that runs now; the copy first, files in scratch, one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = [*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    if scratch is not None:
        chosen |= {"TMPDIR": str(scratch), "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch)}
    return kept | chosen
