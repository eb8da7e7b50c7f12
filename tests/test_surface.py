"""What users see and what modules may see of each other: public names, flags, commands in the docs, import direction."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import outrider
import outrider.errors
from outrider.cli.main import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "outrider"
MODULES = sorted(SOURCE.rglob("*.py"))
FLAGS = Path(__file__).parent / "surface_flags.txt"

# Lower ranks are imported by higher ones, never the other way round.
RANKS = {
    **dict.fromkeys(("types", "shapes", "errors", "rng", "device", "metrics", "native"), 0),
    **dict.fromkeys(("sampling", "cache"), 1),
    **dict.fromkeys(("models", "traffic"), 2),
    **dict.fromkeys(("drafters", "verify"), 3),
    "engine": 4,
    **dict.fromkeys(("measure", "train", "audit"), 5),
    **dict.fromkeys(("export", "serve"), 6),
    **dict.fromkeys(("cli", "__main__"), 7),
}
# Neighbours of one rank that may be used: the paired comparison explains differences as the audit does.
NEIGHBOURS = {("measure", "audit"), ("__main__", "cli")}


def test_public_names_are_all_there_and_nothing_else_is() -> None:
    assert sorted(outrider.__all__) == list(outrider.__all__)
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    assert {*outrider.errors.__all__} - {"nearest"} <= set(outrider.__all__)
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        outrider.Enigne  # noqa: B018


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_offers(path: Path) -> None:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts[-1] == "__main__" or not path.read_text():
        return
    name = ".".join(("outrider", *parts)).removesuffix(".__init__")
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for offered in getattr(module, "__all__", ()):
        assert hasattr(module, offered), f"{name}.__all__ names {offered}, which it does not have"


@pytest.mark.parametrize("module", ["outrider", "outrider.cli.main"])
def test_importing_is_cheap(module: str) -> None:
    script = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names below ``outrider`` that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("outrider"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            if node.module == "outrider":
                yield from (f"outrider.{alias.name}" for alias in node.names)
            elif node.module is not None and node.module.startswith("outrider."):
                yield node.module


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent != SOURCE or path.name != "__init__.py"], ids=str
)
def test_imports_go_one_way(path: Path) -> None:
    area = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for name in imports_of(path):
        used = name.split(".")[1]
        if used == area or used in outrider.__all__:
            continue
        allowed = RANKS[used] < RANKS[area] or RANKS[used] == RANKS[area] == 0 or (area, used) in NEIGHBOURS
        assert allowed, f"{area} must not import {name}"


def literals(path: Path) -> Iterator[str]:
    """String constants of a module that are not docstrings."""
    tree = ast.parse(path.read_text())
    docs = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_only_the_device_module_knows_cuda() -> None:
    for path in MODULES:
        found = any("cuda" in text.lower() for text in literals(path)) or "torch.cuda" in path.read_text()
        assert found == (path == SOURCE / "device.py"), path


def commands(group: Any, prefix: str = "outrider") -> Iterator[tuple[str, Any]]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def flags_of(command: Any) -> list[str]:
    return sorted(flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts))


def test_flags_are_those_written_down() -> None:
    """A flag that appears, disappears or is renamed is a change of the surface: write it into the file, too."""
    found = [f"{name}: {' '.join(flags_of(command))}" for name, command in commands(typer.main.get_command(app))]
    assert "\n".join(found) + "\n" == FLAGS.read_text()


def shown_commands() -> Iterator[tuple[str, str]]:
    """(where, command line) for every command that the docs and the help texts show."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield page.name, line.removeprefix("$ ").strip()
        for line in re.findall(r"`((?:outrider|make) [^`]+)`", page.read_text()):
            yield page.name, line
    for path in sorted((SOURCE / "cli").glob("*.py")):
        for line in re.findall(r"- `(.+?)`", path.read_text()):
            yield path.name, line


def test_every_command_shown_exists() -> None:
    shown = list(shown_commands())
    assert sum(line.startswith("outrider ") for _, line in shown) > 10
    known = dict(commands(typer.main.get_command(app)))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for where, line in shown:
        for part in re.split(r"\||&&|;", line):
            words = shlex.split(part.split(">")[0], comments=True)
            if words[:1] == ["make"]:
                assert {word for word in words[1:] if "=" not in word} <= targets, f"{where}: {line}"
            if words[:1] == ["outrider"]:
                check_command(where, words, known)


def check_command(where: str, words: list[str], known: dict[str, Any]) -> None:
    depth = 3 if words[1] in ("audit", "train") else 2
    name = " ".join(words[:depth])
    assert name in known, f"{where}: {name}"
    try:
        known[name].make_context(name, words[depth:], resilient_parsing=False)
    except typer.TyperException as error:
        pytest.fail(f"{where}: {' '.join(words)}: {error}")


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"


def requirements(name: str, seen: set[str]) -> set[str]:
    """The installed distribution and everything that it needs here."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in seen:
        return seen
    try:
        needed = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return seen
    seen.add(name)
    for line in needed:
        if "extra ==" not in line:
            requirements(re.split(r"[ ;<>=!~\[(]", line, maxsplit=1)[0], seen)
    return seen


def test_constraints_pin_everything_that_is_installed() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins.values()), "exact public versions only"
    assert "torch==2.13.0" in lines
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    for line in asked:
        for name in requirements(re.split(r"[<>=\[]", line)[0], set()):
            # A GPU build of torch brings libraries of its own.
            assert name in pinned or name.startswith(("nvidia-", "cuda-", "triton")), f"{name} is not pinned"
