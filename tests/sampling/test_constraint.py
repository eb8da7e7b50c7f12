from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from outrider.errors import SamplingError
from outrider.sampling.constraint import MOST_CHARACTERS, MOST_CHOICES, StructuredOutputs
from outrider.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "nothing was given; give exactly one of json, json_object, regex, choice, grammar"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice were given"),
        ({"jsn": "{}"}, "no field 'jsn'; did you mean 'json'"),
        ({"json": "{"}, "json is not a JSON schema"),
        ({"json": "[1]"}, "allowed: a JSON object"),
        ({"json": 3}, "as an object or as text"),
        ({"json": {"const": {1, 2}}}, "json is not a JSON schema"),
        ({"json": {"const": float("nan")}}, "json is not a JSON schema"),
        ({"json_object": "yes"}, "json_object 'yes' is not possible"),
        ({"regex": 3}, "regex 3 is not possible"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"choice": "yes"}, "allowed: a list of texts"),
        ({"choice": ["yes", ""]}, "non-empty texts"),
        ({"choice": ["a"] * (MOST_CHOICES + 1)}, f"at most {MOST_CHOICES}"),
        ({"grammar": "x" * (MOST_CHARACTERS + 1)}, f"at most {MOST_CHARACTERS}"),
        ({"regex": "a", "disable_any_whitespace": True}, "are about JSON, not regex"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " ?"}, "contradicts"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SamplingError, match=said.replace("[", "\\[")):
        StructuredOutputs.from_dict(values)


def test_a_schema_nested_without_end_is_refused() -> None:
    with pytest.raises(SamplingError, match="json is not a JSON schema"):
        StructuredOutputs(json='{"not":' * 100_000)


def test_one_schema_has_one_text_however_it_is_written() -> None:
    as_text, as_object = StructuredOutputs(json='{ "type":"object" }'), StructuredOutputs(json={"type": "object"})
    assert as_text.text == as_object.text == StructuredOutputs(json_object=True).text


def test_nulls_are_fields_that_were_not_given() -> None:
    values = {"json": None, "json_object": None, "regex": "a+", "choice": None, "grammar": None}
    assert StructuredOutputs.from_dict(values).kind == "regex"


def test_sampling_fields_take_a_mapping_and_give_it_back() -> None:
    params = SamplingParams.from_dict({"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0.5})
    assert params.structured_outputs == StructuredOutputs(choice=("yes", "no"))
    assert SamplingParams.from_dict(asdict(params)) == params


@pytest.mark.parametrize(
    "clash",
    [{"min_tokens": 3}, {"ignore_eos": True}, {"bad_words": ["x"]}, {"bad_words_token_ids": [[1]]}],
    ids=lambda clash: next(iter(clash)),
)
def test_masks_that_could_leave_no_token_are_refused_together(clash: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=f"{next(iter(clash))} contradicts structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a+"), **clash)


def test_a_field_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(SamplingError, match="structured_outputs 'yes' is not possible"):
        SamplingParams(structured_outputs="yes")  # type: ignore[arg-type]
