"""A seeded corpus of damaged files: each either loads whole or is refused with one of our errors, quickly.

Another exception than an :class:`OutriderError` fails the test, and so does a case that takes seconds.
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from outrider.errors import OutriderError
from outrider.models.checkpoint import Checkpoint
from outrider.models.gguf import open_gguf
from outrider.models.hf import open_folder
from tests.models import _files

CHAT = [{"role": "user", "content": "hi"}]
MOST_SECONDS = 10.0


def _try(load: Callable[[], Checkpoint]) -> bool:
    """Load all that there is. True if it loaded; an OutriderError is fine, anything else is not."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings(action="ignore"):
            checkpoint = load()
            for name in checkpoint.tensor_names():
                checkpoint.tensor(name)
            if checkpoint.tokenizer is not None:
                checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("hello 1 é<|im_end|>"))
                checkpoint.tokenizer.render_chat(CHAT)
    except OutriderError as error:
        assert str(error) and "\n" not in str(error)
        return False
    finally:
        assert time.monotonic() - start < MOST_SECONDS
    return True


def _damaged(data: bytes, rng: random.Random, header_bytes: int) -> bytes:
    """One of: cut off, bits flipped, a number made huge, a block repeated or removed. Mostly in the header."""
    out = bytearray(data)
    at = rng.randrange(header_bytes if rng.random() < 0.9 else len(out))
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(out[:at])
    if kind == 1:
        for _ in range(rng.randrange(1, 8)):
            out[rng.randrange(header_bytes)] ^= 1 << rng.randrange(8)
    elif kind == 2:
        value = rng.choice([2**64 - 1, 2**63, 2**62, 2**32, 2**31, 2**40, 0])
        out[at : at + 8] = value.to_bytes(8, "little")
    elif kind == 3:
        out[at:at] = out[at : at + rng.randrange(1, 64)]
    else:
        del out[at : at + rng.randrange(1, 64)]
    return bytes(out)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    shape = _files.config(num_layers=1)
    path = tmp_path_factory.mktemp("hostile") / "tiny.gguf"
    kind = gguf.GGMLQuantizationType.Q4_1
    return _files.write_gguf(path, shape, _files.random_tensors(shape), kind=kind).read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = _files.config(num_layers=1)
    return _files.write_folder(tmp_path_factory.mktemp("hostile") / "tiny", shape, _files.random_tensors(shape))


def _copy(folder: Path, to: Path, without: str) -> Path:
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name != without:
            (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("part", range(6))
def test_damaged_gguf(gguf_bytes: bytes, tmp_path: Path, part: int) -> None:
    rng = random.Random(part)
    path = tmp_path / "damaged.gguf"
    header_bytes = gguf_bytes.index(b"output_norm") + 100
    loaded = 0
    for _ in range(40):
        path.write_bytes(_damaged(gguf_bytes, rng, header_bytes))
        loaded += _try(lambda: open_gguf(path, name="damaged"))
    assert loaded < 40  # the damage does reach what is read


@pytest.mark.parametrize("count", [2**64 - 1, 2**63, 2**48, 2**32, 10**7])
def test_huge_counts_in_gguf_allocate_nothing(gguf_bytes: bytes, tmp_path: Path, count: int) -> None:
    path = tmp_path / "huge.gguf"
    number = count.to_bytes(8, "little")
    tokens = gguf_bytes.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    for at in (8, 16, 24, tokens):  # tensors, keys, length of the first key, tokens
        path.write_bytes(gguf_bytes[:at] + number + gguf_bytes[at + 8 :])
        assert not _try(lambda: open_gguf(path, name="huge"))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_folder(folder: Path, tmp_path: Path, file: str) -> None:
    rng = random.Random(file)
    copy = _copy(folder, tmp_path / "copy", file)
    data = (folder / file).read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little") if file.endswith("safetensors") else len(data)
    for _ in range(40):
        (copy / file).write_bytes(_damaged(data, rng, header_bytes))
        _try(lambda: open_folder(copy, name="damaged"))


def test_damaged_pickles(folder: Path, tmp_path: Path) -> None:
    shape = _files.config(num_layers=1)
    copy = _copy(folder, tmp_path / "copy", "model.safetensors")
    target = copy / "pytorch_model.bin"
    for legacy in (False, True):
        rng = random.Random(legacy)
        torch.save(_files.random_tensors(shape), target, _use_new_zipfile_serialization=not legacy)
        data = target.read_bytes()
        assert _try(lambda: open_folder(copy, name="whole"))
        for _ in range(25):
            target.write_bytes(_damaged(data, rng, 2000 if legacy else len(data)))
            _try(lambda: open_folder(copy, name="damaged"))


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
]


def test_every_config_key_with_every_kind_of_value(folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path / "copy", "config.json")
    config = json.loads((folder / "config.json").read_text())
    extra = ["rope_scaling", "rope_parameters", "quantization_config", "attention_bias", "sliding_window"]
    for key in [*config, *extra]:
        for value in VALUES:
            _files.write_json(copy / "config.json", {**config, key: value})
            _try(lambda: open_folder(copy, name="damaged"))
    for rope in (
        {"rope_type": "llama3"},
        {"rope_type": []},
        {"type": "linear", "factor": "x"},
        {"type": "linear", "factor": 0},
    ):
        _files.write_json(copy / "config.json", {**config, "rope_scaling": rope})
        assert not _try(lambda: open_folder(copy, name="damaged"))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"x"', "{", "[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}']
)
@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"]
)
def test_json_files_that_hold_something_else(folder: Path, tmp_path: Path, file: str, text: str) -> None:
    copy = _copy(folder, tmp_path / "copy", "model.safetensors" if "index" in file else file)
    (copy / file).write_text(text)
    assert not _try(lambda: open_folder(copy, name="damaged")) or text.startswith('{"weight_map"')


def test_templates_of_any_text_render_or_are_refused() -> None:
    rng = random.Random(0)
    pieces = [
        *(
            "{% for m in messages %}",
            "{% endfor %}",
            "{% if m %}",
            "{% endif %}",
            "{{ m.role }}",
            "{{ messages }}",
            "{{",
        ),
        *(
            "}}",
            "{%",
            "%}",
            "{% set x = ",
            "x",
            " * 99999999",
            " ~ x",
            "'a'",
            "|join",
            "|tojson",
            "loop.index",
            "(",
            ")",
        ),
        *(
            "{% macro f(x) %}",
            "{% endmacro %}",
            "{{ f(1) }}",
            "{{ f }}",
            "{# ",
            " #}",
            "__class__",
            ".",
            "[",
            "]",
            "\0",
            "é",
        ),
    ]
    for _ in range(150):
        source = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        tokenizer = _files.tokenizer(chat_template=source)
        start = time.monotonic()
        try:
            tokenizer.render_chat(CHAT)
        except OutriderError as error:
            assert str(error)
        assert time.monotonic() - start < MOST_SECONDS
