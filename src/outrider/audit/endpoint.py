"""Answers from a server, as token ids: vLLM, SGLang, llama.cpp, TGI.

Prompts go out as token ids (TGI: as text, which the server tokenises itself; the ids that it read must come back equal), all
sampling fields are sent in so many words, since servers have defaults of their own, and no seed is sent. The answer's token
ids must come back: text alone does not tell which tokens it was made of.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from outrider.audit.guesses import Output
from outrider.errors import ConfigError, DataError, OutriderError, nearest
from outrider.metrics import SpeculationStats
from outrider.models.base import TargetSpec
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.params import SamplingParams

__all__ = ["ENDPOINT_KINDS", "EndpointSource"]

ENDPOINT_KINDS = ("openai", "llama.cpp", "tgi")
TIMEOUT_SECONDS = 600


class EndpointSource:
    """A server.

    Args:
        url: base; for ``openai`` with ``/v1``. kind: which interface. model: name that the server knows the target by.
        params: of every request. spec, tokenizer: of the target whose weights are at hand.
        api_key_env: environment variable that holds the key, if one is needed.
        num_parallel: requests under way. may_retokenise: without token ids, take those that the tokenizer makes of the text.

    Raises:
        ConfigError: an address, kind or variable that is not possible.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: str,
        model: str,
        params: SamplingParams,
        spec: TargetSpec,
        tokenizer: Tokenizer | None,
        api_key_env: str | None = None,
        num_parallel: int = 16,
        may_retokenise: bool = False,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint {url!r} is not possible; give a base such as http://localhost:8000/v1")
        if kind not in ENDPOINT_KINDS:
            raise ConfigError(
                f"endpoint kind {kind!r} is unknown{nearest(kind, ENDPOINT_KINDS)}; allowed: {', '.join(ENDPOINT_KINDS)}"
            )
        self._url, self._kind, self._model, self._params = url.rstrip("/"), kind, model, params
        self._key = _key_of(api_key_env)
        self._num_parallel = num_parallel
        reader = _Reader(self._url, spec, tokenizer, params, may_retokenise)
        self._interface: _Interface = _INTERFACES[kind](reader)

    @property
    def origin(self) -> dict[str, Any]:
        return {"endpoint": self._url, "kind": self._kind, "model": self._model}

    @property
    def speculation(self) -> SpeculationStats | None:
        return None

    def answer(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> list[Output]:
        with ThreadPoolExecutor(self._num_parallel) as pool:
            running = [pool.submit(self._ask, name, tuple(prompt)) for name, prompt in prompts]
            return [future.result() for future in running]

    def _ask(self, name: str, prompt: tuple[int, ...]) -> Output:
        path, body = self._interface.request(prompt, self._params, self._model)
        found = self._post(path, body)
        try:
            return Output(prompt_id=name, prompt=prompt, tokens=self._interface.tokens(found, prompt))
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"endpoint {self._url} answered in another form than {self._kind}'s ({error!r} is missing or of another "
                f"kind); give the right --endpoint-kind: {', '.join(ENDPOINT_KINDS)}"
            ) from None

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                found = json.loads(response.read())
        except urllib.error.HTTPError as error:
            said = error.read(300).decode("utf-8", "replace")
            raise OutriderError(f"endpoint {self._url}{path} answered {error.code}: {said}") from None
        except (OSError, ValueError) as error:
            raise OutriderError(f"endpoint {self._url}{path} does not answer: {error}") from None
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if not isinstance(found, dict):
            raise DataError(f"endpoint {self._url}{path} answered with something that is no JSON object")
        return found


def _key_of(variable: str | None) -> str:
    if variable is None:
        return ""
    if not os.environ.get(variable):
        raise ConfigError(f"the environment variable {variable} is not set; set it to the server's key")
    return os.environ[variable]


class _Reader:
    """Checks what came back, whichever interface brought it."""

    def __init__(
        self, url: str, spec: TargetSpec, tokenizer: Tokenizer | None, params: SamplingParams, may_retokenise: bool
    ) -> None:
        self._url, self._spec, self._params = url, spec, params
        self.tokenizer, self._may_retokenise = tokenizer, may_retokenise

    def output(self, tokens: Sequence[int] | None, text: str, *, is_stopped: bool) -> tuple[int, ...]:
        """Token ids of an answer, the end token included.

        Args:
            tokens: as they came back; ``None`` if none did. text: the answer's text.
            is_stopped: the server says that the answer came to its end.
        """
        ids = list(tokens) if tokens else self._retokenised(text)
        outside = [token for token in ids if not 0 <= token < self._spec.vocab_size]
        if outside:
            raise DataError(
                f"endpoint {self._url} answered with token id {outside[0]}, which {self._spec.name} does not have; "
                "is it another model?"
            )
        ends = {*self._spec.eos_token_ids, *self._params.stop_token_ids}
        has_text_stop = bool(self._params.stop)
        if is_stopped and not has_text_stop and (not ids or ids[-1] not in ends):
            if len(ends) != 1:
                raise DataError(
                    f"endpoint {self._url} leaves the end token out, and {self._spec.name} has {len(ends)}; which one it "
                    "was cannot be told"
                )
            ids.append(next(iter(ends)))
        if not ids:
            raise DataError(f"endpoint {self._url} answered with nothing")
        return tuple(ids)

    def check_prompt(self, theirs: Sequence[int] | None, ours: Sequence[int]) -> None:
        """Both must have read the same prompt."""
        if theirs is not None and list(theirs) != list(ours):
            raise DataError(
                f"endpoint {self._url} read another prompt than was sent ({len(theirs)} token ids instead of {len(ours)}); "
                "its tokenizer adds or drops tokens"
            )

    def _retokenised(self, text: str) -> list[int]:
        if not self._may_retokenise:
            raise ConfigError(
                f"endpoint {self._url} returns no token ids (vLLM and SGLang: return_token_ids; older ones do not know it); "
                "the text can be tokenised again with --retokenise, at a risk: an answer that was not made of the tokens "
                "that its text is tokenised into looks like a fault"
            )
        if self.tokenizer is None:
            raise ConfigError("this target has no tokenizer, so text cannot be tokenised again")
        return self.tokenizer.encode(text)


