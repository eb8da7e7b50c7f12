"""What a number needs beside it: machine, versions, commit, command line, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_run", "peak_rss_bytes"]

ROOT = Path(__file__).parent.parent
CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
)
PACKAGES = ("outrider", "torch", "transformers", "tokenizers", "numpy", "gguf")


def describe_run(module: str, arguments: list[str]) -> dict[str, Any]:
    """Machine, versions, commit and command line of this run."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *map(_shown, arguments)]),
        "git": _git(),
        "machine": _machine(),
        "versions": _versions(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def _shown(argument: str) -> str:
    """An argument as it may be published: of an absolute path only the last part."""
    return Path(argument).name if argument.startswith("/") else argument


def _machine() -> dict[str, Any]:
    info = _cpuinfo()
    flags = set(info.get("flags", info.get("Features", "")).split())
    machine: dict[str, Any] = {
        "system": platform.platform(terse=True),
        "processor": info.get("model name", platform.processor() or platform.machine()),
        "family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name(0)
    return machine


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, Any]:
    try:
        commit = _git_output("rev-parse", "HEAD")
        status = _git_output("status", "--porcelain", "--untracked-files=no")
        changed = [line for line in status.splitlines() if "benchmarks/" not in line]
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "changed_files": None}
    return {"commit": commit, "changed_files": len(changed)}


def _git_output(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def peak_rss_bytes() -> int:
    """Most resident memory of this process. ``VmHWM`` where there is one: ``ru_maxrss`` keeps a parent's peak over exec."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
