"""What the target says of each text: its taps, and its law where a draft token would be checked.

Either computed whenever a batch needs it (no disk, one pass of the target an epoch), or once, in shards on disk (a few
kilobytes a token, no pass of the target later). Both are independent of the draft vocabulary: laws hold target ids.

A shard is a safetensors file of some texts, packed; ``manifest.json`` lists the shards with their checksums and texts (by a
digest of tokens and marks), and says what they were made from. It is replaced after each shard: an interrupted capture goes
on behind the last whole one, and a run over more traffic captures the new texts only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.device import one_torch_thread
from outrider.errors import ConfigError, DataError
from outrider.files import replace_file, write_json
from outrider.models.base import PackedRows, Target
from outrider.train.corpus import Text
from outrider.train.packing import TextStates, rows_of

__all__ = ["LiveStates", "StateSource", "StoredStates", "capture_shards"]

_ROWS_A_PASS = 2048
_SHARD_BYTES = 128 * 2**20
_MANIFEST = "manifest.json"
_VERSION = 2
_TENSORS = ("taps", "law_ids", "law_probs")


class StateSource(Protocol):
    """Gives what the target says of texts; law ids are target ids."""

    def states(self, texts: Sequence[Text]) -> list[TextStates]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStates:
    """Asks the target each time.

    Attributes:
        target: whose taps and laws. tap_layers: index i is the residual stream before layer i.
        num_law_tokens: likeliest tokens kept of each law.
    """

    target: Target
    tap_layers: tuple[int, ...]
    num_law_tokens: int

    def stored_bytes(self, texts: Sequence[Text]) -> int:
        """Bytes that shards of these texts will take."""
        spec = self.target.spec
        tap_bytes = len(self.tap_layers) * spec.hidden_size * (4 if spec.precision == "float32" else 2)
        law_bytes = self.num_law_tokens * (4 + 2)
        rows = [rows_of(text) for text in texts]
        return sum(row.num_keys for row in rows) * tap_bytes + sum(len(row.queries) for row in rows) * law_bytes

    @torch.no_grad()
    def states(self, texts: Sequence[Text]) -> list[TextStates]:
        """Run the target over the texts, some at a time."""
        return [state for group in _groups(texts, _ROWS_A_PASS) for state in self._read(group)]

    def _read(self, texts: Sequence[Text]) -> list[TextStates]:
        cache = self.target.new_cache()
        rows = [rows_of(text) for text in texts]
        # The law of the last query lies one position behind the last key.
        tokens = [text.tokens[: row.num_keys + 1] for text, row in zip(texts, rows, strict=True)]
        starts = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
        wanted = tuple(start + query + 1 for start, row in zip(starts, rows, strict=True) for query in row.queries)
        packed = PackedRows.pack(
            tokens,
            slots=[cache.allocate(len(each)) for each in tokens],
            starts=[0] * len(tokens),
            device=self.target.spec.device,
            logit_rows=wanted,
        )
        with one_torch_thread(self.target.spec.path.startswith("native")):
            result = self.target.forward(packed, cache, taps=self.tap_layers)
        taps_RD = torch.cat([result.taps[layer] for layer in self.tap_layers], dim=-1).cpu()
        laws = [_sparse(piece, self.num_law_tokens) for piece in torch.split(result.logits_RV, 256)]
        ids_QK, probs_QK = torch.cat([ids for ids, _ in laws]), torch.cat([probs for _, probs in laws])
        counts = [len(row.queries) for row in rows]
        return [
            TextStates(taps_SD=taps_RD[start : start + row.num_keys], law_ids_QK=ids, law_probs_QK=probs)
            for start, row, ids, probs in zip(
                starts, rows, torch.split(ids_QK, counts), torch.split(probs_QK, counts), strict=True
            )
        ]


def _sparse(logits_RV: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    top = logits_RV.topk(min(num_tokens, logits_RV.shape[1]), dim=-1)
    log_probs = top.values - logits_RV.logsumexp(dim=-1, keepdim=True)
    return top.indices.to(torch.int32).cpu(), log_probs.exp().to(torch.float16).cpu()


def _groups(texts: Sequence[Text], num_rows: int) -> Iterator[list[Text]]:
    """Consecutive texts of so many tokens together; a longer one alone."""
    group: list[Text] = []
    size = 0
    for text in texts:
        if group and size + len(text.tokens) > num_rows:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text.tokens)
    if group:
        yield group


def capture_shards(
    folder: Path,
    texts: Sequence[Text],
    source: LiveStates,
    *,
    disk_budget_bytes: int,
    on_texts: Callable[[int], None] = lambda done: None,
) -> StoredStates:
    """Store what the target says of all texts; goes on where an earlier run stopped.

    Raises:
        ConfigError: the forecast is above the budget, or above what is free on the disk.
        DataError: a damaged shard, or shards made from something else.
    """
    manifest = _open_manifest(folder, _made_from(source))
    stored = {digest for shard in manifest["shards"] for digest, _, _ in shard["texts"]}
    missing = [text for text in texts if _digest(text) not in stored]
    _check_room(folder, manifest, source.stored_bytes(missing), disk_budget_bytes)
    done = len(texts) - len(missing)
    on_texts(done)
    shard: list[tuple[Text, TextStates]] = []
    for group in _groups(missing, _ROWS_A_PASS):
        shard += zip(group, source.states(group), strict=True)
        if sum(_num_bytes(state) for _, state in shard) >= _SHARD_BYTES:
            _write_shard(folder, manifest, shard)
            shard = []
        done += len(group)
        on_texts(done)
    if shard:
        _write_shard(folder, manifest, shard)
    return StoredStates(folder, texts)


def _check_room(folder: Path, manifest: dict[str, Any], needed: int, budget: int) -> None:
    """Room for so many bytes more, within the budget together with the shards that are there."""
    shards = [folder / shard["file"] for shard in manifest["shards"]]
    stored = sum(path.stat().st_size for path in shards if path.is_file())
    free = shutil.disk_usage(folder).free
    room = budget - stored
    if needed > min(room, free):
        kept = f", of which {stored / 1e9:.3g} GB are taken" if stored else ""
        limit = (
            f"--disk-budget of {budget / 1e9:g} GB{kept}" if room < free else f"{free / 1e9:.1f} GB free on the disk"
        )
        raise ConfigError(
            f"storing the taps of the texts that are not there yet needs {needed / 1e9:.3g} GB, more than the {limit}; "
            "give --taps live, fewer rows (--limit), or a larger --disk-budget"
        )


def _digest(text: Text) -> str:
    """Names a text by what its states depend on."""
    marked = json.dumps([text.tokens, [int(flag) for flag in text.trained]])
    return hashlib.sha256(marked.encode()).hexdigest()[:32]


def _made_from(source: LiveStates) -> dict[str, Any]:
    spec = source.target.spec
    return {
        "fingerprint": spec.fingerprint,
        "precision": spec.precision,
        "tap_layers": list(source.tap_layers),
        "num_law_tokens": source.num_law_tokens,
    }


def _open_manifest(folder: Path, made_from: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _MANIFEST
    if not path.exists():
        return {"version": _VERSION, "made_from": made_from, "shards": []}
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = {"version": manifest["version"], **manifest["made_from"]}
    for name, value in {"version": _VERSION, **made_from}.items():
        if found.get(name) != value:
            raise DataError(
                f"{folder} holds taps made with {name} = {found.get(name)!r}, now it is {value!r}; "
                "delete the folder, or give another --out"
            )
    return manifest


def _num_bytes(state: TextStates) -> int:
    return state.taps_SD.nbytes + state.law_ids_QK.nbytes + state.law_probs_QK.nbytes


def _write_shard(folder: Path, manifest: dict[str, Any], pairs: Sequence[tuple[Text, TextStates]]) -> None:
    name = f"shard-{len(manifest['shards']):05d}.safetensors"
    states = [state for _, state in pairs]
    tensors = {
        "taps": torch.cat([state.taps_SD for state in states]),
        "law_ids": torch.cat([state.law_ids_QK for state in states]),
        "law_probs": torch.cat([state.law_probs_QK for state in states]),
    }
    replace_file(folder / name, lambda path: save_file(tensors, path))
    texts = [[_digest(text), len(state.taps_SD), len(state.law_ids_QK)] for text, state in pairs]
    manifest["shards"].append({"file": name, "texts": texts, "sha256": _checksum(folder / name)})
    write_json(folder / _MANIFEST, manifest)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class StoredStates:
    """Reads shards.

    Args:
        folder: what :func:`capture_shards` wrote.
        texts: those to be read; all of them were captured.

    Raises:
        DataError: a shard is missing or damaged (found when it is first read).
    """

    def __init__(self, folder: Path, texts: Sequence[Text]) -> None:
        self._folder = folder
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        self._shards: list[dict[str, Any]] = manifest["shards"]
        self._open: dict[int, Any] = {}
        places: dict[str, tuple[int, slice, slice]] = {}
        for number, shard in enumerate(self._shards):
            first_key = first_query = 0
            for digest, num_keys, num_queries in shard["texts"]:
                past_key, past_query = first_key + num_keys, first_query + num_queries
                places[digest] = number, slice(first_key, past_key), slice(first_query, past_query)
                first_key, first_query = past_key, past_query
        self._place = {text.id: places[_digest(text)] for text in texts}

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards on disk."""
        return sum((self._folder / shard["file"]).stat().st_size for shard in self._shards)

    def states(self, texts: Sequence[Text]) -> list[TextStates]:
        """Read the texts' parts of their shards."""
        return [self._read(*self._place[text.id]) for text in texts]

    def _read(self, number: int, keys: slice, queries: slice) -> TextStates:
        if number not in self._open:
            self._open[number] = self._verified(self._shards[number])
        taps, ids, probs = (self._open[number][name] for name in _TENSORS)
        return TextStates(taps_SD=taps[keys], law_ids_QK=ids[queries], law_probs_QK=probs[queries])

    def _verified(self, shard: dict[str, Any]) -> dict[str, Any]:
        path = self._folder / shard["file"]
        if not path.is_file() or _checksum(path) != shard["sha256"]:
            raise DataError(f"{path} is missing or damaged; delete {self._folder} and run the command again")
        file: Any = safe_open(path, framework="pt")
        return {name: file.get_slice(name) for name in _TENSORS}
