"""Requests as clients send them: OpenAI's fields, with vLLM's names for what OpenAI lacks.

Every field is honoured or refused by name (law 2): an unknown one is refused with the nearest that there is, a known one
that this server does not honour with the reason. Values are taken strictly: no text where a number belongs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.errors import nearest
from outrider.serve.errors import ApiError, bad_request
from outrider.serve.refused import REFUSED

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "JsonSchemaFormat",
    "Prediction",
    "ResponseFormat",
    "SharedFields",
    "SpeculationFields",
    "StreamOptions",
    "parse_body",
]

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)

TokenId = int


class _AtFirst(FailFast):
    """Stop at the first mistake. Hashable, as members of a union must be."""

    __hash__ = object.__hash__


_AT_FIRST = _AtFirst()
# Of a list the first mistake is enough: a body of nothing but mistakes would become a million complaints otherwise.
TokenIds: TypeAlias = Annotated[list[TokenId], _AT_FIRST]
Texts: TypeAlias = Annotated[list[str], _AT_FIRST]
StopText: TypeAlias = Annotated[str, Field(max_length=1000)]

MOST_TEXTS = 1000
"""Most entries of ``bad_words``, ``stop_token_ids`` and ``tools``: each costs time at every token, or room in every prompt."""
MOST_STOPS = 64
MOST_BIASES = 4096


class _Part(BaseModel):
    model_config = _STRICT


class StreamOptions(_Part):
    """``stream_options``. ``include_steps`` is Outrider's own: each chunk says which text was drafted."""

    include_usage: bool | None = None
    include_steps: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SpeculationFields(_Part):
    """``speculation``: Outrider's own, per request."""

    enabled: bool | None = None
    num_draft_tokens: int | None = Field(default=None, ge=0, le=128)
    drafter: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> SpeculationFields:
        if self.enabled is False and (self.num_draft_tokens or self.drafter not in (None, "none")):
            raise PydanticCustomError(
                "contradiction", "enabled is false, so num_draft_tokens and drafter must be left out"
            )
        return self


class JsonSchemaFormat(_Part):
    """``response_format.json_schema``."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _agrees(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "contradiction", "json_schema belongs to type 'json_schema', and that type needs it"
            )
        return self


class TextPart(_Part):
    """A part of a content that is a list."""

    type: Literal["text"]
    text: str


class Prediction(_Part):
    """``prediction``: text that the answer is expected to hold, used as a draft."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], _AT_FIRST]

    @property
    def text(self) -> str:
        """The predicted text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ToolFunction(_Part):
    """What a tool is called and takes."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(_Part):
    """A tool in OpenAI's form. ``raw`` is the object as it was sent, which is what the model is shown."""

    type: Literal["function"]
    function: ToolFunction
    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_raw(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(value)
        made._raw = value
        return made

    @property
    def raw(self) -> dict[str, Any]:
        """The object as it was sent."""
        return self._raw


class ChosenFunction(_Part):
    """The function of a named tool choice."""

    name: str


class ChosenTool(_Part):
    """``tool_choice`` as an object."""

    type: Literal["function"]
    function: ChosenFunction


class SharedFields(BaseModel):
    """Fields that both endpoints take; sampling fields are checked further by :class:`outrider.SamplingParams`."""

    model_config = _STRICT

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: Annotated[list[StopText], _AT_FIRST, Field(max_length=MOST_TEXTS)] | None = None
    min_tokens: int | None = None
    stop: StopText | Annotated[list[StopText], _AT_FIRST, Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MOST_TEXTS)] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    logprobs_mode: Literal["raw", "processed"] | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationFields | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> SharedFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("contradiction", "stream_options belongs to stream: true")
        asks_for_json = self.response_format is not None and self.response_format.type != "text"
        if asks_for_json and self.structured_outputs is not None:
            raise PydanticCustomError(
                "contradiction", "response_format and structured_outputs are both given; keep one"
            )
        return self


