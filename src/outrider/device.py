"""The one file that knows devices and precisions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ConfigError, nearest

__all__ = [
    "PRECISIONS",
    "Placement",
    "Precision",
    "Recorded",
    "compiled",
    "free_memory_bytes",
    "keep_prepared_products",
    "one_torch_thread",
    "resolve_placement",
    "set_num_threads",
    "synchronize",
    "to_device",
]

T = TypeVar("T")

Precision = Literal["float32", "bfloat16", "int8", "int4", "int4-g128"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and in which precision a model runs; ``auto`` is already resolved.

    Attributes:
        device: torch device.
        precision: how linear weights are held and multiplied; ``int4`` in groups of 32 on the grid of GGUF's Q4_1,
            ``int4-g128`` in groups of 128 (:mod:`outrider.models.grid`). ``auto`` never chooses 4 bits.
        reason: one clause that says why ``auto`` chose this; empty when the user chose.
    """

    device: torch.device
    precision: Precision
    reason: str = ""

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of the residual stream and of the cache (integer precisions quantise weights and rows, not the stream)."""
        return torch.float32 if self.precision == "float32" else torch.bfloat16


def resolve_placement(dtype: str = "auto", device: str = "auto") -> Placement:
    """Resolve ``auto`` by what the machine can do.

    Args:
        dtype: ``auto`` or a name of :data:`PRECISIONS`.
        device: ``auto``, ``cpu``, or any torch device string such as ``cuda:0``.

    Raises:
        ConfigError: an unknown precision, or a device that is not there.
    """
    chosen = _resolve_device(device)
    if dtype == "auto":
        precision, reason = _auto_precision(chosen)
        return Placement(device=chosen, precision=precision, reason=reason)
    if dtype not in PRECISIONS:
        raise ConfigError(
            f"dtype {dtype!r} is unknown; allowed: auto, {', '.join(PRECISIONS)}{nearest(dtype, PRECISIONS)}"
        )
    precision_given: Precision = dtype  # type: ignore[assignment]
    return Placement(device=chosen, precision=precision_given)


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device {device!r} is unknown; give auto, cpu or cuda[:index]") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but torch sees no CUDA device; give --device cpu or auto")
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; give auto, cpu or cuda[:index]")
    return chosen


def _auto_precision(device: torch.device) -> tuple[Precision, str]:
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return "bfloat16", "the GPU multiplies bfloat16"
        return "float32", "the GPU does not multiply bfloat16"
    if torch.cpu._is_avx512_bf16_supported():
        return "bfloat16", "the processor multiplies bfloat16 (AVX-512 BF16)"
    return "float32", "the processor does not multiply bfloat16 natively"


def set_num_threads(num_threads: int) -> None:
    """Set the size of the one thread pool that the CPU path uses."""
    if num_threads < 1:
        raise ConfigError(f"threads {num_threads} is not possible; give 1 or more")
    torch.set_num_threads(num_threads)


def keep_prepared_products(capacity: int = 16384) -> None:
    """Let oneDNN keep this many prepared matrix products, for work whose shapes vary; a choice of the user's own stays.

    It counts only before the first product of the process: oneDNN reads the variable once (its own default is 1,024).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(capacity))


@contextmanager
def one_torch_thread(is_wanted: bool) -> Iterator[None]:
    """Keep torch to one thread inside, where another pool of threads runs the passes.

    Threads of torch spin for milliseconds after each parallel operation and take the processors from that pool: an int8
    pass took twice as long. Setting the number costs under a microsecond.
    """
    before = torch.get_num_threads()
    if not is_wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next is honest. Free on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory of the device that is free now, a container's limit respected; ``None`` where nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    known = [free for free in (_system_free_bytes(), _container_free_bytes()) if free is not None]
    return min(known, default=None)


def _system_free_bytes() -> int | None:
    """Linux's own estimate of what programs can still take."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    available = values.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def _container_free_bytes() -> int | None:
    """What the control group of this process may still take, if it is limited."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else None


def to_device(values: Sequence[int] | np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these values on the device; the host does not wait for the copy."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def compiled(function: Callable[..., T], device_type: str) -> Callable[..., T]:
    """The function as one kernel on a GPU; as it is on a CPU, where compiling costs minutes and gains nothing here."""
    return torch.compile(function, dynamic=False) if device_type == "cuda" else function


class Recorded(Generic[T]):
    """A function of tensors that stay where they are. On a GPU it is recorded once and then replayed as one launch.

    Args:
        run: reads and writes tensors whose memory never changes, and waits for nothing.
        device: where.

    Each call overwrites what the call before returned.
    """

    def __init__(self, run: Callable[[], T], device: torch.device) -> None:
        self._run = run
        self._device = device
        self._graph: Any = None
        self._result: T | None = None

    def __call__(self) -> T:
        if self._device.type != "cuda":
            return self._run()
        if self._graph is None:
            self._record()
        self._graph.replay()
        assert self._result is not None
        return self._result

    def _record(self) -> None:
        """Run twice first, so that everything is compiled and allocated; on a stream of its own, as recording demands."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self._run()
