"""The sampling fields of a request: each is honoured at every position or refused by name (law 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from outrider.errors import SamplingError, nearest
from outrider.sampling.constraint import StructuredOutputs

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Names and meanings are vLLM's.

    Order of processing at every position: masks (grammar, bad words, ``min_tokens``) and ``logit_bias``; repetition (prompt and
    output), presence and frequency (output) penalties; temperature; ``min_p``; ``top_k``; ``top_p`` on the renormalised
    rest.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches this; 1 keeps all.
        min_p: drop tokens less probable than this share of the most probable one; 0 drops none.
        repetition_penalty: > 0; logits of tokens in prompt or output are divided (if positive) or multiplied by it.
        presence_penalty: subtracted once from logits of tokens in the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: added to logits, by token id, each in [-100, 100].
        bad_words: strings that must not be generated.
        bad_words_token_ids: token id sequences that must not be generated (what ``bad_words`` becomes).
        min_tokens: end-of-sequence and stop token ids are forbidden before this many output tokens.
        max_tokens: most output tokens; at least 1.
        stop: strings that end the output; the string itself is not part of the text.
        stop_token_ids: token ids that end the output, besides the model's own.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        seed: makes the output a fixed function of the request (law 7); ``None`` draws fresh noise.
        n: independent choices for one prompt.
        logprobs: ``None`` for none; k >= 0 for the chosen token's log-probability and the k likeliest.
        logprobs_mode: ``raw`` (log-softmax of the target's logits) or ``processed`` (after all of the above).
        structured_outputs: what the output must look like; a mapping with the fields of
            :class:`outrider.sampling.constraint.StructuredOutputs` will do. It says where the output ends, so
            ``min_tokens``, ``ignore_eos`` and bad words are refused beside it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.bad_words, str):
            object.__setattr__(self, "bad_words", (self.bad_words,))
        constraint: object = self.structured_outputs
        if isinstance(constraint, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_dict(constraint))
        _check(self)

    @property
    def is_greedy(self) -> bool:
        """True at temperature 0."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """True if a penalty changes any logit."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SamplingParams:
        """Build from named values; an unknown name is an error that names the nearest valid one.

        Raises:
            SamplingError: an unknown name or a value out of range.
        """
        known = [f.name for f in fields(SamplingParams)]
        for name in values:
            if name not in known:
                raise SamplingError(
                    f"sampling field {name!r} is unknown{nearest(name, known)}; allowed: {', '.join(known)}"
                )
        return SamplingParams(**values)


def _check(params: SamplingParams) -> None:
    _check_numbers(params)
    _require(params.n == 1 or not params.is_greedy, "n", params.n, "1 at temperature 0 (all choices would be equal)")
    _require(
        params.min_tokens <= params.max_tokens,
        "min_tokens",
        params.min_tokens,
        f"at most max_tokens ({params.max_tokens})",
    )
    for token, bias in params.logit_bias.items():
        _require(_is_int(token) and token >= 0, "logit_bias", token, "token ids of 0 or more")
        _require(_finite(bias) and -100 <= bias <= 100, "logit_bias", bias, "values from -100 to 100")
    for text in params.stop:
        _require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
    for text in params.bad_words:
        _require(isinstance(text, str) and text != "", "bad_words", text, "non-empty strings")
    for ids in params.bad_words_token_ids:
        _require(
            len(ids) > 0 and all(_is_int(i) and i >= 0 for i in ids),
            "bad_words_token_ids",
            ids,
            "non-empty lists of token ids",
        )
    for token in params.stop_token_ids:
        _require(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids of 0 or more")
    _check_constraint(params)


def _check_constraint(params: SamplingParams) -> None:
    """A constraint and another mask could leave no token at all, so they are refused together."""
    constraint = params.structured_outputs
    _require(
        constraint is None or isinstance(constraint, StructuredOutputs),
        "structured_outputs",
        constraint,
        "an object with one of json, json_object, regex, choice and grammar",
    )
    clashes = {
        "min_tokens": params.min_tokens > 0,
        "ignore_eos": params.ignore_eos,
        "bad_words": bool(params.bad_words),
        "bad_words_token_ids": bool(params.bad_words_token_ids),
    }
    for name, is_given in clashes.items():
        if constraint is not None and is_given:
            raise SamplingError(
                f"{name} contradicts structured_outputs, which says what may come and where the output ends; "
                f"leave out {name}, or write it into the constraint"
            )


def _check_numbers(params: SamplingParams) -> None:
    p = params
    _require(_finite(p.temperature) and 0 <= p.temperature <= 100, "temperature", p.temperature, "0 to 100")
    _require(_is_int(p.top_k) and p.top_k >= -1, "top_k", p.top_k, "an integer of 1 or more, or 0 / -1 for all tokens")
    _require(_finite(p.top_p) and 0 < p.top_p <= 1, "top_p", p.top_p, "more than 0, at most 1")
    _require(_finite(p.min_p) and 0 <= p.min_p <= 1, "min_p", p.min_p, "0 to 1")
    _require(
        _finite(p.repetition_penalty) and 0 < p.repetition_penalty <= 100,
        "repetition_penalty",
        p.repetition_penalty,
        "more than 0, at most 100",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        _require(_finite(getattr(p, name)) and -2 <= getattr(p, name) <= 2, name, getattr(p, name), "-2 to 2")
    _require(_is_int(p.max_tokens) and p.max_tokens >= 1, "max_tokens", p.max_tokens, "an integer of 1 or more")
    _require(_is_int(p.min_tokens) and p.min_tokens >= 0, "min_tokens", p.min_tokens, "an integer of 0 or more")
    _require(_is_int(p.n) and 1 <= p.n <= 128, "n", p.n, "1 to 128")
    _require(
        p.seed is None or (_is_int(p.seed) and -(2**63) <= p.seed < 2**63), "seed", p.seed, "a 64-bit integer or null"
    )
    _require(
        p.logprobs is None or (_is_int(p.logprobs) and 0 <= p.logprobs <= 20), "logprobs", p.logprobs, "null or 0 to 20"
    )
    _require(p.logprobs_mode in ("raw", "processed"), "logprobs_mode", p.logprobs_mode, "raw or processed")
    _require(isinstance(p.ignore_eos, bool), "ignore_eos", p.ignore_eos, "true or false")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, given: object, allowed: str) -> None:
    if not holds:
        raise SamplingError(f"{name} {given!r} is not possible; allowed: {allowed}")
