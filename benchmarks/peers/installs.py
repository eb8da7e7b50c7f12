"""Environments and long commands: everything that a peer needs is installed into a folder of its own.

The user's own pip installs, with its configuration (indexes, proxies, certificates). Nothing is written into the
repository or into the environment that runs Outrider. Every step can be cut off and run again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["TORCH", "Environment", "NotAvailable", "run_logged"]

TORCH = "torch==2.13.0"


class NotAvailable(Exception):
    """A peer cannot be had here; the text says why in one line."""


def run_logged(
    command: Sequence[str | Path], log: Path, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Run a command with its output appended to a log.

    Raises:
        NotAvailable: it failed; with the last line that it printed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    with log.open("a", encoding="utf-8") as file:
        file.write("$ " + " ".join(words) + "\n")
        file.flush()
        merged = {**os.environ, **(env or {})}
        try:
            status = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=merged, check=False
            ).returncode
        except OSError as error:
            raise NotAvailable(f"{words[0]} cannot be run: {error.strerror}") from None
    if status:
        raise NotAvailable(f"{Path(words[0]).name} ended with status {status}: {_last_line(log)} (log: {log})")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.strip() for line in lines if "error" in line.lower() and not line.startswith("$")]
    shown = errors[-1:] or [line.strip() for line in lines if line.strip()][-1:]
    return shown[0][:200] if shown else "no output"


class Environment:
    """A virtual environment of one peer. torch is pinned in it, so that no other build is drawn in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "setup.log"
        self.python = folder / "env" / "bin" / "python"

    def install(self, *requirements: str, unwanted: Sequence[str] = ()) -> None:
        """Install once; the stamp names what was asked for.

        Args:
            requirements: for pip. Where one of them needs torch, name it first.
            unwanted: packages that come along and are taken out again.

        Raises:
            NotAvailable: pip failed.
        """
        stamp, wanted = self.folder / "installed.txt", "\n".join(requirements) + "\n"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            run_logged([sys.executable, "-m", "venv", self.folder / "env"], self.log)
        constraints = self.folder / "constraints.txt"
        constraints.write_text(TORCH + "\n", encoding="utf-8")
        self.pip("install", "--constraint", str(constraints), *requirements)
        if unwanted:
            self.pip("uninstall", "--yes", *unwanted)
        stamp.write_text(wanted, encoding="utf-8")

    def also(self, requirement: str) -> None:
        """Install one more package without what it depends on.

        Raises:
            NotAvailable: pip failed.
        """
        stamp = self.folder / f"also-{requirement.partition('=')[0]}.txt"
        if not stamp.exists():
            self.pip("install", "--no-deps", requirement)
            stamp.write_text(requirement + "\n", encoding="utf-8")

    def pip(self, *arguments: str) -> None:
        """Run the environment's pip.

        Raises:
            NotAvailable: it failed.
        """
        run_logged([self.python, "-m", "pip", "--disable-pip-version-check", *arguments], self.log)

    def tool(self, name: str) -> Path:
        """A command that a package of this environment installed."""
        return self.folder / "env" / "bin" / name

    def path(self) -> dict[str, str]:
        """The variables under which the environment's commands find each other."""
        return {"PATH": f"{self.folder / 'env' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