class ChatRequest(SharedFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], _AT_FIRST]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Annotated[list[ToolDefinition], _AT_FIRST, Field(max_length=MOST_TEXTS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _agree_on_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("contradiction", "top_logprobs belongs to logprobs: true")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise PydanticCustomError("contradiction", "max_tokens and max_completion_tokens differ; keep one")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise PydanticCustomError("contradiction", "tool_choice needs tools")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("contradiction", "tools holds two functions of one name")
        if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise PydanticCustomError("contradiction", "tool_choice names a function that tools does not hold")
        return self


class CompletionRequest(SharedFields):
    """Body of ``POST /v1/completions``."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], _AT_FIRST]
    logprobs: int | None = Field(default=None, ge=0, le=20)


_MOST_ENTRIES = {"logit_bias": MOST_BIASES, "metadata": 64}

R = TypeVar("R", ChatRequest, CompletionRequest)


def parse_body(raw: bytes, model: type[R]) -> R:
    """Read and check a request's body.

    Raises:
        ApiError: 400 that names the field.
    """
    values = _read_json(raw)
    known = _field_names(model)
    for name, most in _MOST_ENTRIES.items():
        given = values.get(name)
        if isinstance(given, dict) and len(given) > most:
            raise bad_request(f"{name} has {len(given)} entries; allowed: at most {most}", param=name)
    for name, value in values.items():
        if name in REFUSED and name not in known:
            allowed, advice = REFUSED[name]
            if value is not None and not any(value == same and type(value) is type(same) for same in allowed):
                raise bad_request(f"{name} is not supported; {advice}", param=name, code="unsupported_field")
        elif name not in known:
            hint = nearest(name, known) or f"; {_other_endpoint(name, model)}"
            raise bad_request(
                f"field {name[:80]!r} is unknown{hint}".rstrip("; "), param=name[:80], code="unknown_field"
            )
    try:
        return model.model_validate({name: value for name, value in values.items() if name in known})
    except ValidationError as error:
        raise _first_mistake(error) from None


def _read_json(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
        values = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 text (byte {error.start})", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deep", code="invalid_json") from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Of two values for one name the earlier one would be ignored."""
    values = dict(pairs)
    if len(values) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:80]!r} is given twice in one object")
    return values


def _field_names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _other_endpoint(name: str, model: type[BaseModel]) -> str:
    other, path = (
        (ChatRequest, "/v1/chat/completions") if model is CompletionRequest else (CompletionRequest, "/v1/completions")
    )
    return f"it belongs to {path}" if name in other.model_fields else ""


def _first_mistake(error: ValidationError) -> ApiError:
    """The first mistake that pydantic found, in our words."""
    found = error.errors(include_url=False, include_context=True)
    # Of a union every member complains; the deepest complaint is about what was meant, then one that is not about the type.
    first = found[0]["loc"][:1]
    complaints = [mistake for mistake in found if mistake["loc"][:1] == first]
    mistake = max(complaints, key=lambda m: (len(m["loc"]), not m["type"].endswith("_type")))
    names = [part for part in mistake["loc"] if isinstance(part, int) or _is_name(part)]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
    if mistake["type"] == "missing":
        message = f"{path} is missing"
    elif mistake["type"] == "extra_forbidden":
        known = _names_beside(names)
        message = f"field {path!r} is unknown{nearest(str(names[-1]), known)}; allowed: {', '.join(known)}"
    elif mistake["type"] == "contradiction":
        message = f"{path}: {mistake['msg']}" if path else mistake["msg"]
    else:
        message = f"{path} is not possible: {mistake['msg'][0].lower()}{mistake['msg'][1:]}"
    code = {"missing": "missing_field", "extra_forbidden": "unknown_field"}.get(mistake["type"], "invalid_value")
    return bad_request(message, param=path or _named_first(message), code=code)


def _is_name(part: str) -> bool:
    """False for the names that pydantic gives to members of a union."""
    return part.isidentifier() and part not in ("str", "ChosenTool")


_NESTED: Mapping[str, type[BaseModel]] = {
    "stream_options": StreamOptions,
    "speculation": SpeculationFields,
    "response_format": ResponseFormat,
    "json_schema": JsonSchemaFormat,
    "prediction": Prediction,
    "content": TextPart,
    "tools": ToolDefinition,
    "tool_choice": ChosenTool,
}


def _names_beside(names: list[Any]) -> list[str]:
    words = [name for name in names[:-1] if isinstance(name, str)]
    if words[-1:] == ["function"]:
        return _field_names(ToolFunction if words[0] == "tools" else ChosenFunction)
    return _field_names(_NESTED[words[-1]]) if words and words[-1] in _NESTED else []


def _named_first(message: str) -> str | None:
    word = message.partition(" ")[0].strip(":,;'")
    return word if word in {*ChatRequest.model_fields, *CompletionRequest.model_fields} else None
