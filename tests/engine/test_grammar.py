"""Constrained requests through the whole engine, on a tiny model that can spell JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
import torch

from outrider.drafters.base import Drafter, DraftRequest
from outrider.drafters.forced import ForcedDrafter
from outrider.drafters.lm import LMDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.tree import TreeShape
from outrider.engine.config import EngineConfig
from outrider.engine.constraints import compiler_for
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.errors import PromptError, SamplingError
from outrider.models.table import TableModel
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason, Proposal
from tests.engine.support import Scripted
from tests.sampling.grammars import tiny_model, tiny_tokenizer

PROMPTS = ([1, 2, 3], [20, 30, 40], [7, 7], [33, 12, 5, 9])
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"enum": [True, "none", 12]}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputs(regex="(true|name)(-[a-f]{1,3})+[.]"),
    StructuredOutputs(choice=["tree", "true", "trueish", "name"]),
    StructuredOutputs(grammar='start: "[" item ("," item)* "]"\nitem: /[a-c]{1,4}/ | start'),
)


def random_trees(seed: int) -> Scripted:
    rng = random.Random(seed)
    size = tiny_tokenizer().vocab_size

    def make(request: DraftRequest) -> Proposal:
        parents: list[int] = []
        depths: list[int] = []
        for node in range(rng.randint(1, 7)):
            parent = rng.choice([-1, *(p for p in range(node) if depths[p] < request.num_draft_tokens)])
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return Proposal(tokens=tuple(rng.randrange(size) for _ in parents), parents=tuple(parents), drafter="trees")

    return Scripted(make, "trees")


def draft_model(*, tree: TreeShape | None = None) -> LMDrafter:
    """A poor relative of the target."""
    return LMDrafter(tiny_model(0, scale=2.0), name="model", tree=tree)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "forced": ForcedDrafter,
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "model": draft_model,
    "model tree": lambda: draft_model(tree=TreeShape(depth=3, width=2, num_nodes=6)),
    "trees": lambda: random_trees(3),
    "prediction": PredictionDrafter,
}


def decode(
    drafter: Drafter | None,
    fields: Sequence[SamplingParams],
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    predictions: Sequence[str | None] | None = None,
    **config: Any,
) -> list[GenerationResult]:
    settings = EngineConfig(**{"num_draft_tokens": 4, "schedule": "fixed", **config})
    engine = Engine(tiny_model(), drafter=drafter, config=settings, entropy=lambda: 5)
    return engine.generate(prompts, fields, predictions=predictions)


def fields_of(**common: Any) -> list[SamplingParams]:
    return [SamplingParams(**{"max_tokens": 40, **common}, structured_outputs=each) for each in CONSTRAINTS]


def checked_text(constraint: StructuredOutputs, result: GenerationResult) -> None:
    """A finished output fits its constraint."""
    if constraint.json is not None:
        jsonschema.validate(json.loads(result.text), SCHEMA)
    elif constraint.regex is not None:
        assert re.fullmatch(constraint.regex, result.text)
    elif constraint.choice:
        assert result.text in constraint.choice
    else:
        assert re.fullmatch(r"\[[][,a-c]+\]", result.text) and result.text.count("[") == result.text.count("]")


@pytest.mark.parametrize("mode", ["greedy", "seeded", "tight"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_plain_output(name: str, mode: str) -> None:
    """Two grammars at once, and plain requests beside them."""
    common = {
        "greedy": {},
        "seeded": {"temperature": 1.2, "seed": 11},
        "tight": {"temperature": 1.0, "seed": 3, "top_p": 0.8, "repetition_penalty": 1.3, "logit_bias": {1: -2.0}},
    }[mode]
    fields = [*fields_of(**common), SamplingParams(max_tokens=15, **common)]
    prompts = [*PROMPTS, PROMPTS[0]]
    plain = decode(None, fields, prompts=prompts)
    drafted = decode(DRAFTERS[name](), fields, prompts=prompts, predictions=["name-ab.true"] * len(prompts))
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert [result.finish_reason for result in drafted] == [result.finish_reason for result in plain]
    for constraint, result in zip(CONSTRAINTS, drafted, strict=False):
        if result.finish_reason is FinishReason.STOP:
            checked_text(constraint, result)


def test_most_of_these_outputs_end_by_themselves() -> None:
    results = decode(ForcedDrafter(), fields_of(temperature=1.0))
    assert sum(result.finish_reason is FinishReason.STOP for result in results) >= 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["forced", "suffix", "model"])
def test_drawn_outputs_fit_or_are_prefixes(name: str, seed: int) -> None:
    """Unseeded requests: drawn chains and rejection."""
    for limit in (3, 9, 60):
        fields = fields_of(temperature=1.5, max_tokens=limit)
        settings = EngineConfig(num_draft_tokens=3, schedule="fixed")
        model = tiny_model()
        engine = Engine(model, drafter=DRAFTERS[name](), config=settings, entropy=iter(range(seed, 99)).__next__)
        for constraint, result in zip(CONSTRAINTS, engine.generate(PROMPTS, fields), strict=True):
            if result.finish_reason is FinishReason.STOP:
                checked_text(constraint, result)
            else:
                assert result.finish_reason is FinishReason.LENGTH
                assert model.tokenizer is not None
                matcher = GrammarMatcher(compiler_for(model.spec, model.tokenizer).compile(constraint))
                assert matcher.is_open(result.token_ids), "a prefix of a text that fits"


def test_companions_change_nothing() -> None:
    for common in ({}, {"temperature": 1.0, "seed": 4}):
        fields = [
            *fields_of(**common),
            SamplingParams(max_tokens=20, **common),
            SamplingParams(max_tokens=20, **common),
        ]
        prompts = [*PROMPTS, *PROMPTS[:2]]
        together = decode(SuffixDrafter(), fields, prompts=prompts)
        for prompt, each, result in zip(prompts, fields, together, strict=True):
            [alone] = decode(SuffixDrafter(), [each], prompts=[prompt])
            assert result.token_ids == alone.token_ids


def test_the_law_of_a_constrained_engine_is_the_masked_law() -> None:
    """Drawn chains through the whole engine: first tokens follow the renormalised table."""
    words = ["ok", "name", "true", "a"]
    model = tiny_model(3, scale=1.0)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    params = SamplingParams(temperature=1.0, max_tokens=2, structured_outputs=StructuredOutputs(choice=words), n=128)
    counts: dict[int, int] = {}
    for entropy in range(8):
        engine = Engine(
            model,
            drafter=draft_model(),
            config=EngineConfig(num_draft_tokens=2, schedule="fixed", max_batch_size=256),
            entropy=lambda entropy=entropy: entropy,
        )
        for result in engine.generate([[1]], params):
            counts[result.token_ids[0]] = counts.get(result.token_ids[0], 0) + 1
    matcher = GrammarMatcher(compiler_for(model.spec, tokenizer).compile(StructuredOutputs(choice=words)))
    allowed = [token for token in range(model.spec.vocab_size) if matcher.allows((), token)]
    assert set(counts) <= set(allowed)
    law = torch.softmax(model._logits[1][allowed].double(), dim=0).tolist()
    total = sum(counts.values())
    for token, probability in zip(allowed, law, strict=True):
        spread = (probability * (1 - probability) / total) ** 0.5
        assert abs(counts.get(token, 0) / total - probability) < 5 * spread + 1e-9


def test_what_a_greedy_model_would_rather_say_is_not_said() -> None:
    fields = fields_of()
    free = decode(None, [SamplingParams(max_tokens=40)] * len(PROMPTS))
    for constraint, bound, result in zip(CONSTRAINTS, decode(None, fields), free, strict=True):
        assert bound.token_ids[:2] != result.token_ids[:2], "the test is about something"
        checked = compiler_for(tiny_model().spec, tiny_tokenizer())
        matcher = GrammarMatcher(checked.compile(constraint))
        for depth, token in enumerate(bound.token_ids):
            assert matcher.allows(bound.token_ids[:depth], token)


def test_forced_tokens_save_passes() -> None:
    long = {
        "type": "object",
        "properties": {"name": {"const": "abcdefghijklmnop"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(json=long, disable_any_whitespace=True))
    [plain] = decode(None, [params], prompts=[[1]])
    [forced] = decode(ForcedDrafter(), [params], prompts=[[1]])
    assert forced.token_ids == plain.token_ids and json.loads(forced.text) == {"name": "abcdefghijklmnop"}
    assert len(plain.steps) > 15 and len(forced.steps) == 2, "the prompt's pass and one more"
    assert forced.stats.acceptance_rate == 1.0
    [never] = decode(ForcedDrafter(), [params], prompts=[[1]], num_draft_tokens=0)
    assert len(never.steps) == len(plain.steps), "with 0 draft tokens nothing is drafted, forced or not"


def test_the_end_of_a_grammar_is_a_stop_even_at_the_limit() -> None:
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="abcd"))
    for drafter in (None, ForcedDrafter()):
        [result] = decode(drafter, [params], prompts=[[1]])
        assert (result.text, result.finish_reason, len(result.token_ids)) == ("abcd", FinishReason.STOP, 4)
    [cut] = decode(None, [SamplingParams(max_tokens=3, structured_outputs=params.structured_outputs)], prompts=[[1]])
    assert (cut.text, cut.finish_reason) == ("abc", FinishReason.LENGTH)


def test_stop_strings_still_stop() -> None:
    params = SamplingParams(max_tokens=9, stop=["c"], structured_outputs=StructuredOutputs(regex="abcdefg"))
    for drafter in (None, ForcedDrafter()):
        [result] = decode(drafter, [params], prompts=[[1]])
        assert (result.text, result.finish_reason) == ("ab", FinishReason.STOP)


def test_choices_of_one_prompt_have_matchers_of_their_own() -> None:
    params = SamplingParams(
        temperature=2.0, n=8, max_tokens=12, structured_outputs=StructuredOutputs(choice=["tree", "name", "ok"])
    )
    results = decode(SuffixDrafter(), [params], prompts=[[1, 2]])
    assert {result.text for result in results} <= {"tree", "name", "ok"} and len({r.text for r in results}) > 1


def test_log_probabilities_of_processed_laws_see_the_mask() -> None:
    params = SamplingParams(
        max_tokens=6,
        logprobs=20,
        logprobs_mode="processed",
        temperature=1.0,
        seed=1,
        structured_outputs=StructuredOutputs(regex="[ab]{4}"),
    )
    tokenizer = tiny_tokenizer()
    ours = {tokenizer.token_id("a"), tokenizer.token_id("b")}
    for drafter in (None, SuffixDrafter(), ForcedDrafter()):
        [result] = decode(drafter, [params], prompts=[[1]])
        assert result.logprobs is not None and len(result.logprobs) == 4
        assert all({token for token, _ in entry.top} <= ours for entry in result.logprobs)


def test_a_met_limit_ends_the_output_with_an_error_alike_with_and_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grammar that gives up in the middle, as one past llguidance's limits does."""
    real = GrammarMatcher.prepare

    def give_up(self: GrammarMatcher, path: tuple[int, ...]) -> Any:
        if len(self._committed) + len(path) == 4:
            self._dead.add(path)
        return real(self, path)

    monkeypatch.setattr(GrammarMatcher, "prepare", give_up)
    params = SamplingParams(temperature=1.0, seed=2, structured_outputs=StructuredOutputs(regex="[ab]{9}"))
    found = [
        decode(drafter, [params, SamplingParams(max_tokens=7)], prompts=PROMPTS[:2])
        for drafter in (None, SuffixDrafter())
    ]
    for broken, companion in found:
        assert broken.finish_reason is FinishReason.ERROR and len(broken.text) == 4
        assert (
            "structured_outputs met a limit" in broken.error and "tokens; make the constraint smaller" in broken.error
        )
        assert companion.finish_reason is FinishReason.LENGTH
    assert found[0][0].token_ids == found[1][0].token_ids


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutputs(regex="[z"),
        StructuredOutputs(json={"type": "string", "pattern": "("}),
        StructuredOutputs(regex="é"),
    ],
    ids=lambda constraint: constraint.text,
)
def test_what_cannot_be_met_is_refused_before_anything_runs(constraint: StructuredOutputs) -> None:
    engine = Engine(tiny_model(), drafter=None)
    with pytest.raises(SamplingError, match=r"structured_outputs\.(regex|json) is not possible"):
        engine.submit([1], SamplingParams(structured_outputs=constraint))
    assert not engine.has_work


def test_a_target_without_words_or_without_an_end_is_refused() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    mute = TableModel(torch.zeros(3, 3), eos_token_ids=(2,))
    with pytest.raises(SamplingError, match="no tokenizer"):
        Engine(mute).submit([1], params)
    endless = TableModel(torch.zeros(60, 60))
    endless.tokenizer = tiny_tokenizer()
    with pytest.raises(SamplingError, match="needs an end-of-sequence token"):
        Engine(endless).submit([1], params)
    with pytest.raises(PromptError, match="prediction is a text"):
        Engine(mute).submit([1], prediction="abc")


def test_a_prediction_is_copied() -> None:
    fields = {"temperature": 1.0, "seed": 1, "structured_outputs": StructuredOutputs(regex="[a-f-]{18}")}
    [plain] = decode(None, [SamplingParams(**fields)], prompts=[[4]])
    for make in (PredictionDrafter, NGramDrafter, SuffixDrafter):
        [helped] = decode(make(), [SamplingParams(**fields)], prompts=[[4]], predictions=[plain.text])
        assert helped.token_ids == plain.token_ids
        assert len(helped.steps) <= 1 + 4, "eighteen tokens, five a pass, the first from the prompt's"
