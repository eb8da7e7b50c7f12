"""Forced tokens in front of, between and behind another drafter's proposals."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from outrider.drafters.base import AheadDrafter, DraftRequest
from outrider.drafters.forced import MOST_FORCED, ForcedDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.types import NO_DRAFT, ROOT, DraftMode, Proposal
from tests.engine.support import Scripted
from tests.sampling.grammars import letter_grammar

A, B, C, D, END = range(5)


def wish(
    constraint: StructuredOutputs | None,
    *,
    tokens: tuple[int, ...] = (A,),
    budget: int = 4,
    most_depth: int = 100,
    committed: tuple[int, ...] = (),
    mode: DraftMode = DraftMode.GREEDY,
) -> DraftRequest:
    matcher = None
    if constraint is not None:
        matcher = GrammarMatcher(letter_grammar(constraint, 4))
        matcher.commit(committed)
    return DraftRequest(
        sequence=0,
        tokens=[*tokens, *committed],
        num_draft_tokens=budget,
        mode=mode,
        params=SamplingParams(),
        seed=0,
        choice=0,
        grammar=matcher,
        most_depth=most_depth,
    )


class Ahead(Scripted):
    """A scripted drafter that reads ahead."""

    reads_ahead = True


def chain(*tokens: int) -> Callable[[DraftRequest], Proposal]:
    return lambda request: Proposal.chain(tokens[: request.num_draft_tokens], drafter="scripted")


def propose(drafter: ForcedDrafter, request: DraftRequest) -> Proposal:
    drafter.start(request.sequence, list(request.tokens))
    [proposal] = drafter.propose([request])
    drafter.finish(request.sequence)
    return proposal


def test_forced_tokens_stand_alone() -> None:
    proposal = propose(ForcedDrafter(), wish(StructuredOutputs(regex="abc(a|b)cd"), budget=0))
    assert (proposal.tokens, proposal.drafter) == ((A, B, C), "forced")
    assert propose(ForcedDrafter(), wish(StructuredOutputs(regex="(a|b)c"))) == NO_DRAFT
    assert propose(ForcedDrafter(), wish(None)) == NO_DRAFT


def test_no_deeper_than_can_be_committed() -> None:
    long = StructuredOutputs(regex="a{100}")
    assert len(propose(ForcedDrafter(), wish(long, budget=0))) == MOST_FORCED
    assert len(propose(ForcedDrafter(), wish(long, budget=0, most_depth=7))) == 7
    assert propose(ForcedDrafter(), wish(long, budget=0, most_depth=0)) == NO_DRAFT
    inner = ForcedDrafter(Ahead(chain(C, D, C, D)))
    proposal = propose(inner, wish(StructuredOutputs(regex="ab[cd]*"), budget=4, most_depth=3))
    assert max(proposal.depths) == 3


def test_a_finished_grammar_is_not_drafted_for() -> None:
    inner = Scripted(lambda request: pytest.fail("the output has ended"))
    request = wish(StructuredOutputs(regex="ab"), committed=(A, B))
    assert propose(ForcedDrafter(inner), request) == NO_DRAFT
    ends = propose(ForcedDrafter(Scripted(chain(A, B, END, A))), wish(StructuredOutputs(regex="ab+")))
    assert ends.tokens == (A, B, END), "nothing behind the end"


def test_in_front_and_between_and_behind() -> None:
    asked: list[tuple[tuple[int, ...], int]] = []

    def make(request: DraftRequest) -> Proposal:
        asked.append((request.ahead, request.num_draft_tokens))
        return Proposal.chain((D, D), drafter="scripted") if request.ahead == (A, B) else Proposal.chain((C,))

    drafter = ForcedDrafter(Ahead(make))
    proposal = propose(drafter, wish(StructuredOutputs(regex="ab[cd]{2}ba[cd]aa"), budget=4))
    assert asked == [((A, B), 4), ((A, B, D, D, B, A), 2)]
    assert proposal.tokens == (A, B, D, D, B, A, C, A, A) and proposal.is_chain
    assert proposal.drafter == "scripted"


def test_a_drafter_that_cannot_read_ahead_shares_its_path() -> None:
    drafter = ForcedDrafter(Scripted(chain(A, B, C, D)))
    proposal = propose(drafter, wish(StructuredOutputs(regex="ab(cd|d)aa")))
    assert proposal.tokens == (A, B, C, D, A, A) and proposal.is_chain
    never = Scripted(lambda request: pytest.fail("the forced tokens are as many as it may draft"))
    assert len(propose(ForcedDrafter(never), wish(StructuredOutputs(regex="abcd[ab]"), budget=4))) == 4


def test_deterministic_candidates_are_cut_at_the_first_forbidden_token() -> None:
    tokens, parents = (A, B, C, D, A), (ROOT, 0, 1, ROOT, 3)
    tree = Proposal(tokens=tokens, parents=parents, drafter="scripted")
    proposal = propose(ForcedDrafter(Scripted(lambda _: tree)), wish(StructuredOutputs(regex="(ab|d)[ab]*"), budget=5))
    assert (proposal.tokens, proposal.parents) == ((A, B, D, A), (ROOT, 0, ROOT, 2))


def test_a_drawn_chain_is_never_cut() -> None:
    """Law 5: what to do with a drawn token may not depend on what it is."""
    law_V = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.1])
    for tokens in ((C, D, A), (A, D), (A, B)):
        drawn = Proposal.chain(tokens, draft_probs_NV=law_V.repeat(len(tokens), 1), drafter="scripted")
        request = wish(StructuredOutputs(regex="ab[cd]*"), mode=DraftMode.DRAWN)
        proposal = propose(ForcedDrafter(Scripted(lambda _, drawn=drawn: drawn)), request)
        assert proposal.tokens == tokens
        assert torch.equal(proposal.draft_probs_NV, drawn.draft_probs_NV)  # type: ignore[arg-type]


def test_forced_tokens_behind_a_drawn_chain_have_laws_of_their_own() -> None:
    law_V = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    drawn = Proposal.chain((A,), draft_probs_NV=law_V.unsqueeze(0), drafter="scripted")
    request = wish(StructuredOutputs(regex="[ab]cd[ab]"), mode=DraftMode.DRAWN)
    proposal = propose(ForcedDrafter(Scripted(lambda _: drawn)), request)
    assert proposal.tokens == (A, C, D)
    assert proposal.draft_probs_NV is not None
    assert proposal.draft_probs_NV.tolist() == [law_V.tolist(), [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]


def test_requests_keep_their_own_grammar_and_order() -> None:
    requests = [
        wish(StructuredOutputs(regex="abc[ab]"), budget=0),
        wish(None),
        wish(StructuredOutputs(regex="dcb[ab]"), budget=0),
        wish(None, budget=2),
    ]
    inner = Scripted(chain(D, D, D, D))
    inner.start(0, [A])
    proposals = ForcedDrafter(inner).propose(requests)
    assert [proposal.tokens for proposal in proposals] == [(A, B, C), (D, D, D, D), (D, C, B), (D, D)]


@pytest.mark.parametrize("make", [NGramDrafter, SuffixDrafter, lambda: SuffixDrafter(rule="paper", factor=8.0)])
def test_drafting_ahead_is_drafting_where_those_tokens_were_committed(make: Callable[[], NGramDrafter]) -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(4) for _ in range(60)]
    for ahead in ((A,), (B, C), (D, D, A)):
        request = wish(None, tokens=tuple(tokens), budget=6)
        drafter = make()
        assert isinstance(drafter, AheadDrafter) and drafter.reads_ahead
        drafter.start(0, tokens)
        [found] = drafter.propose(
            [DraftRequest(**{**{name: getattr(request, name) for name in DraftRequest.__slots__}, "ahead": ahead})]
        )
        assert len(found)
        there = make()
        there.start(0, [*tokens, *ahead])
        [expected] = there.propose([wish(None, tokens=(*tokens, *ahead), budget=6)])
        assert found.tokens[:1] == expected.tokens[:1]
