"""A tiny target on disk, a head that has learnt its answers by heart, and ways to spoil either."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.audit.doctor.case import Case
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import read_head, save_head
from outrider.models.base import LoadedTarget
from outrider.models.checkpoint import expected_shapes
from outrider.models.config import LlamaConfig
from outrider.models.llama_weights import RandomWeights
from outrider.models.load import load_target
from outrider.sampling.params import SamplingParams
from outrider.train.answers import AnswerSettings, EngineAnswers
from outrider.train.config import TrainConfig
from outrider.train.corpus import Corpus, Text
from outrider.train.run import Job, train_eagle
from outrider.train.start import Start
from tests.models import _files
from tests.train.tiny_run import Quiet

SHAPE: LlamaConfig = _files.config(
    hidden_size=32,
    intermediate_size=64,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    tie_word_embeddings=False,
    max_positions=512,
)
TAPS = (1, 3, 5)
NUM_TOKENS = 20
K = 4


def prompts(*, seed: int = 11, low: int = 40, high: int = 130, count: int = 6) -> list[list[int]]:
    """Random token ids: letters and signs of one byte."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[list[int]] = torch.randint(low, high, (count, 6), generator=generator).tolist()
    return drawn


def write_target(folder: Path, seed: int = 5, shape: LlamaConfig = SHAPE) -> Path:
    """A random model in a Hugging Face folder."""
    source = RandomWeights(config=shape, seed=seed)
    return _files.write_folder(folder, shape, {name: source.tensor(name) for name in expected_shapes(shape)})


def open_target(folder: Path, dtype: str = "float32") -> LoadedTarget:
    return load_target(folder, dtype=dtype, device="cpu", backend="pytorch")


def train_head(target: LoadedTarget, out: Path) -> Path:
    """Every prompt comes often, so the texts held out were seen, too: the card says what learning by heart gives."""
    texts = [
        Text(id=f"{index}-{copy}", line=1, tokens=tuple(prompt), trained=(False,) * len(prompt))
        for copy in range(2)
        for index, prompt in enumerate(prompts())
    ]
    job = Job(
        target=target,
        corpus=Corpus(texts=tuple(texts)),
        out=out,
        config=TrainConfig(
            num_epochs=230, batch_positions=90, learning_rate=0.01, unroll=K, evaluate_every=10_000, save_every_s=1e9
        ),
        shape=EagleConfig.for_target(SHAPE, draft_vocab_size=150, tap_layers=TAPS),
        start=Start(kind="random"),
        answers=(AnswerSettings(temperatures=(0.0,), max_tokens=NUM_TOKENS), EngineAnswers(target, batch_size=8)),
        taps="store",
        num_held_out=2,
        held_out_tokens=NUM_TOKENS,
    )
    train_eagle(job, Quiet())
    shutil.rmtree(out / "training")
    return out


def case(target: LoadedTarget, draft: str | Path, **changes: Any) -> Case:
    """The requests that the head was trained on."""
    params = SamplingParams(max_tokens=NUM_TOKENS)
    values = {"prompts": prompts(), "params": params, "num_draft_tokens": K, "is_timed": False, **changes}
    return Case(target=target, draft=str(draft), **values)


def rewired(folder: Path, out: Path, *, keep_record: bool = True, **changes: Any) -> Path:
    """The same tensors with another config in both files, as a wrong conversion leaves them."""
    found = read_head(folder)
    head = EagleHead(replace(found.head.config, **changes))
    state = found.head.state_dict()
    size = head.config.target_vocab_size
    state["t2d"] = torch.cat((state["t2d"], torch.zeros(size, dtype=torch.bool)))[:size]
    head.load_state_dict(state)
    info = found.info if keep_record else replace(found.info, hidden_statistics={}, record={})
    save_head(out, head, info)
    return out


def edited(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy whose tensors were changed in the file."""
    shutil.copytree(folder, out)
    path = out / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    return out


def with_config(folder: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose config.json was changed, and whose weights carry no shape of their own."""
    shutil.copytree(folder, out)
    values = json.loads((out / "config.json").read_text())
    change(values)
    (out / "config.json").write_text(json.dumps(values))
    path = out / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    save_file(tensors, path)
    return out
