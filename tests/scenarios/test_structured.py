"""Scenario S10, small: JSON under load on the real model, plain requests beside it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from outrider.drafters.build import make_drafter
from outrider.engine.config import EngineConfig
from outrider.engine.constraints import compiler_for
from outrider.engine.engine import Engine
from outrider.engine.result import GenerationResult
from outrider.errors import SamplingError
from outrider.models.load import load_target
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.masks import allowed_BV, grammar_masks
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason

pytestmark = pytest.mark.real_model

OK = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "Say hello world 500 times"}]
WHO = [{"role": "user", "content": "Describe Anna, who is 34 and likes red and blue."}]
REQUESTS = [
    *[(HELLO, StructuredOutputs(json_object=True))] * 2,
    (HELLO, StructuredOutputs(json=OK)),
    (WHO, StructuredOutputs(json=RECORD, disable_any_whitespace=True)),
    (WHO, StructuredOutputs(regex=r"Anna is \d{1,3}( years old)?\.")),
    (WHO, None),
    (HELLO, None),
]


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target("smollm2-135m-instruct", dtype="bfloat16", device="cpu")


def answer(target: Any, drafter: str, requests: Any = REQUESTS, **fields: Any) -> list[GenerationResult]:
    params = [SamplingParams(**{"max_tokens": 40, **fields}, structured_outputs=each) for _, each in requests]
    engine = Engine(target, drafter=make_drafter(drafter, target), config=EngineConfig(num_draft_tokens=6))
    return engine.generate([prompt for prompt, _ in requests], params)


def test_json_under_load(target: Any) -> None:
    plain = answer(target, "none")
    for drafter in ("suffix", "forced", "slice:3"):
        drafted = answer(target, drafter)
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain], drafter
        assert [r.finish_reason for r in drafted] == [r.finish_reason for r in plain], drafter
    for (_, constraint), result in zip(REQUESTS, plain, strict=True):
        if constraint is not None and result.finish_reason is FinishReason.LENGTH:
            matcher = GrammarMatcher(compiler_for(target.spec, target.tokenizer).compile(constraint))
            assert matcher.is_open(result.token_ids), "a prefix of what fits"
        elif constraint is not None and constraint.json is not None:
            jsonschema.validate(json.loads(result.text), constraint.json)
    assert plain[3].finish_reason is FinishReason.STOP
    for index in (5, 6):
        assert answer(target, "none", [REQUESTS[index]])[0].token_ids == plain[index].token_ids


def test_seeded_drafts_change_nothing(target: Any) -> None:
    requests = REQUESTS[2:5]
    fields = {"temperature": 0.9, "seed": 5, "top_p": 0.95}
    plain = answer(target, "none", requests, **fields)
    drafted = answer(target, "suffix", requests, **fields)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    jsonschema.validate(json.loads(plain[1].text), RECORD)


def test_a_schema_with_an_invalid_expression_is_refused(target: Any) -> None:
    with pytest.raises(SamplingError, match=r"structured_outputs\.json is not possible"):
        answer(target, "none", [(HELLO, StructuredOutputs(json={"type": "string", "pattern": "["}))])


def test_one_token_is_judged_as_its_mask_does(target: Any) -> None:
    """What the greedy fast path relies on, over the real vocabulary."""
    rng = random.Random(0)
    vocab_size, tokenizer = target.spec.vocab_size, target.tokenizer
    for constraint in (StructuredOutputs(json=RECORD), StructuredOutputs(json=RECORD, disable_any_whitespace=True)):
        matcher = GrammarMatcher(compiler_for(target.spec, tokenizer).compile(constraint))
        text = '{"name":"Jo Smith","age":41,"colours":["red","blue"]}'
        while text:
            allowed = allowed_BV(grammar_masks([(matcher, ())]), vocab_size)[0]
            some = allowed.nonzero().flatten().tolist()
            ends = target.spec.eos_token_ids
            sample = {*rng.sample(range(vocab_size), 60), *rng.sample(some, min(40, len(some))), *ends}
            assert {token for token in sample if matcher.allows((), token)} == {t for t in sample if bool(allowed[t])}
            follows = max(
                (t for t in some if text.startswith(tokenizer.token_text(t))), key=lambda t: len(tokenizer.piece(t))
            )
            matcher.commit((follows,))
            text = text[len(tokenizer.token_text(follows)) :]
        assert not matcher.is_open(())
