"""Random sampling fields and logits for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from outrider.sampling.params import SamplingParams

VOCAB = 12
EOS = (VOCAB - 1,)

tokens = st.integers(0, VOCAB - 1)

logits_rows = st.one_of(
    st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    st.lists(st.integers(-2, 2).map(float), min_size=VOCAB, max_size=VOCAB),
)


def sampled_params() -> st.SearchStrategy[SamplingParams]:
    return params(st.sampled_from([0.25, 0.7, 1.0, 1.3, 5.0]))


def params(temperatures: st.SearchStrategy[float]) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=temperatures,
        # Neutral cuts are the commonest: behind a cut to one token no bias or penalty shows.
        top_k=st.sampled_from([-1, 0, 0, 0, 1, 2, 5, VOCAB, 1000]),
        # Odd decimals: a mass that reaches them exactly in one order of summation and not in another is not the point.
        top_p=st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.937, 0.713, 0.411, 0.0137]),
        min_p=st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.0731, 0.3171, 0.8113]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.31, 0.77]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.91, -1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.57, -0.43]),
        logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -3.7, 2.9, 100.0]), max_size=3),
        bad_words_token_ids=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3),
        min_tokens=st.integers(0, 6),
        stop_token_ids=st.lists(tokens, max_size=2),
    )
