"""Speculative output equals plain output: drafter x verifier x batch x draft length x stop position, greedy and seeded."""

from __future__ import annotations

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason
from tests.engine.support import VOCAB, Scripted, all_drafters, oracle, right_trees, table_model

PROMPTS = [[1], [2, 3], [4, 5, 6, 0, 1], [3, 3, 3], [6, 2, 0, 1]]
FIELDS = {
    "greedy": SamplingParams(max_tokens=24),
    "greedy-penalties": SamplingParams(max_tokens=24, frequency_penalty=0.7, presence_penalty=-0.4),
    "greedy-repetition": SamplingParams(max_tokens=24, repetition_penalty=1.7),
    "greedy-bias": SamplingParams(max_tokens=24, logit_bias={3: 1.5, 0: -2.0}),
    "greedy-bad-words": SamplingParams(max_tokens=24, bad_words_token_ids=[(2,), (3, 4), (1, 5, 6)]),
    "seeded": SamplingParams(max_tokens=24, temperature=1.0, seed=11),
    "seeded-cut": SamplingParams(max_tokens=24, temperature=1.4, top_k=4, top_p=0.9, min_p=0.02, seed=5),
    "seeded-penalties": SamplingParams(
        max_tokens=24, temperature=0.9, frequency_penalty=1.1, repetition_penalty=1.2, seed=-7
    ),
    "seeded-bad-words": SamplingParams(
        max_tokens=24,
        temperature=1.2,
        bad_words_token_ids=[(token, (token + step) % VOCAB) for token in range(VOCAB) for step in (1, 3)],
        seed=21,
    ),
    "seeded-min-tokens": SamplingParams(max_tokens=24, temperature=1.2, min_tokens=9, stop_token_ids=(5,), seed=3),
}


def decode(
    drafter: Scripted | None, params: SamplingParams, *, k: int = 4, batch: int = 64, eos: tuple[int, ...] = (6,)
) -> list[GenerationResult]:
    config = EngineConfig(num_draft_tokens=k, schedule="fixed", max_batch_size=batch)
    engine = Engine(table_model(eos=eos), drafter=drafter, config=config)
    results = engine.generate(PROMPTS, params)
    assert drafter is None or not drafter.live, "every sequence must be finished with the drafter"
    assert not engine.has_work
    return results


def ids(results: list[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("seed", [None, 11])
def test_plain_output_is_a_walk_through_the_table(seed: int | None) -> None:
    """What everything else here is compared with is itself right."""
    logits = table_model()._logits.double()
    params = SamplingParams(max_tokens=24, temperature=0 if seed is None else 1, seed=seed)
    for prompt, result in zip(PROMPTS, decode(None, params, eos=()), strict=True):
        text = [0, *prompt]
        for token in result.token_ids:
            scores = logits[text[-2], text[-1]]
            if seed is not None:
                scores = scores + gumbel_BV([noise_key(seed, 0, len(text) - 1, Purpose.TARGET)], VOCAB)[0]
            assert token == int(scores.argmax())
            text.append(token)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("kind", all_drafters())
@pytest.mark.parametrize("k", [1, 2, 4, 8, 20])
def test_output_is_plain_output(fields: str, kind: str, k: int) -> None:
    params = FIELDS[fields]
    plain = decode(None, params)
    speculative = decode(all_drafters()[kind](), params, k=k)
    assert ids(speculative) == ids(plain)
    assert [r.finish_reason for r in speculative] == [r.finish_reason for r in plain]
    assert sum(r.stats.drafted for r in speculative) > 0, "no drafts: the test is void"


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("kind", ["chain", "wrong behind two", "tree"])
def test_output_is_plain_output_where_most_drafts_are_right(fields: str, kind: str) -> None:
    """Random drafts are seldom kept; here runs of many tokens are, and penalties, bans and limits act inside them."""
    params = FIELDS[fields]
    plain = decode(None, params, eos=())
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, plain, strict=True)]
    drafter = {
        "chain": lambda: oracle(lambda sequence: texts[sequence]),
        "wrong behind two": lambda: oracle(lambda sequence: texts[sequence], wrong_at=2),
        "tree": lambda: right_trees(lambda sequence: texts[sequence], 9),
    }[kind]()
    got = decode(drafter, params, k=5, eos=())
    assert ids(got) == ids(plain)
    assert [r.finish_reason for r in got] == [r.finish_reason for r in plain]
    committed, passes = sum(r.stats.committed for r in got), sum(r.stats.passes for r in got)
    assert committed > 1.7 * passes, "hardly any draft was kept: the test is void"


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("fields", ["greedy", "seeded-cut"])
def test_companions_change_nothing(batch: int, fields: str) -> None:
    assert ids(decode(all_drafters()["random"](), FIELDS[fields], batch=batch)) == ids(decode(None, FIELDS[fields]))


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 3])
def test_drafts_that_are_right_or_wrong_at_one_depth(wrong_at: int | None) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = decode(None, params)
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, plain, strict=True)]
    got = decode(oracle(lambda sequence: texts[sequence], wrong_at=wrong_at), params, k=5)
    assert ids(got) == ids(plain)
    for result in got:
        if wrong_at is None:
            assert result.stats.acceptance_rate == 1.0
            assert result.stats.passes == 5  # 29 tokens behind the first, 6 a pass
        elif wrong_at == 0:
            # The very last step may only draft what the limit could still commit.
            assert result.stats.accepted == 0
            assert result.stats.tokens_per_pass == 1.0