class _Interface(Protocol):
    """How one kind of server is asked, and where its token ids are."""

    def request(self, prompt: Sequence[int], params: SamplingParams, model: str) -> tuple[str, dict[str, Any]]: ...

    def tokens(self, found: Mapping[str, Any], prompt: Sequence[int]) -> tuple[int, ...]: ...


class _OpenAI:
    """vLLM and SGLang: ``POST /v1/completions`` with ``return_token_ids``."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def request(self, prompt: Sequence[int], params: SamplingParams, model: str) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "repetition_penalty": params.repetition_penalty,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        # Some servers refuse these beside speculation even at their neutral values.
        optional: dict[str, Any] = {
            "min_p": params.min_p,
            "min_tokens": params.min_tokens,
            "logit_bias": {str(token): value for token, value in params.logit_bias.items()},
            "bad_words": list(params.bad_words),
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
        }
        return "/completions", {**body, **{name: value for name, value in optional.items() if value}}

    def tokens(self, found: Mapping[str, Any], prompt: Sequence[int]) -> tuple[int, ...]:
        choice = found["choices"][0]
        self._reader.check_prompt(choice.get("prompt_token_ids"), prompt)
        is_stopped = choice.get("finish_reason") == "stop"
        return self._reader.output(choice.get("token_ids"), choice.get("text") or "", is_stopped=is_stopped)


class _LlamaCpp:
    """llama.cpp's server: ``POST /completion`` with ``return_tokens``; every sampler that we do not know is turned off."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def request(self, prompt: Sequence[int], params: SamplingParams, model: str) -> tuple[str, dict[str, Any]]:
        return "/completion", {
            "prompt": list(prompt),
            "n_predict": params.max_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k if params.top_k > 0 else 0,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": len(prompt) + params.max_tokens,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "logit_bias": [[token, value] for token, value in params.logit_bias.items()],
            "stop": list(params.stop),
            "ignore_eos": params.ignore_eos,
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
            "typical_p": 1.0,
            "return_tokens": True,
            "seed": -1,
        }

    def tokens(self, found: Mapping[str, Any], prompt: Sequence[int]) -> tuple[int, ...]:
        read = found.get("tokens_evaluated")
        if isinstance(read, int) and read != len(prompt):
            self._reader.check_prompt([0] * read, prompt)
        return self._reader.output(found.get("tokens"), found["content"], is_stopped=found.get("stop_type") == "eos")


class _TGI:
    """Text Generation Inference: ``POST /generate`` with details; the prompt goes out as text."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def request(self, prompt: Sequence[int], params: SamplingParams, model: str) -> tuple[str, dict[str, Any]]:
        tokenizer = self._reader.tokenizer
        if tokenizer is None:
            raise ConfigError("TGI takes prompts as text, and this target has no tokenizer")
        fields: dict[str, Any] = {
            "max_new_tokens": params.max_tokens,
            "do_sample": True,
            "temperature": params.temperature,
            "repetition_penalty": params.repetition_penalty,
            "details": True,
            "decoder_input_details": True,
            "stop": list(params.stop),
        }
        # TGI wants these left out rather than neutral.
        if params.top_p < 1:
            fields["top_p"] = params.top_p
        if params.top_k > 0:
            fields["top_k"] = params.top_k
        return "/generate", {"inputs": tokenizer.decode(prompt, skip_special_tokens=False), "parameters": fields}

    def tokens(self, found: Mapping[str, Any], prompt: Sequence[int]) -> tuple[int, ...]:
        details = found["details"]
        prefill = [each["id"] for each in details.get("prefill") or ()]
        self._reader.check_prompt(prefill or None, prompt)
        ids = [each["id"] for each in details["tokens"]]
        is_stopped = details.get("finish_reason") == "eos_token"
        return self._reader.output(ids, found.get("generated_text") or "", is_stopped=is_stopped)


_INTERFACES: dict[str, type[_OpenAI] | type[_LlamaCpp] | type[_TGI]] = {
    "openai": _OpenAI,
    "llama.cpp": _LlamaCpp,
    "tgi": _TGI,
}
