"""On the native path speculative output equals plain output bit for bit: no tie is an excuse, in any precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider import Engine, EngineConfig, SamplingParams, load_target, make_drafter
from outrider.errors import ConfigError
from outrider.measure.workloads import bundled
from outrider.models.base import LoadedTarget
from outrider.models.load import build_target, load_checkpoint
from outrider.native.library import Unavailable, library

pytestmark = pytest.mark.real_model

ARMS = [("suffix", 15), ("ngram", 3), ("slice:6", 5), ("slice:6:depth=3,width=3,num_nodes=9", 3)]
FIELDS = {
    "greedy": SamplingParams(max_tokens=40, logprobs=1),
    "seeded": SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=5, logprobs=1),
}


@pytest.fixture(scope="module", params=["bfloat16", "int8", "int4"])
def target(request: pytest.FixtureRequest) -> Iterator[LoadedTarget]:
    try:
        library()
    except Unavailable as error:
        pytest.skip(f"the native library is not there: {error}")
    yield load_target("smollm2-135m-instruct", dtype=request.param, device="cpu", backend="native")


@pytest.mark.parametrize("fields", FIELDS)
def test_any_drafter_batch_and_chunking_gives_the_same_bits(target: LoadedTarget, fields: str) -> None:
    prompts = [prompt.messages for prompt in bundled(num_prompts=3)]
    params = FIELDS[fields]
    alone = EngineConfig(max_batch_size=1, num_cached_prefixes=0, prefill_chunk=512)
    plain = Engine(target, config=alone).generate(prompts, params)
    assert target.spec.path.startswith("native-")
    for index, (drafter, k) in enumerate(ARMS):
        config = EngineConfig(num_draft_tokens=k, schedule="fixed", prefill_chunk=(33, 64, 500, 7)[index])
        got = Engine(target, drafter=make_drafter(drafter, target), config=config).generate(prompts, params)
        assert sum(result.stats.drafted for result in got) > 0
        for mine, theirs in zip(got, plain, strict=True):
            assert mine.token_ids == theirs.token_ids, (drafter, k)
            assert mine.logprobs == theirs.logprobs, (drafter, k, "the same tokens, but other bits")


def test_native_is_refused_by_name_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"backend native cannot run|does not run float32"):
        load_target("smollm2-135m-instruct", dtype="float32", device="cpu", backend="native")
    with pytest.raises(ConfigError, match="did you mean 'native'"):
        load_target("smollm2-135m-instruct", backend="nativ")


def test_without_the_library_pytorch_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from outrider.device import resolve_placement

    monkeypatch.setenv("OUTRIDER_NATIVE", "off")
    placement = resolve_placement("bfloat16", "cpu")
    target = build_target(load_checkpoint("smollm2-135m-instruct"), placement)
    assert target.spec.path == "pytorch"
    assert "OUTRIDER_NATIVE=off" in caplog.text
    with pytest.raises(ConfigError, match="OUTRIDER_NATIVE=off"):
        build_target(load_checkpoint("smollm2-135m-instruct"), placement, backend="native")
