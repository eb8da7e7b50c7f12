"""From a prompt and sampling fields to a validated request: every mistake is named before anything is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from outrider.engine.constraints import compile_constraint
from outrider.engine.sequence import NO_SLOT, LiveSequence, Request
from outrider.engine.speculation import DEFAULT_SPECULATION, SpeculationParams
from outrider.engine.stop import OutputText, StopRules
from outrider.errors import PromptError, SamplingError
from outrider.models.base import TargetSpec
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState, bad_word_ids, check_token_ids

__all__ = ["Prompt", "build_request", "build_sequences"]

_CHARACTERS_A_TOKEN = 16
"""More than a token of any text has on average."""

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]]"
"""Raw text, token ids, or chat messages (rendered with the target's template)."""


def build_request(
    prompt: Prompt,
    params: SamplingParams,
    *,
    id: str,
    seed: int,
    scope: str | None = None,
    priority: int = 0,
    spec: TargetSpec,
    tokenizer: Tokenizer | None,
    prediction: str | None = None,
    speculation: SpeculationParams | None = None,
) -> Request:
    """Tokenise and check.

    Raises:
        PromptError: an empty prompt, one longer than the window, token ids outside the vocabulary, a refused chat.
        SamplingError: fields that name token ids outside the vocabulary, that need a tokenizer where there is none, or a
            constraint that no output can meet.
    """
    tokens = _tokens(prompt, tokenizer)
    if not tokens:
        raise PromptError("the prompt is empty; give at least one token")
    outside = [token for token in tokens if not 0 <= token < spec.vocab_size]
    if outside:
        raise PromptError(
            f"prompt token id {outside[0]} is outside the vocabulary; allowed: 0 to {spec.vocab_size - 1}"
        )
    if len(tokens) >= spec.max_positions:
        raise PromptError(
            f"the prompt has {len(tokens)} tokens, the window of {spec.name} {spec.max_positions}; "
            f"shorten it to at most {spec.max_positions - 1}"
        )
    resolved = _resolve(params, spec, tokenizer)
    return Request(
        id=id,
        prompt=tuple(tokens),
        params=resolved,
        seed=seed,
        scope=scope,
        priority=priority,
        grammar=compile_constraint(resolved, spec, tokenizer),
        prediction=_predicted(prediction, spec, tokenizer),
        speculation=speculation or DEFAULT_SPECULATION,
    )


def build_sequences(
    request: Request, *, keys: Iterator[int], spec: TargetSpec, tokenizer: Tokenizer | None
) -> list[LiveSequence]:
    """The choices of a request, none of them started; each takes the next of ``keys``."""
    params = request.params
    limit = min(params.max_tokens, spec.max_positions - len(request.prompt))
    return [
        LiveSequence(
            key=next(keys),
            request=request,
            index=index,
            tokens=list(request.prompt),
            slot=NO_SLOT,
            state=SamplingState(
                params,
                prompt_tokens=request.prompt,
                vocab_size=spec.vocab_size,
                eos_token_ids=spec.eos_token_ids,
                seed=request.seed,
                choice=index,
            ),
            stop=StopRules(params, eos_token_ids=spec.eos_token_ids, limit=limit),
            text=OutputText(tokenizer, params.stop),
            logprobs=None if params.logprobs is None else [],
        )
        for index in range(params.n)
    ]


def _tokens(prompt: Prompt, tokenizer: Tokenizer | None) -> Sequence[int]:
    if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
        return [token for token in prompt if isinstance(token, int)]
    if tokenizer is None:
        raise PromptError("this target has no tokenizer; give the prompt as token ids")
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    messages = [message for message in prompt if isinstance(message, Mapping)]
    if len(messages) != len(prompt):
        raise PromptError("a prompt is text, a list of token ids, or a list of chat messages; this list mixes them")
    return tokenizer.encode_chat(messages)


def _predicted(text: str | None, spec: TargetSpec, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Token ids of the text that the output may repeat, no more than the window holds.

    It only ever makes drafts, so of a text that is far too long no more is read than might be of use.
    """
    if text is None or text == "":
        return ()
    if tokenizer is None:
        raise PromptError("prediction is a text, and this target has no tokenizer; leave it out")
    ids = tokenizer.encode(text[: _CHARACTERS_A_TOKEN * spec.max_positions])
    return tuple(token for token in ids[: spec.max_positions] if token < spec.vocab_size)


def _resolve(params: SamplingParams, spec: TargetSpec, tokenizer: Tokenizer | None) -> SamplingParams:
    if tokenizer is None and (params.stop or params.bad_words):
        raise SamplingError("stop and bad_words are strings, and this target has no tokenizer; give token ids")
    if tokenizer is not None and params.bad_words:
        spelled = bad_word_ids(params.bad_words, tokenizer.encode)
        params = replace(params, bad_words_token_ids=(*map(tuple, params.bad_words_token_ids), *spelled))
    check_token_ids(params, spec.vocab_size)
    return params
