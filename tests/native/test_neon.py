"""The ARM kernels, cross-compiled and run on emulated processors: the same numbers as the portable ones.

This shows that they compute what they should; how fast they are it cannot show.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.native import build

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
NEEDS = "needs a cross compiler and an emulator (Debian packages g++-aarch64-linux-gnu and qemu-user)"

pytestmark = pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=NEEDS)

# Processors from the newest to the oldest generation, and which kernels each adds to the next one's.
PROCESSORS = {"max": "neon_bf16", "cortex-a76": "neon_dot", "cortex-a57": "neon"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("arm") / "selftest"
    return build.build(destination, with_selftest=True, cross=(COMPILER, "aarch64"))


def run_on(processor: str, program: Path, *kernels: str) -> subprocess.CompletedProcess[str]:
    command = [EMULATOR, "-cpu", processor, "-L", SYSTEM, str(program), *kernels]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_kernels_equal_the_portable_ones_and_rows_are_invariant(program: Path, processor: str) -> None:
    kernels = PROCESSORS[processor]
    done = run_on(processor, program, kernels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"kernels tested: {kernels}; auto is {kernels}\nall checks passed\n"


def test_a_processor_refuses_the_kernels_of_a_newer_one(program: Path) -> None:
    done = run_on("cortex-a57", program, "neon_dot", "neon_bf16")
    assert done.returncode == 1
    assert done.stdout == "kernels tested:; auto is neon\n1 checks failed\n"
