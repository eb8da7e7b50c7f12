"""Loads the native library and mirrors its C structures.

The library is looked for beside this file (built at installation), then in the user's cache, and is else built there.
``OUTRIDER_NATIVE=off`` forbids it; ``OUTRIDER_NATIVE=<kernels>`` (``amx``, ``avx512``, ``avx2``; on ARM ``neon_bf16``,
``neon_dot``, ``neon``; anywhere ``portable``) forces one instruction set, for tests and comparisons.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

from outrider.native import build

__all__ = [
    "FORMATS",
    "KERNELS",
    "PHASES",
    "CForest",
    "CGrowth",
    "CLayer",
    "CMatrix",
    "CModel",
    "CPass",
    "CSegment",
    "Context",
    "Unavailable",
    "is_available",
    "library",
    "loaded_library",
    "open_context",
    "requested_kernels",
]

PHASES = ("qkv", "attention", "out", "gate_up", "down", "head")
"""What ``CPass.phase_ns`` counts, in order."""

FORMATS = ("bfloat16", "int8", "int4")
"""How a matrix is held, by the number that C knows it by."""

_KERNELS_OF = {"x86_64": ("amx", "avx512", "avx2"), "aarch64": ("neon_bf16", "neon_dot", "neon")}

KERNELS = (*_KERNELS_OF.get(build.architecture(), ()), "portable")
"""Instruction sets of this machine's architecture, fastest first."""

_PACKAGED = Path(__file__).resolve().parent / "lib"
"""Where the package's build hook puts the library."""


class Unavailable(Exception):
    """The native path cannot run here; the text says why, in one line."""


class CMatrix(Structure):
    """``OutriderMatrix``."""

    _fields_ = [
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("num_blocks", c_int32),
        ("num_steps", c_int32),
        ("format", c_int32),
        ("group_parts", c_int32),
    ]


class CLayer(Structure):
    """``OutriderLayer``."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("qkv", CMatrix),
        ("out", CMatrix),
        ("feed_forward_norm", c_void_p),
        ("gate_up", CMatrix),
        ("down", CMatrix),
    ]


class CModel(Structure):
    """``OutriderModel``."""

    _fields_ = [
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("hidden_padded", c_int32),
        ("inner_padded", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_width", c_int32),
        ("vocab_size", c_int32),
        ("format", c_int32),
        ("norm_eps", c_float),
        ("embedding", c_void_p),
        ("layers", c_void_p),
        ("final_norm", c_void_p),
        ("head", CMatrix),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("side_norm", c_void_p),
        ("norm_inputs", c_int32),
        ("fuse", CMatrix),
        ("fuse_bias", c_void_p),
        ("split_rows", c_int32),
        ("rotation_signs", c_void_p),
        ("rotation_cosines", c_void_p),
        ("rotation_power", c_int32),
    ]


class CSegment(Structure):
    """``OutriderSegment``."""

    _fields_ = [
        ("cache", c_void_p),
        ("capacity", c_int64),
        ("base", c_int32),
        ("start", c_int32),
        ("num_rows", c_int32),
        ("parents", c_void_p),
        ("num_cached_nodes", c_int32),
    ]


class CPass(Structure):
    """``OutriderPass``."""

    _fields_ = [
        ("num_rows", c_int32),
        ("num_segments", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("segments", c_void_p),
        ("num_logit_rows", c_int32),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("argmax", c_void_p),
        ("num_taps", c_int32),
        ("tap_layers", c_void_p),
        ("taps", c_void_p),
        ("phase_ns", c_void_p),
        ("inputs", c_void_p),
        ("is_fused", c_int32),
        ("num_top", c_int32),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
    ]


class CGrowth(Structure):
    """``OutriderGrowth``."""

    _fields_ = [
        ("cache", c_void_p),
        ("capacity", c_int64),
        ("base", c_int32),
        ("depth", c_int32),
        ("position", c_int64),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("scores", c_void_p),
        ("num_candidates", c_int32),
    ]


class CForest(Structure):
    """``OutriderForest``."""

    _fields_ = [
        ("num_trees", c_int32),
        ("width", c_int32),
        ("trees", c_void_p),
        ("target_ids", c_void_p),
        ("min_score", c_double),
        ("min_level", c_double),
    ]


def requested_kernels() -> str:
    """What ``OUTRIDER_NATIVE`` asks for: ``auto`` unless it is set."""
    return os.environ.get("OUTRIDER_NATIVE", "") or "auto"


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded library, built first if it must be.

    Raises:
        Unavailable: it is forbidden, or cannot be built or loaded.
    """
    try:
        path = _locate()
        loaded = ctypes.CDLL(str(path))
    except (build.BuildError, OSError) as error:
        raise Unavailable(" ".join(str(error).split())) from None
    _declare(loaded)
    return loaded


