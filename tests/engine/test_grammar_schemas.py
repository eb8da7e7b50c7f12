"""Random schemas: every finished output parses and fits, every cut one can still be completed."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.config import EngineConfig
from outrider.engine.constraints import compiler_for
from outrider.engine.engine import Engine
from outrider.sampling.constraint import StructuredOutputs
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason
from tests.sampling.grammars import tiny_model


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "null", "enum", "const"] + ["array", "object", "anyOf"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind == "integer":
        low = rng.randint(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "bc", 1, 20, True, None, "name"], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["ok", 7, False, {"a": [1, "b"]}])}
    if kind == "array":
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": low,
            "maxItems": low + rng.randint(0, 2),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "name", "ok", "true", "x-y"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


@pytest.mark.parametrize("seed", range(4))
def test_outputs_fit_random_schemas(seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_model(seed, scale=1.0)
    assert model.tokenizer is not None
    schemas = [random_schema(rng) for _ in range(8)]
    fields = [
        SamplingParams(
            max_tokens=rng.choice((5, 120)),
            temperature=rng.choice((0.0, 1.0)),
            structured_outputs=StructuredOutputs(json=schema, disable_any_whitespace=rng.random() < 0.5),
        )
        for schema in schemas
    ]
    engine = Engine(
        model, drafter=SuffixDrafter(), config=EngineConfig(num_draft_tokens=4, schedule="fixed"), entropy=lambda: seed
    )
    num_finished = 0
    for schema, each, result in zip(schemas, fields, engine.generate([[seed + 1]] * 8, fields), strict=True):
        if result.finish_reason is FinishReason.STOP:
            num_finished += 1
            jsonschema.validate(json.loads(result.text), schema)
            continue
        assert result.finish_reason is FinishReason.LENGTH
        assert each.structured_outputs is not None
        matcher = GrammarMatcher(compiler_for(model.spec, model.tokenizer).compile(each.structured_outputs))
        assert matcher.is_open(result.token_ids), (schema, result.text)
    assert num_finished >= 2
