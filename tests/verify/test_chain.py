"""Rejection sampling of drawn chains: thresholds, residuals, bonus, batches, precisions."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.sampling.laws import ProcessedLaws
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.types import NO_DRAFT, Proposal
from outrider.verify.base import Place
from outrider.verify.chain import verify_chain

from .support import ScriptedLaws, g_test, verdict

TARGET = {(0, ()): [0.2, 0.3, 0.5], (0, (0,)): [0.1, 0.8, 0.1], (0, (0, 1)): [0.0, 0.0, 1.0]}
DRAFT = torch.tensor([[0.8, 0.1, 0.1], [0.4, 0.4, 0.2]], dtype=torch.float64)
CHAIN = Proposal.chain([0, 1], draft_probs_NV=DRAFT)


def test_refused_at_the_first_token_draws_from_the_residual() -> None:
    laws = ScriptedLaws(laws=TARGET, uniforms={(0, ()): 0.2500001})
    assert verify_chain([CHAIN], laws, [0]) == [verdict((), 2)]
    assert laws.residuals == [pytest.approx([0.0, 0.2, 0.4])]
    assert laws.asked[-1] == ("draw", [Place(sequence=0, node=-1, path=())])


def test_kept_whole_takes_the_bonus_behind_the_last_token() -> None:
    laws = ScriptedLaws(laws=TARGET, uniforms={(0, ()): 0.2499999, (0, (0,)): 0.9999999}, choices={(0, (0, 1)): 2})
    assert verify_chain([CHAIN], laws, [0]) == [verdict((0, 1), 2)]
    assert laws.asked[-1] == ("choose", [Place(sequence=0, node=1, path=(0, 1))])
    assert laws.residuals == []


def test_second_token_is_judged_by_its_own_rows() -> None:
    target = {(0, ()): [1.0, 0.0, 0.0], (0, (0,)): [0.6, 0.1, 0.3]}
    laws = ScriptedLaws(laws=target, uniforms={(0, ()): 0.99, (0, (0,)): 0.26})
    assert verify_chain([CHAIN], laws, [0]) == [verdict((0,), 0)]
    assert laws.residuals == [pytest.approx([0.2, 0.0, 0.1])]


def test_an_empty_chain_draws_its_next_token() -> None:
    assert verify_chain([NO_DRAFT], ScriptedLaws(choices={(3, ()): 1}), [3]) == [verdict((), 1)]


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float64])
def test_precisions_may_differ(draft_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    chain = Proposal.chain([0, 1], draft_probs_NV=DRAFT.to(draft_dtype))
    laws = ScriptedLaws(laws=TARGET, uniforms={(0, ()): 0.3}, dtype=target_dtype)
    assert verify_chain([chain], laws, [0]) == [verdict((), 2)]


def test_a_token_its_own_law_calls_impossible_is_refused() -> None:
    chain = Proposal.chain([2], draft_probs_NV=torch.tensor([[0.5, 0.5, 0.0]]))
    laws = ScriptedLaws(laws={(0, ()): [0.1, 0.1, 0.8]}, uniforms={(0, ()): 1e-16})
    assert verify_chain([chain], laws, [0]) == [verdict((), 2)]
    assert laws.residuals == [pytest.approx([0.0, 0.0, 0.8])]


def test_equal_laws_are_always_kept() -> None:
    law = torch.softmax(torch.randn(1, 50, generator=torch.Generator().manual_seed(0)), dim=-1)
    for token in range(50):
        laws = ScriptedLaws(laws={(0, ()): law[0].tolist()}, uniforms={(0, ()): 1 - 2**-53}, choices={(0, (token,)): 9})
        chain = Proposal.chain([token], draft_probs_NV=law.double())
        assert verify_chain([chain], laws, [0]) == [verdict((0,), 9)]


def test_a_batch_equals_its_members_alone() -> None:
    """Ragged lengths, real laws and noise: nobody's verdict depends on companions or order."""
    generator = torch.Generator().manual_seed(8)
    noise = random.Random(8)
    lengths, vocab_size = [3, 0, 1, 5, 2, 4, 5, 1], 6
    proposals, rows, states, first_rows = [], [], [], []
    for index, length in enumerate(lengths):
        probs = torch.softmax(torch.randn(length, vocab_size, generator=generator), dim=-1)
        proposals.append(Proposal.chain(noise.choices(range(vocab_size), k=length), draft_probs_NV=probs))
        first_rows.append(sum(map(len, rows)))
        rows.append(torch.randn(length + 1, vocab_size, generator=generator))
        states.append(
            SamplingState(
                SamplingParams(temperature=1, top_k=noise.choice([0, 3]), presence_penalty=0.5),
                prompt_tokens=(1,),
                vocab_size=vocab_size,
                eos_token_ids=(0,),
                seed=index,
                choice=0,
            )
        )
    laws = ProcessedLaws(torch.cat(rows), first_rows=first_rows, states=states)
    together = verify_chain(proposals, laws, range(len(lengths)))
    for index in range(len(lengths)):
        alone = ProcessedLaws(rows[index], first_rows=[0], states=[states[index]])
        assert verify_chain([proposals[index]], alone, [0]) == [together[index]]
    order = list(range(len(lengths)))[::-1]
    assert verify_chain([proposals[i] for i in order], laws, order) == [together[i] for i in order]


def test_two_committed_tokens_follow_the_target_with_the_real_noise() -> None:
    """G-test of drafting, acceptance, residual and bonus noise together: any dependence between them would show."""
    vocab_size, runs = 4, 5000
    generator = torch.Generator().manual_seed(2)
    target_logits = {(): torch.randn(4, generator=generator)}
    for token in range(vocab_size):
        target_logits[token,] = torch.randn(4, generator=generator)
    draft_law = torch.softmax(torch.randn(4, generator=generator), dim=-1)
    fields = SamplingParams(temperature=1)
    proposals, rows, states = [], [], []
    for seed in range(runs):
        noise = gumbel_BV([noise_key(seed, 0, 1, Purpose.DRAFT)], vocab_size)[0]
        token = int((draft_law.log() + noise).argmax())
        proposals.append(Proposal.chain([token], draft_probs_NV=draft_law.unsqueeze(0)))
        rows.append(torch.stack([target_logits[()], target_logits[token,]]))
        states.append(SamplingState(fields, prompt_tokens=(0,), vocab_size=4, eos_token_ids=(3,), seed=seed, choice=0))
    laws = ProcessedLaws(torch.cat(rows), first_rows=range(0, 2 * runs, 2), states=states)
    verdicts = verify_chain(proposals, laws, range(runs))
    first = [p.tokens[0] if v.path else v.next_token for p, v in zip(proposals, verdicts, strict=True)]
    assert g_test(first, torch.softmax(target_logits[()].double(), -1).tolist()) > 1e-3
    kept = [(p.tokens[0], v.next_token) for p, v in zip(proposals, verdicts, strict=True) if v.path]
    token = max(range(4), key=[pair[0] for pair in kept].count)
    bonus = [after for before, after in kept if before == token]
    assert len(bonus) > 500
    assert g_test(bonus, torch.softmax(target_logits[token,].double(), -1).tolist()) > 1e-3
