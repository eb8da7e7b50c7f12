"""What a drafter says it would have drafted along a text is what it drafts: laws of drawn chains, token by token."""

from __future__ import annotations

import pytest
import torch

from outrider.device import Placement
from outrider.drafters.base import Drafter, DraftRequest, LawDrafter, TapDrafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.lm import LMDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.models.table import TableModel
from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import warp_logits
from outrider.types import DraftMode
from tests.drafters.heads import CPU, VOCAB, tiny_head, tiny_target
from tests.engine.support import table_model

PARAMS = SamplingParams(temperature=0.9, top_k=12)
TEXTS = ([3, 9, 14, 2, 7], [5, 5, 1])


def request(sequence: int, k: int) -> DraftRequest:
    return DraftRequest(
        sequence=sequence,
        tokens=TEXTS[sequence],
        num_draft_tokens=k,
        mode=DraftMode.DRAWN,
        params=PARAMS,
        seed=sequence,
        choice=0,
    )


def started(drafter: Drafter) -> Drafter:
    generator = torch.Generator().manual_seed(0)
    for sequence, tokens in enumerate(TEXTS):
        drafter.start(sequence, tokens)
        if isinstance(drafter, TapDrafter):
            width = len(drafter.taps) * 32
            drafter.absorb(sequence, 0, torch.randn(len(tokens) - 1, width, generator=generator))
    return drafter


def head() -> EagleDrafter:
    return EagleDrafter(tiny_head(tiny_target()), Placement(device=CPU, precision="float32"))


def small_model() -> LMDrafter:
    return LMDrafter(tiny_target(7).slice_layers(2), name="lm", vocab_size=VOCAB)


@pytest.mark.parametrize("make", [head, small_model])
def test_laws_along_its_own_drafts_are_those_it_drew_from(make: type[EagleDrafter] | type[LMDrafter]) -> None:
    drafter = make()  # type: ignore[call-arg]
    assert isinstance(drafter, LawDrafter)
    started(drafter)
    lengths = (4, 2)
    drawn = drafter.propose([request(0, lengths[0]), request(1, lengths[1])])
    along = drafter.logits_along([request(0, 4), request(1, 4)], [proposal.tokens for proposal in drawn])
    for proposal, logits_KU in zip(drawn, along, strict=True):
        laws_KU = warp_logits(logits_KU, [PARAMS] * len(proposal)).softmax(dim=-1)
        assert proposal.draft_probs_NV is not None
        torch.testing.assert_close(drafter.vocabulary.spread(laws_KU), proposal.draft_probs_NV, atol=1e-5, rtol=1e-4)
    again = drafter.propose([request(0, lengths[0]), request(1, lengths[1])])
    assert [each.tokens for each in again] == [each.tokens for each in drawn], "looking changes nothing"


def test_laws_end_with_the_window() -> None:
    narrow = LMDrafter(TableModel(table_model()._logits, max_positions=6), name="narrow")
    narrow.start(0, [1, 2, 3, 4])
    wish = DraftRequest(
        sequence=0, tokens=[1, 2, 3, 4], num_draft_tokens=9, mode=DraftMode.DRAWN, params=PARAMS, seed=0, choice=0
    )
    [logits_KV] = narrow.logits_along([wish], [[1] * 9])
    [proposal] = narrow.propose([wish])
    assert len(logits_KV) == len(proposal) == narrow.most_drafts(4) == 3


def test_who_has_no_law_says_so() -> None:
    assert not isinstance(NGramDrafter(), LawDrafter) and not isinstance(SuffixDrafter(), LawDrafter)
