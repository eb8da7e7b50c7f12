"""The processed law at every node of a step against a slow reference: order of processing, history, batches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.rng import Purpose, gumbel_BV, noise_key, uniform
from outrider.sampling.laws import ProcessedLaws
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.types import ROOT
from outrider.verify.base import Place

from . import reference
from .strategies import EOS, VOCAB, logits_rows, params, tokens

AT_ROOT = Place(sequence=0, node=ROOT, path=())


def state_of(
    fields: SamplingParams,
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    vocab_size: int = VOCAB,
    seed: int = 0,
) -> SamplingState:
    state = SamplingState(
        fields, prompt_tokens=prompt, vocab_size=vocab_size, eos_token_ids=(vocab_size - 1,), seed=seed, choice=0
    )
    state.commit(output)
    return state


def laws_of(rows: object, *states: SamplingState) -> ProcessedLaws:
    logits = torch.as_tensor(rows, dtype=torch.float64)
    per = logits.shape[0] // len(states)
    return ProcessedLaws(logits, first_rows=[per * i for i in range(len(states))], states=states)


@settings(deadline=None, max_examples=300)
@given(
    fields=params(st.sampled_from([0.0, 0.7, 1.0, 1.9])),
    row=logits_rows,
    prompt=st.lists(tokens, min_size=1, max_size=5),
    output=st.lists(tokens, max_size=5),
    path=st.lists(tokens, max_size=4),
)
def test_law_equals_reference_with_the_history_of_the_path(
    fields: SamplingParams, row: list[float], prompt: list[int], output: list[int], path: list[int]
) -> None:
    expected_logits = reference.processed_logits(row, fields, prompt, [*output, *path], EOS)
    if max(expected_logits) == -math.inf:
        return
    state = state_of(fields, prompt=prompt, output=output)
    rows = [[99.0 - i for i in range(VOCAB)]] * len(path) + [row]
    place = Place(sequence=0, node=len(path) - 1, path=tuple(path))
    got = laws_of(rows, state).probs_BV([place])[0].tolist()
    expected = reference.law(row, fields, prompt, [*output, *path], EOS)
    assert [p > 0 for p in got] == [p > 0 for p in expected]
    assert got == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(logits_rows, params(st.sampled_from([0.0, 0.6, 1.0]))), min_size=2, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_a_row_does_not_depend_on_its_companions(rows: list[tuple[list[float], SamplingParams]], seed: int) -> None:
    states = [state_of(fields, prompt=(1, 2), output=(3, 3), seed=seed + i) for i, (_, fields) in enumerate(rows)]
    laws = laws_of([row for row, _ in rows], *states)
    places = [Place(sequence=i, node=ROOT, path=()) for i in range(len(rows))]
    together, chosen = laws.probs_BV(places), laws.choose(places)
    for index, (row, _) in enumerate(rows):
        alone = laws_of([row], states[index])
        assert torch.equal(alone.probs_BV([AT_ROOT])[0].nan_to_num(), together[index].nan_to_num())
        assert alone.choose([AT_ROOT]) == [chosen[index]]


def test_order_of_processing_differs_from_its_neighbours() -> None:
    """Cases built so that each swap of two stages gives another law."""
    row = [2.0, 1.9, 1.0, 0.5, -1.0]
    # logit_bias before penalties: (1.9 + 2) / 1.5 = 2.6, not 1.9 / 1.5 + 2 = 3.27.
    state = state_of(SamplingParams(temperature=1, logit_bias={1: 2.0}, repetition_penalty=1.5), vocab_size=5)
    assert laws_of([row], state).probs_BV([AT_ROOT])[0].tolist() == pytest.approx(
        reference.softmax([2.0, 2.6, 1.0, 0.5, -1.0])
    )
    # repetition before presence: 2 / 2 - 0.5 = 0.5, not (2 - 0.5) / 2 = 0.75.
    state = state_of(
        SamplingParams(temperature=1, repetition_penalty=2.0, presence_penalty=0.5), output=(0,), vocab_size=5
    )
    assert laws_of([row], state).probs_BV([AT_ROOT])[0].tolist() == pytest.approx(
        reference.softmax([0.5, 0.95, 1.0, 0.5, -1.0])
    )
    # temperature before min_p: exp(-1 / 2) = 0.61 stays above 0.5, exp(-1) would not.
    state = state_of(SamplingParams(temperature=2, min_p=0.5), vocab_size=5)
    assert [p > 0 for p in laws_of([row], state).probs_BV([AT_ROOT])[0].tolist()] == [True, True, True, False, False]
    # top_k before top_p, and top_p on the renormalised rest: of two equal tokens 0.6 needs both.
    state = state_of(SamplingParams(temperature=1, top_k=2, top_p=0.6), vocab_size=5)
    equal = [1.0, 1.0, 1.0, 1.0, 1.0]
    assert laws_of([equal], state).probs_BV([AT_ROOT])[0].tolist() == [0.5, 0.5, 0, 0, 0]
    # ... and 0.45 needs only one: 0.5 of two, where of five it would be 0.2 + 0.2 + 0.2.
    state = state_of(SamplingParams(temperature=1, top_k=2, top_p=0.45), vocab_size=5)
    assert laws_of([equal], state).probs_BV([AT_ROOT])[0].tolist() == [1, 0, 0, 0, 0]
    # min_p before top_p: the rest is renormalised, so that 0.9 of it is fewer tokens.
    steep = [math.log(p) for p in (0.5, 0.3, 0.12, 0.05, 0.03)]
    state = state_of(SamplingParams(temperature=1, min_p=0.2, top_p=0.85), vocab_size=5)
    assert [p > 0 for p in laws_of([steep], state).probs_BV([AT_ROOT])[0].tolist()] == [True, True, False, False, False]


def test_repetition_penalty_makes_every_seen_token_less_likely_and_rewards_below_one() -> None:
    row = [2.0, -1.0, 0.5, -3.0]
    for penalty, expected in ((2.0, [1.0, -2.0, 0.5, -6.0]), (0.5, [4.0, -0.5, 0.5, -1.5])):
        state = state_of(SamplingParams(temperature=1, repetition_penalty=penalty), output=(0, 3), vocab_size=4)
        assert laws_of([row], state).probs_BV([AT_ROOT])[0].tolist() == pytest.approx(reference.softmax(expected))


def test_siblings_have_their_own_history() -> None:
    """Two branches of one tree, one row of logits: the presence penalty falls on what each path holds."""
    state = state_of(SamplingParams(temperature=1, presence_penalty=2.0), vocab_size=4)
    laws = laws_of([[0.0] * 4] * 3, state)
    left, right = laws.probs_BV([Place(sequence=0, node=0, path=(0,)), Place(sequence=0, node=1, path=(3,))]).tolist()
    assert left == pytest.approx(reference.softmax([-2.0, 0, 0, 0]))
    assert right == pytest.approx(reference.softmax([0, 0, 0, -2.0]))
    assert laws.probs_BV([AT_ROOT])[0].tolist() == [0.25] * 4


def test_walks_leave_no_trace_in_the_state() -> None:
    fields = SamplingParams(temperature=1, repetition_penalty=1.5, frequency_penalty=0.5)
    state = state_of(fields, prompt=(0, 1), output=(2,))
    laws = laws_of([[float(i) for i in range(VOCAB)]] * 3, state)
    before = laws.probs_BV([AT_ROOT])
    laws.choose([Place(sequence=0, node=1, path=(5, 6))])
    assert torch.equal(laws.probs_BV([AT_ROOT]), before)


def test_min_tokens_lifts_exactly_at_its_count() -> None:
    state = state_of(SamplingParams(temperature=1, min_tokens=3, stop_token_ids=[0]), output=(5,), vocab_size=6)
    laws = laws_of([[0.0] * 6] * 4, state)
    places = [Place(sequence=0, node=n - 1, path=(4,) * n) for n in range(4)]
    support = [[token for token, p in enumerate(row) if p > 0] for row in laws.probs_BV(places).tolist()]
    assert support == [[1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_min_tokens_forbids_the_end_even_when_it_would_be_ignored() -> None:
    state = state_of(SamplingParams(min_tokens=1, ignore_eos=True), vocab_size=3)
    assert laws_of([[0.0, 1.0, 2.0]], state).choose([AT_ROOT]) == [1]


def test_bad_words_are_banned_across_output_and_path_but_not_the_prompt() -> None:
    state = state_of(SamplingParams(bad_words_token_ids=[[1, 2, 0]]), prompt=(1, 2), output=(), vocab_size=4)
    logits = [[3.0, 2.0, 1.0, 0.0]] * 3
    assert laws_of(logits, state).choose([AT_ROOT]) == [0]
    assert laws_of(logits, state).choose([Place(sequence=0, node=1, path=(1, 2))]) == [1]
    state.commit([1])
    assert laws_of(logits, state).choose([Place(sequence=0, node=0, path=(2,))]) == [1]
    state.commit([2])
    assert laws_of(logits, state).choose([AT_ROOT]) == [1]


def test_greedy_is_the_lowest_of_equal_logits_raw_and_processed() -> None:
    raw = state_of(SamplingParams(), vocab_size=4)
    biased = state_of(SamplingParams(logit_bias={2: 1.0}), vocab_size=4)
    laws = laws_of([[0.0, 1.0, 1.0, 1.0], [0.0, 2.0, 1.0, 2.0]], raw, biased)
    assert laws.choose([AT_ROOT, Place(sequence=1, node=ROOT, path=())]) == [1, 1]
    assert laws.probs_BV([AT_ROOT])[0].tolist() == [0, 1, 0, 0]


def test_greedy_batch_equals_argmax_of_every_row() -> None:
    logits = torch.randn(12, 1024, generator=torch.Generator().manual_seed(1))
    states = [state_of(SamplingParams(), vocab_size=1024), state_of(SamplingParams(temperature=1), vocab_size=1024)]
    laws = ProcessedLaws(logits, first_rows=[0, 5], states=states)
    places = [Place(sequence=0, node=node, path=(7,) * (node + 1)) for node in range(-1, 4)]
    assert laws.choose(places) == logits[:5].argmax(-1).tolist()


def test_choice_is_the_noised_argmax_of_its_absolute_position() -> None:
    generator = torch.Generator().manual_seed(1)
    place = Place(sequence=0, node=1, path=(8, 9))
    for seed in range(30):
        state = state_of(SamplingParams(temperature=0.5), prompt=(1, 2, 3), output=(4,), seed=seed)
        row = torch.randn(VOCAB, dtype=torch.float64, generator=generator)
        key = noise_key(seed, 0, 3 + 1 + 2, Purpose.TARGET)
        expected = int((row / 0.5 + gumbel_BV([key], VOCAB)[0]).argmax())
        assert laws_of([[0.0] * VOCAB] * 2 + [row.tolist()], state).choose([place]) == [expected]


def test_acceptance_and_residual_noise_have_keys_of_their_own() -> None:
    state = state_of(SamplingParams(temperature=1), prompt=(1, 2), seed=5)
    laws = laws_of([[0.0] * VOCAB], state)
    assert laws.uniforms([AT_ROOT]) == [uniform(noise_key(5, 0, 2, Purpose.ACCEPT))]
    noise = gumbel_BV([noise_key(5, 0, 2, Purpose.RESIDUAL)], VOCAB)
    assert laws.draw_from(torch.ones(1, VOCAB), [AT_ROOT]) == [int(noise.argmax())]
    only = torch.zeros(1, VOCAB)
    only[0, 7] = 1e-30
    assert laws.draw_from(only, [AT_ROOT]) == [7]


def test_choices_follow_the_processed_law() -> None:
    """G-test over positions of one seed: the draw is the law, for a law with every field set."""
    noise = random.Random(4)
    fields = SamplingParams(
        temperature=0.8, top_k=9, top_p=0.97, min_p=0.01, repetition_penalty=1.2, logit_bias={3: 1.0}
    )
    row = [noise.gauss(0, 1) for _ in range(VOCAB)]
    draws = 6000
    states = [state_of(fields, prompt=(1,) * 5, seed=seed) for seed in range(draws)]
    laws = ProcessedLaws(torch.tensor([row], dtype=torch.float64), first_rows=[0] * draws, states=states)
    chosen = laws.choose([Place(sequence=i, node=ROOT, path=()) for i in range(draws)])
    expected = reference.law(row, fields, (1,), (), EOS)
    counts = [chosen.count(token) for token in range(VOCAB)]
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    inside = [(count, p * draws) for count, p in zip(counts, expected, strict=True) if p > 0]
    assert stats.power_divergence(*zip(*inside, strict=True), lambda_="log-likelihood").pvalue > 1e-3


def test_residual_draws_follow_their_weights() -> None:
    draws = 4000
    weights = torch.tensor([0.0, 0.4, 0.1, 0.0, 0.25])
    states = [state_of(SamplingParams(temperature=1), seed=seed, vocab_size=5) for seed in range(draws)]
    laws = ProcessedLaws(torch.zeros(1, 5), first_rows=[0] * draws, states=states)
    places = [Place(sequence=i, node=ROOT, path=()) for i in range(draws)]
    chosen = laws.draw_from(weights.expand(draws, 5), places)
    counts = [chosen.count(token) for token in (1, 2, 4)]
    assert sum(counts) == draws
    expected = [draws * w / 0.75 for w in (0.4, 0.1, 0.25)]
    assert stats.power_divergence(counts, expected, lambda_="log-likelihood").pvalue > 1e-3


def test_raw_logprobs_are_the_log_softmax_of_unprocessed_logits() -> None:
    fields = SamplingParams(temperature=0.3, top_k=1, presence_penalty=2, logit_bias={0: -50.0}, logprobs=2)
    state = state_of(fields, vocab_size=4)
    rows = [[1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 5.0]]
    first, second = laws_of(rows, state).token_logprobs(0, [ROOT, 0], [0, 3], [(), (0,)])
    expected = [math.log(p) for p in reference.softmax(rows[0])]
    assert first.token == 0
    assert first.logprob == pytest.approx(expected[0])
    assert [token for token, _ in first.top] == [1, 2, 0]
    assert [value for _, value in first.top] == pytest.approx([expected[1], expected[2], expected[0]])
    assert [token for token, _ in second.top] == [3, 0]


def test_processed_logprobs_list_only_the_support() -> None:
    fields = SamplingParams(temperature=1, top_k=2, logprobs=4, logprobs_mode="processed", logit_bias={0: 4.0})
    (entry,) = laws_of([[0.0, 3.0, 1.0, 2.0]], state_of(fields, vocab_size=4)).token_logprobs(0, [ROOT], [1], [()])
    assert [token for token, _ in entry.top] == [0, 1]
    assert [math.exp(value) for _, value in entry.top] == pytest.approx(reference.softmax([4.0, 3.0]))
    assert entry.logprob == entry.top[1][1]


def test_zero_logprobs_report_the_chosen_token_alone() -> None:
    (entry,) = laws_of([[0.0, 1.0]], state_of(SamplingParams(logprobs=0), vocab_size=2)).token_logprobs(
        0, [ROOT], [0], [()]
    )
    assert entry.top == ((0, entry.logprob),)
