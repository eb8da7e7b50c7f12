"""Drafts that are equally likely are listed, and only those."""

from __future__ import annotations

import torch

from outrider.drafters.lm import LMDrafter
from outrider.measure.target_pass import read_text
from outrider.measure.ties import draft_ties
from outrider.models.table import TableModel
from outrider.sampling.params import SamplingParams
from tests.engine.support import table_model
from tests.measure.helpers import decode, questions, text_of

VOCAB = 7


def tied_after(token: int) -> TableModel:
    """Behind this token (-1: none), tokens 1 and 2 are equally likely; behind all others one token leads by far."""

    logits_VV = 5.0 * torch.eye(VOCAB).roll(1, dims=1)
    if token >= 0:
        logits_VV[token] = 5.0 * torch.eye(VOCAB)[1:3].sum(dim=0)
    return TableModel(logits_VV)


def test_ties_are_found_where_they_are() -> None:
    target = table_model(3)
    [run] = decode(target, None, questions(1, SamplingParams(max_tokens=40), vocab=VOCAB), 0).values()
    read = read_text(target, text_of(run, target), ())
    token = run.output[4]
    drafter = LMDrafter(tied_after(token), name="tied")
    found = draft_ties(drafter, read, 3, key=0)
    places = {tie.start for tie in found if tie.depth == 1}
    assert places == {index + 1 for index, said in enumerate(run.output[:-1]) if said == token}
    assert places and all(tie.tokens == (1, 2) and tie.gap == 0 and tie.id == run.question.request.id for tie in found)
    assert draft_ties(LMDrafter(tied_after(-1), name="clear"), read, 3, key=1) == []
