"""History of a sequence, refused token ids, and banned words as token ids."""

from __future__ import annotations

import pytest

from outrider.errors import SamplingError
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState, bad_word_ids


def state_of(fields: SamplingParams) -> SamplingState:
    return SamplingState(fields, prompt_tokens=(1, 2, 2), vocab_size=10, eos_token_ids=(9,), seed=3, choice=1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias names token id 10"),
        (SamplingParams(stop_token_ids=[3, 11]), "stop_token_ids names token id 11"),
        (SamplingParams(bad_words_token_ids=[[1], [2, 12]]), "bad_words_token_ids names token id 12"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_name(fields: SamplingParams, text: str) -> None:
    with pytest.raises(SamplingError, match=text):
        state_of(fields)


def test_lengths_and_noise_fields() -> None:
    state = state_of(SamplingParams(temperature=1))
    state.commit([4, 5])
    state.commit([6])
    assert (state.num_prompt, state.num_output, state.seed, state.choice) == (3, 3, 3, 1)


def test_counts_start_at_zero_for_the_prompt_and_count_output_and_path() -> None:
    state = state_of(SamplingParams(temperature=1, frequency_penalty=1))
    state.commit([2, 7])
    assert state.seen_counts(()) == {1: 0, 2: 1, 7: 1}
    assert state.seen_counts((7, 8)) == {1: 0, 2: 1, 7: 2, 8: 1}
    assert state.seen_counts(()) == {1: 0, 2: 1, 7: 1}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (SamplingParams(), True),
        (SamplingParams(top_k=3, top_p=0.5, min_p=0.1), True),
        (SamplingParams(temperature=1), False),
        (SamplingParams(logit_bias={1: 1.0}), False),
        (SamplingParams(bad_words_token_ids=[[1]]), False),
        (SamplingParams(min_tokens=1), False),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(presence_penalty=0.1), False),
        (SamplingParams(frequency_penalty=0.1), False),
    ],
)
def test_what_counts_as_plain_greedy(fields: SamplingParams, expected: bool) -> None:
    assert state_of(fields).is_plain_greedy is expected


def test_bad_words_as_token_ids() -> None:
    table = {"cat": [1], " cat": [2], "dog": [3, 4], " dog": [5], "x": [6], " x": [7, 6], "y": [8], " y": [8]}
    ids = bad_word_ids(["cat", " dog", "x", "y"], lambda text: table[text])
    assert ids == [(1,), (2,), (3, 4), (6,), (8,)]
