"""Compiles the native library. Standard library only: the package's build hook runs this file by its path.

Each file gets its own instruction-set flags, and the library chooses at run time, so one build serves every processor of
the architecture.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["BuildError", "architecture", "build", "cache_path", "find_compiler", "library_name"]

SOURCES = Path(__file__).resolve().parent / "csrc"

# No contraction: an expression must round alike wherever the compiler inlines it (rows are compared bit for bit).
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
)
_AVX512 = ("-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16")
_FILE_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "isa_avx2": ("-mavx2", "-mfma", "-mf16c"),
        "isa_avx512": _AVX512,
        "isa_amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    },
    "aarch64": {
        "isa_neon_dot": ("-march=armv8.2-a+dotprod",),
        "isa_neon_bf16": ("-march=armv8.2-a+dotprod+bf16+i8mm",),
    },
}
_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
_SANITIZER_FLAGS = ("-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
_TIMEOUT_S = 600


class BuildError(Exception):
    """The library could not be built; the text is one line with the first thing the compiler complained about."""


def architecture() -> str:
    """What this machine's processor is: ``x86_64``, ``aarch64``, or another name of the system's."""
    machine = platform.machine().lower() or "unknown"
    return _ARCHITECTURES.get(machine, machine)


def library_name() -> str:
    """File name of the library for these sources: it changes when a source or a flag does."""
    digest = hashlib.sha256(repr((_FLAGS, _FILE_FLAGS)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + path.read_bytes())
    return f"liboutrider-{sys.platform}-{architecture()}-{digest.hexdigest()[:16]}.so"


def cache_path() -> Path:
    """Where a library that is built on first use is kept: the user's cache, found as for models."""
    own, shared = os.environ.get("OUTRIDER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return (Path(own).expanduser() if own else base / "outrider") / "native" / library_name()


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else the first of g++, clang++ and c++ on the path."""
    named = os.environ.get("CXX", "").split()
    for name in (*named[:1], "g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    return None


def build(
    destination: Path, *, sanitizers: str = "", with_selftest: bool = False, cross: tuple[str, str] | None = None
) -> Path:
    """Compile into ``destination``, which appears complete or not at all.

    Args:
        destination: path of the shared library, or of the self-test program.
        sanitizers: checks at run time, as the compiler names them: ``address,undefined`` or ``thread``.
        with_selftest: link the program ``selftest.cpp`` instead of a library.
        cross: compiler for another machine, and that machine's architecture.

    Raises:
        BuildError: no compiler, or it failed.
    """
    compiler, machine = cross or (find_compiler(), architecture())
    if compiler is None:
        raise BuildError("no C++ compiler was found (looked for $CXX, g++, clang++, c++)")
    names = [path.stem for path in sorted(SOURCES.glob("*.cpp")) if with_selftest or "selftest" not in path.stem]
    extra = (f"-fsanitize={sanitizers}", *_SANITIZER_FLAGS) if sanitizers else ()
    own_flags = [(*extra, *_FILE_FLAGS.get(machine, {}).get(name, ())) for name in names]
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        objects = [Path(folder) / f"{name}.o" for name in names]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(_compile, [compiler] * len(names), names, objects, own_flags))
        linked = Path(folder) / destination.name
        kind = () if with_selftest else ("-shared",)
        _run([compiler, *kind, "-pthread", *extra, "-o", str(linked), *map(str, objects)])
        linked.replace(destination)
    return destination


def _compile(compiler: str, name: str, out: Path, extra: tuple[str, ...]) -> None:
    _run([compiler, *_FLAGS, *extra, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(out)])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not run: {error}") from None
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0].strip()}")


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else cache_path()))
