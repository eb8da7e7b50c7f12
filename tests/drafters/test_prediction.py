from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.drafters.base import DraftRequest
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.prediction import PredictedText, PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.sampling.params import SamplingParams
from outrider.types import NO_DRAFT, DraftMode

PROMPT = [90, 91, 92]
TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9)
DRAFTERS = {
    "alone": PredictionDrafter,
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "suffix paper": lambda: SuffixDrafter(rule="paper", factor=8.0, offset=8.0),
}


def wish(tokens: list[int], prediction: tuple[int, ...], *, sequence: int = 0) -> DraftRequest:
    return DraftRequest(
        sequence=sequence,
        tokens=tokens,
        num_draft_tokens=4,
        mode=DraftMode.GREEDY,
        params=SamplingParams(),
        seed=0,
        choice=0,
        prediction=prediction,
    )


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_the_text_is_followed_from_its_beginning_and_past_edits(make: Callable[[], Any]) -> None:
    drafter = make()
    tokens = list(PROMPT)
    drafter.start(0, tokens)

    def commit(*new: int) -> tuple[int, ...]:
        tokens.extend(new)
        drafter.observe(0, tokens, len(new))
        [proposal] = drafter.propose([wish(tokens, TEXT)])
        return proposal.tokens

    assert commit(1)[:3] == (2, 3, 4)
    assert commit(2, 3)[:3] == (4, 5, 6)
    assert commit(50, 51)[:1] != (4,), "an insertion"
    assert commit(4, 5)[:3] == (6, 7, 8), "and back"
    drafter.finish(0)


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_the_first_token_follows_the_prompt(make: Callable[[], Any]) -> None:
    drafter = make()
    drafter.start(0, list(PROMPT))
    [proposal] = drafter.propose([wish(list(PROMPT), TEXT)])
    assert proposal.tokens[:3] == (1, 2, 3)


def test_requests_do_not_see_each_others_text() -> None:
    for make in DRAFTERS.values():
        drafter = make()
        drafter.start(0, list(PROMPT))
        drafter.start(1, list(PROMPT))
        first, second = drafter.propose([wish(list(PROMPT), TEXT), wish(list(PROMPT), (30, 31, 32), sequence=1)])
        assert first.tokens[:1] == (1,) and second.tokens[:1] == (30,)


def test_without_a_text_nothing_is_proposed() -> None:
    drafter = PredictionDrafter()
    drafter.start(0, list(PROMPT))
    assert drafter.propose([wish(list(PROMPT), ())]) == [NO_DRAFT]


def test_of_equal_matches_the_one_that_comes_next_is_taken() -> None:
    text = PredictedText.after([], (5, 1, 6, 5, 2, 6, 5, 3))
    found = [text.find(recent) for recent in ((5,), (5, 1, 6), (5,), (6, 5))]
    assert [at for _, at in filter(None, found)] == [1, 3, 4, 4]
