"""Teacher forcing places every token in its law; guesses know nothing but the past."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.audit import scoring
from outrider.audit.channels import strata_of
from outrider.audit.control import forced_logits
from outrider.audit.guesses import NO_GUESS, Output, drafter_guesses, ngram_guesses
from outrider.audit.orders import order_of
from outrider.audit.scoring import Scorer, Scores
from outrider.audit.statistics import TILT_LEANS
from outrider.drafters.base import DraftRequest
from outrider.sampling.laws import ProcessedLaws
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.types import ROOT, Proposal
from outrider.verify.base import Place
from tests.audit.support import PARAMS, PROMPTS, WORLD, drawing_drafter, engine_source, outputs_of, world
from tests.models._tiny import tiny_target, token_ids

RICH = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=12,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.1,
    logit_bias={3: 1.0},
    bad_words_token_ids=((5, 6), (8,)),
    min_tokens=4,
    max_tokens=40,
)


def scored(target: Any, outputs: Sequence[Output], params: SamplingParams, **more: Any) -> Scores:
    noise = np.random.default_rng(0)
    return Scorer(target, params=params, order=order_of("vllm"), noise=noise, **more).score(outputs)


def law_before(target: Any, output: Output, position: int, params: SamplingParams) -> torch.Tensor:
    """The very law that the engine draws from there, by its own classes."""
    state = SamplingState(
        params,
        prompt_tokens=output.prompt,
        vocab_size=target.spec.vocab_size,
        eos_token_ids=target.spec.eos_token_ids,
        seed=0,
        choice=0,
    )
    state.commit(output.tokens[:position])
    [logits_1V] = forced_logits(target, [output.prompt], [output.tokens[:position]], is_last_only=True)
    laws = ProcessedLaws(logits_1V.double(), first_rows=[0], states=[state])
    return laws.probs_BV([Place(sequence=0, node=ROOT, path=())])[0]


@pytest.mark.parametrize(
    "params", [PARAMS, RICH, SamplingParams(temperature=1.3, max_tokens=40)], ids=["cut", "rich", "hot"]
)
def test_every_number_is_that_of_the_engines_own_law(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BLOCK", 16)
    target = world()
    outputs = outputs_of(engine_source(drawing_drafter(), params=params), copies=2)
    scores = scored(target, outputs, params)
    assert len(scores) == sum(len(output.tokens) for output in outputs) and scores.inside.all()
    shares = np.random.default_rng(0).random(len(scores))
    for entry in range(0, len(scores), 7):
        output = outputs[scores.output[entry]]
        position = int(scores.position[entry])
        token = output.tokens[position]
        law_V = law_before(target, output, position, params)
        before = [i for i in range(WORLD) if law_V[i] > law_V[token] or (law_V[i] == law_V[token] and i < token)]
        u = float(law_V[before].sum() + shares[entry] * law_V[token])
        assert scores.u[entry] == pytest.approx(u, abs=1e-5)
        assert scores.logprob[entry] == pytest.approx(math.log(law_V[token]), abs=1e-5)
        logs_V = law_V[law_V > 0].log()
        entropy = -float((law_V[law_V > 0] * logs_V).sum())
        variance = float((law_V[law_V > 0] * logs_V**2).sum()) - entropy**2
        assert scores.entropy[entry] == pytest.approx(entropy, abs=1e-5)
        assert scores.variance[entry] == pytest.approx(variance, abs=1e-4)
        tilts = [math.log(float((law_V ** (1 + lean)).sum())) for lean in TILT_LEANS]
        np.testing.assert_allclose(scores.log_tilts[entry], tilts, atol=1e-5)


def test_the_end_token_is_scored_like_any_other() -> None:
    target = world()
    outputs = [output for output in outputs_of(engine_source(), copies=20) if output.tokens[-1] == 0]
    assert len(outputs) > 5, "no answer came to its end"
    scores = scored(target, outputs, PARAMS)
    last = np.flatnonzero(np.diff(np.append(scores.output, -1)) != 0)
    for entry, output in zip(last, outputs, strict=True):
        law_V = law_before(target, output, len(output.tokens) - 1, PARAMS)
        assert scores.logprob[entry] == pytest.approx(math.log(law_V[0]), abs=1e-5)


def test_a_real_runtime_reads_chunks_as_it_reads_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BLOCK", 5)
    monkeypatch.setattr(scoring, "PREFILL_CHUNK", 4)
    target = tiny_target()
    params = SamplingParams(temperature=1.0, top_k=90, max_tokens=30)
    outputs = [
        Output(prompt_id="a", prompt=tuple(token_ids(9, seed=1)), tokens=tuple(token_ids(13, seed=seed)))
        for seed in (2, 3)
    ]
    scores = scored(target, outputs, params)
    for entry in range(len(scores)):
        output = outputs[scores.output[entry]]
        law_V = law_before(target, output, int(scores.position[entry]), params)
        token = output.tokens[int(scores.position[entry])]
        assert bool(scores.inside[entry]) == bool(law_V[token] > 0)
        if scores.inside[entry]:
            assert scores.logprob[entry] == pytest.approx(math.log(law_V[token]), abs=1e-4)


def test_a_token_outside_the_support_says_how_far_it_is() -> None:
    target = world()
    output = Output(prompt_id="a", prompt=(1, 2), tokens=(0,))
    row_V = world()._logits[1, 2].double()
    order = row_V.argsort(descending=True).tolist()
    for fields, expected in (
        ({"top_k": 3}, (row_V[order[2]] - row_V[order[3]]) / 2),
        ({"min_p": 0.5}, None),
        ({"bad_words_token_ids": ((order[3],),)}, math.inf),
    ):
        params = SamplingParams(temperature=0.8, max_tokens=4, **fields)
        scores = scored(target, [Output(prompt_id="a", prompt=output.prompt, tokens=(order[3],))], params)
        [outside] = scores.outside
        if expected is None:
            expected = (float(row_V[order[0]] - row_V[order[3]]) + 0.8 * math.log(0.5)) / 2
        assert outside.gap == pytest.approx(float(expected), rel=1e-3) and outside.token == order[3]
        assert not scores.inside.any() and not any(mask.any() for mask in strata_of(scores).values())


def test_guesses_are_fixed_by_the_past_alone() -> None:
    outputs = outputs_of(engine_source(), copies=2)
    whole = [ngram_guesses(outputs), drafter_guesses(drawing_drafter, outputs, taps=None)]
    cut = [
        Output(prompt_id=each.prompt_id, prompt=each.prompt, tokens=(*each.tokens[:5], *reversed(each.tokens[5:])))
        for each in outputs
    ]
    changed = [ngram_guesses(cut), drafter_guesses(drawing_drafter, cut, taps=None)]
    for before, after in zip(whole, changed, strict=True):
        assert [each[:6] for each in before] == [each[:6] for each in after]
        assert all(each[0] == NO_GUESS for each in before)
    assert any(guess != NO_GUESS for each in whole[0] for guess in each)
    assert all(guess >= 0 for each in whole[1] for guess in each[1:])


def test_the_drafters_guess_is_the_mode_of_its_law() -> None:
    outputs = outputs_of(engine_source(), copies=1)
    model = drawing_drafter().model
    for output, guesses in zip(outputs, drafter_guesses(drawing_drafter, outputs, taps=None), strict=True):
        text = [*output.prompt, *output.tokens]
        for position in range(1, len(output.tokens)):
            at = len(output.prompt) + position
            assert guesses[position] == int(model._logits[text[at - 2], text[at - 1]].argmax())


class Taps:
    """Reads hidden states (of a table: the token ids) and guesses what it was told last."""

    name, taps = "taps", (0,)

    def __init__(self) -> None:
        self.read: dict[int, list[int]] = {}

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        self.read[sequence] = []

    def absorb(self, sequence: int, start: int, taps_RD: torch.Tensor) -> None:
        assert start == len(self.read[sequence]), "taps come in order of position"
        self.read[sequence] += [int(value) for value in taps_RD[:, 0]]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for request in requests:
            assert self.read[request.sequence] == list(request.tokens[:-1]), "all but the last committed token"
        return [Proposal.chain([(request.tokens[-1] + 1) % WORLD]) for request in requests]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None: ...

    def finish(self, sequence: int) -> None:
        del self.read[sequence]


def test_a_drafter_that_reads_hidden_states_gets_those_of_the_past() -> None:
    outputs = outputs_of(engine_source(), copies=2)
    scores = scored(world(), outputs, PARAMS, make_drafter=Taps)
    text = np.concatenate([output.tokens for output in outputs])
    later = scores.position > 0
    np.testing.assert_array_equal(scores.named["drafter"], later)
    expected = np.roll((text + 1) % WORLD, 1) == text
    np.testing.assert_array_equal(scores.hits["drafter"][later], expected[later])


def test_strata_cover_every_token_once_each_way() -> None:
    outputs = outputs_of(engine_source(), copies=3)
    strata = strata_of(scored(world(), outputs, PARAMS, make_drafter=drawing_drafter))
    total = int(strata["all"].sum())
    for names in (
        ("first 8 tokens", "later tokens"),
        ("low entropy", "middle entropy", "high entropy"),
        ("no n-gram match", "n-gram names the mode", "n-gram names another"),
    ):
        assert sum(int(strata[name].sum()) for name in names) == total
        assert np.sum([strata[name] for name in names], axis=0).max() == 1
    assert set(PROMPTS) == {output.prompt_id for output in outputs}


def test_a_stratum_does_not_look_at_the_token_itself() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=48)
    outputs = outputs_of(engine_source(params=params), copies=3)
    changed = [
        Output(prompt_id=each.prompt_id, prompt=each.prompt, tokens=(*each.tokens[:-1], (each.tokens[-1] + 5) % WORLD))
        for each in outputs
    ]
    before, after = (
        strata_of(scored(world(), each, params, make_drafter=drawing_drafter)) for each in (outputs, changed)
    )
    for name, mask in before.items():
        np.testing.assert_array_equal(mask, after[name], err_msg=name)
