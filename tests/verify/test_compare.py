"""Draw-and-compare: walks on chains and trees, and outputs that no proposal can change."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.sampling.laws import ProcessedLaws
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.types import NO_DRAFT, ROOT, Proposal
from outrider.verify.base import Place
from outrider.verify.compare import verify_compare

from .support import ScriptedLaws, verdict

VOCAB = 5


def test_no_draft_draws_the_next_token() -> None:
    assert verify_compare([NO_DRAFT], ScriptedLaws(choices={(0, ()): 3}), [0]) == [verdict((), 3)]


def test_chain_is_kept_up_to_the_first_difference() -> None:
    laws = ScriptedLaws(choices={(0, ()): 1, (0, (1,)): 2, (0, (1, 2)): 0})
    assert verify_compare([Proposal.chain([1, 2, 3, 4])], laws, [0]) == [verdict((0, 1), 0)]


def test_whole_chain_yields_a_bonus() -> None:
    laws = ScriptedLaws(choices={(0, ()): 1, (0, (1,)): 2, (0, (1, 2)): 4})
    assert verify_compare([Proposal.chain([1, 2])], laws, [0]) == [verdict((0, 1), 4)]
    assert laws.asked[-1] == ("choose", [Place(sequence=0, node=1, path=(1, 2))])


def test_tree_goes_on_behind_the_chosen_child() -> None:
    #  root - 0:1 - 2:4      choices 2, 4, 0: nodes 1 and 3 are kept
    #      \- 1:2 - 3:4
    #            \- 4:0
    tree = Proposal(tokens=(1, 2, 4, 4, 0), parents=(ROOT, ROOT, 0, 1, 1))
    laws = ScriptedLaws(choices={(0, ()): 2, (0, (2,)): 4, (0, (2, 4)): 0})
    assert verify_compare([tree], laws, [0]) == [verdict((1, 3), 0)]
    assert [places[0].node for _, places in laws.asked] == [ROOT, 1, 3]


def test_first_of_duplicate_siblings_is_kept() -> None:
    tree = Proposal(tokens=(2, 2, 3), parents=(ROOT, ROOT, 1))
    laws = ScriptedLaws(choices={(0, ()): 2, (0, (2,)): 3})
    assert verify_compare([tree], laws, [0]) == [verdict((0,), 3)]


def test_batch_walks_level_by_level_and_keeps_sequences_apart() -> None:
    proposals = [Proposal.chain([1, 1]), NO_DRAFT, Proposal.chain([0])]
    choices = {(7, ()): 1, (7, (1,)): 1, (7, (1, 1)): 2, (8, ()): 4, (9, ()): 3}
    laws = ScriptedLaws(choices=choices)
    assert verify_compare(proposals, laws, [7, 8, 9]) == [verdict((0, 1), 2), verdict((), 4), verdict((), 3)]
    assert [[place.sequence for place in places] for _, places in laws.asked] == [[7, 8, 9], [7], [7]]


def logits_after(path: tuple[int, ...]) -> list[float]:
    noise = random.Random(str(path))
    return [noise.gauss(0, 1) for _ in range(VOCAB)]


def run(proposal: Proposal, fields: SamplingParams, committed: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Tokens that one step commits, with real processing and noise over the logits of ``logits_after``."""
    state = SamplingState(fields, prompt_tokens=(0,), vocab_size=VOCAB, eos_token_ids=(4,), seed=seed, choice=0)
    state.commit(committed)
    paths = [committed]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    laws = ProcessedLaws(torch.tensor([logits_after(path) for path in paths]), first_rows=[0], states=[state])
    (found,) = verify_compare([proposal], laws, [0])
    return (*(proposal.tokens[node] for node in found.path), found.next_token)


def decode(draft: object, fields: SamplingParams, seed: int, length: int) -> tuple[int, ...]:
    """Decode ``length`` tokens with proposals from ``draft(committed)``."""
    tokens: tuple[int, ...] = ()
    while len(tokens) < length:
        tokens += run(draft(tokens), fields, tokens, seed)  # type: ignore[operator]
    return tokens[:length]


FIELDS = {
    "greedy": SamplingParams(),
    "greedy with penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.7),
    "sampled": SamplingParams(temperature=1),
    "everything": SamplingParams(
        temperature=1.2,
        top_k=4,
        top_p=0.95,
        min_p=0.01,
        presence_penalty=0.8,
        repetition_penalty=1.2,
        bad_words_token_ids=[[1, 2]],
        min_tokens=5,
        logit_bias={3: 0.5},
    ),
}


@pytest.mark.parametrize("name", FIELDS)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**63 - 1), shape=st.integers(0, 2**32))
def test_output_is_the_same_for_every_proposal(name: str, seed: int, shape: int) -> None:
    fields = FIELDS[name]
    plain = decode(lambda committed: NO_DRAFT, fields, seed, 12)
    noise = random.Random(shape)

    def random_tree(committed: tuple[int, ...]) -> Proposal:
        size = noise.randrange(7)
        parents = tuple(noise.randrange(-1, node) if node else ROOT for node in range(size))
        return Proposal(tokens=tuple(noise.choices(range(VOCAB), k=size)), parents=parents)

    def oracle(committed: tuple[int, ...]) -> Proposal:
        return Proposal.chain(plain[len(committed) : len(committed) + 4])

    def oracle_gone_wrong(committed: tuple[int, ...]) -> Proposal:
        right = plain[len(committed) : len(committed) + 2]
        return Proposal.chain([*right, (plain[-1] + 1) % VOCAB, 0])

    for draft in (random_tree, oracle, oracle_gone_wrong):
        assert decode(draft, fields, seed, 12) == plain


def test_an_oracle_is_kept_whole() -> None:
    fields = SamplingParams(temperature=1)
    plain = decode(lambda committed: NO_DRAFT, fields, 5, 9)
    assert run(Proposal.chain(plain[:8]), fields, (), 5) == plain


def test_shared_noise_raises_acceptance_without_changing_the_output() -> None:
    """A draft law near the target's, drawn with the very noise of verification, is nearly always kept."""
    fields = SamplingParams(temperature=1)
    num_kept = {True: 0, False: 0}
    for seed in range(60):
        for shares in (True, False):
            purpose = Purpose.TARGET if shares else Purpose.DRAFT
            draft_logits = torch.tensor(logits_after(())) + 0.1
            token = int((draft_logits + gumbel_BV([noise_key(seed, 0, 1, purpose)], VOCAB)[0]).argmax())
            out = run(Proposal.chain([token]), fields, (), seed)
            assert out[0] == run(NO_DRAFT, fields, (), seed)[0]
            num_kept[shares] += len(out) - 1
    assert num_kept[True] == 60
    assert num_kept[False] < 40