@pytest.mark.parametrize("position", range(1, 19))
def test_stop_token_at_every_position_of_a_run(position: int) -> None:
    free = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.3, seed=8)
    engine = Engine(table_model())
    [whole] = engine.generate([[1, 2]], free)
    target = whole.token_ids[position - 1]
    first = whole.token_ids.index(target) + 1
    stopping = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.3, seed=8, stop_token_ids=(target,))
    drafter = oracle(lambda _: [1, 2, *whole.token_ids])
    config = EngineConfig(num_draft_tokens=8, schedule="fixed")
    [got] = Engine(table_model(), drafter=drafter, config=config).generate([[1, 2]], stopping)
    assert got.token_ids == whole.token_ids[:first]
    assert got.finish_reason is FinishReason.STOP
    assert got.usage.completion_tokens == first
    assert got.stats.committed == first - 1
    assert got.stats.accepted <= got.stats.drafted <= first


@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_limit_at_every_position(max_tokens: int) -> None:
    [whole] = Engine(table_model()).generate([[1, 2]], SamplingParams(max_tokens=40, ignore_eos=True))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    drafter = oracle(lambda _: [1, 2, *whole.token_ids])
    config = EngineConfig(num_draft_tokens=8, schedule="fixed")
    [got] = Engine(table_model(), drafter=drafter, config=config).generate([[1, 2]], params)
    assert got.token_ids == whole.token_ids[:max_tokens]
    assert got.finish_reason is FinishReason.LENGTH
    assert got.stats.acceptance_rate in (1.0, None)


def test_the_window_ends_the_output() -> None:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    for drafter in (None, all_drafters()["random"]()):
        config = EngineConfig(schedule="fixed")
        [got] = Engine(table_model(max_positions=20), drafter=drafter, config=config).generate([[1] * 15], params)
        assert len(got.token_ids) == 5
        assert got.finish_reason is FinishReason.LENGTH


def test_choices_differ_and_are_the_same_for_any_drafter() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.2, seed=4, n=3)
    plain = decode(None, params)
    assert len({r.token_ids for r in plain[:3]}) > 1
    assert [(r.id, r.index) for r in plain[:4]] == [
        ("request-0", 0),
        ("request-0", 1),
        ("request-0", 2),
        ("request-1", 0),
    ]
    for make in all_drafters().values():
        assert ids(decode(make(), params)) == ids(plain)


def test_zero_draft_tokens_is_plain_decoding() -> None:
    got = decode(all_drafters()["random"](), FIELDS["greedy"], k=0)
    assert all(r.stats.tokens_per_pass == 1.0 and r.stats.steps == 0 for r in got if r.stats.passes)
    assert ids(got) == ids(decode(None, FIELDS["greedy"]))


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("kind", ["random", "right"])
def test_logprobs_do_not_depend_on_drafting(mode: str, kind: str) -> None:
    for penalty in (0.0, 0.8):
        params = SamplingParams(
            max_tokens=16, temperature=1.1, top_k=5, seed=2, logprobs=3, logprobs_mode=mode, frequency_penalty=penalty
        )
        plain = decode(None, params)
        texts = [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, plain, strict=True)]
        got = decode(right_trees(lambda s, t=texts: t[s], 3) if kind == "right" else all_drafters()["trees"](), params)
        for one, other in zip(got, plain, strict=True):
            assert one.logprobs is not None and other.logprobs is not None
            assert len(one.logprobs) == len(one.token_ids)
            for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
                assert mine.token == theirs.token
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
                assert mine.token in [t for t, _ in mine.top]


def test_vocabulary_of_support() -> None:
    assert table_model().spec.vocab_size == VOCAB