def loaded_library() -> ctypes.CDLL | None:
    """The library if this process uses it already: nobody who runs without it waits for a compiler."""
    return library() if library.cache_info().currsize else None


def _locate() -> Path:
    packaged = _PACKAGED / build.library_name()
    if packaged.is_file():
        return packaged
    cached = build.cache_path()
    return cached if cached.is_file() else build.build(cached)


def _declare(lib: ctypes.CDLL) -> None:
    lib.outrider_open.argtypes, lib.outrider_open.restype = [c_char_p, c_int32], c_void_p
    lib.outrider_close.argtypes, lib.outrider_close.restype = [c_void_p], None
    lib.outrider_kernels.argtypes, lib.outrider_kernels.restype = [c_void_p], c_char_p
    lib.outrider_run.argtypes, lib.outrider_run.restype = [c_void_p, POINTER(CModel), POINTER(CPass)], c_int32
    lib.outrider_grow.argtypes = [c_void_p, POINTER(CModel), POINTER(CPass), POINTER(CForest)]
    lib.outrider_grow.restype = c_int32
    lib.outrider_keep.argtypes = [c_void_p, c_int64, c_int32, c_int32, c_int64, c_void_p, c_int32]
    lib.outrider_keep.restype = None
    lib.outrider_stream.argtypes, lib.outrider_stream.restype = [c_void_p, c_void_p, c_int64], c_uint32
    lib.outrider_test_available.argtypes, lib.outrider_test_available.restype = [c_char_p], c_int32


class Context:
    """Threads and scratch memory of the native library. Use :func:`open_context`."""

    def __init__(self, kernels: str, num_threads: int) -> None:
        self._lib = library()
        self._handle = self._lib.outrider_open(kernels.encode(), num_threads)
        if not self._handle:
            allowed = ", ".join(name for name in KERNELS if is_available(name))
            raise Unavailable(f"kernels {kernels!r} cannot run on this processor; allowed here: auto, {allowed}")
        self.num_threads = num_threads
        self.kernels: str = self._lib.outrider_kernels(self._handle).decode()

    def run(self, model: CModel, rows: CPass) -> None:
        """Run one pass. The interpreter's lock is released meanwhile."""
        if self._lib.outrider_run(self._handle, model, rows):
            raise MemoryError("the native pass ran out of memory; lower the batch size or the prefill chunk")

    def grow(self, model: CModel, entries: CPass, forest: CForest) -> None:
        """Run one pass over a head's entries and one for each level of the trees behind them."""
        if self._lib.outrider_grow(self._handle, model, entries, forest):
            raise MemoryError("the native pass of the head ran out of memory; lower the batch size")

    @property
    def handle(self) -> int:
        """What C calls take."""
        handle: int = self._handle
        return handle

    def stream(self, address: int, num_bytes: int) -> int:
        """Sum memory with all threads: what a pass over as many bytes cannot beat."""
        total: int = self._lib.outrider_stream(self._handle, address, num_bytes // 256 * 256)
        return total

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._lib.outrider_close(handle)


def is_available(kernels: str) -> bool:
    """True if that instruction set can run here."""
    return bool(library().outrider_test_available(kernels.encode()) == 0)


_contexts: dict[tuple[str, int, int], Context] = {}


def open_context(kernels: str, num_threads: int) -> Context:
    """The process's context of these kernels and threads. All targets share it: passes take turns.

    Raises:
        Unavailable: forbidden by ``OUTRIDER_NATIVE=off``, no compiler, or the processor lacks the kernels.
    """
    if kernels == "off":
        raise Unavailable("OUTRIDER_NATIVE=off")
    # Threads do not survive a fork, so a child opens its own.
    key = (kernels, num_threads, os.getpid())
    if key not in _contexts:
        _contexts[key] = Context(kernels, num_threads)
    return _contexts[key]
