from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from outrider.cli.options import DEFAULT_TARGET, Settings, resolve_settings
from outrider.engine.config import EngineConfig
from outrider.errors import ConfigError, OutriderError
from outrider.sampling.params import SamplingParams


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    assert resolve_settings({}, None) == Settings()
    assert Settings().target == DEFAULT_TARGET


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, 'draft = "ngram"\nnum_draft_tokens = 3\nbatch_size = 2\ntemperature = 0.5\nseed = 1\n')
    settings = resolve_settings({"num_draft_tokens": 5, "seed": 2}, path)
    assert settings.draft == "ngram"
    assert settings.engine == EngineConfig(num_draft_tokens=5, max_batch_size=2)
    assert settings.sampling == SamplingParams(temperature=0.5, seed=2)


def test_a_file_and_flags_give_the_same_settings(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'target = "x"\nstop = ["a", "b"]\nstop_token_ids = [3]\nchat = false\nthreads = 2\nignore_eos = true\n'
        "[logit_bias]\n42 = -5\n",
    )
    flags = {
        "target": "x",
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "chat": False,
        "threads": 2,
        "ignore_eos": True,
        "logit_bias": ["42=-5"],
    }
    assert resolve_settings({}, path) == resolve_settings(flags, None)


def test_every_sampling_and_engine_field_is_a_known_key(tmp_path: Path) -> None:
    names = [field.name for field in (*fields(SamplingParams), *fields(EngineConfig))]
    for name in names:
        key = "batch_size" if name == "max_batch_size" else name
        try:
            resolve_settings({}, write(tmp_path, f"{key} = []\n"))
        except OutriderError as error:
            assert f"key {key!r}" not in str(error)  # the value is refused, not the key


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_speculatve_tokens = 3", "'num_speculatve_tokens' is unknown"),
        ("temprature = 3", "did you mean 'temperature'"),
        ("num_draft_token = 3", "did you mean 'num_draft_tokens'"),
        ("a = ", "is not TOML"),
        ("threads = true", "an integer"),
        ("chat = 1", "true or false"),
        ("stop = 5", "wrong kind"),
        ("num_draft_tokens = -1", "0 to 128"),
        ("num_draft_tokens = 1000", "0 to 128"),
        ("max_tokens = 0", "max_tokens 0"),
        ("logit_bias = ['x']", "ID=NUMBER"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings({}, write(tmp_path, text + "\n"))
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        resolve_settings({}, tmp_path / "none.toml")
