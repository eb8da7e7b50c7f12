"""Answers to train on: written by the target itself, since a head learns best what the target really says.

Every answer is a fixed function of the row, the temperatures and the seed: the row's place in the file picks its
temperature, and its noise is keyed by its id. Answers are appended to a file as they finish, so that an interrupted run goes
on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider.device import one_torch_thread
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.models.base import Target
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.params import SamplingParams
from outrider.train.corpus import Text
from outrider.train.files import append_line, read_lines

__all__ = ["AnswerSettings", "EndpointAnswers", "EngineAnswers", "answer_all"]

Answer = tuple[str, list[int]]
"""Id of the row and the answer's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """How answers are drawn.

    Attributes:
        temperatures: rows take them in turns. max_tokens: most tokens of an answer. seed: of their noise.
        batch_size: rows answered together.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 256
    seed: int = 0
    batch_size: int = 64

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 <= each <= 10 for each in self.temperatures):
            raise ConfigError(
                f"temperatures {list(self.temperatures)} are not possible; allowed: 0 to 10, as 0,0.7,1.0"
            )
        if self.max_tokens < 2:
            raise ConfigError(f"--max-answer-tokens {self.max_tokens} is not possible; allowed: 2 or more")

    def params(self, index: int, text: Text) -> SamplingParams:
        """Sampling fields of the row with this index."""
        temperature = self.temperatures[index % len(self.temperatures)]
        digest = hashlib.sha256(f"{self.seed} {text.id}".encode()).digest()
        return SamplingParams(
            temperature=temperature, max_tokens=self.max_tokens, seed=int.from_bytes(digest[:7], "big")
        )


class AnswerSource(Protocol):
    """Answers prompts, in any order."""

    @property
    def origin(self) -> dict[str, Any]:
        """What the answers depend on, as plain values."""
        ...

    def answers(self, asked: Sequence[tuple[Text, SamplingParams]]) -> Iterator[Answer]: ...


class EngineAnswers:
    """Our own engine, in large batches, without a drafter: a full batch leaves no idle arithmetic to speculate with.

    Args:
        target: who answers. batch_size: rows decoded together.
    """

    def __init__(self, target: Target, *, batch_size: int) -> None:
        self._target = target
        self._batch_size = batch_size

    @property
    def origin(self) -> dict[str, Any]:
        spec = self._target.spec
        return {"from": spec.name, "fingerprint": spec.fingerprint, "precision": spec.precision}

    def answers(self, asked: Sequence[tuple[Text, SamplingParams]]) -> Iterator[Answer]:
        config = EngineConfig(max_batch_size=self._batch_size, num_draft_tokens=0, num_cached_prefixes=0)
        engine = Engine(self._target, config=config)
        # Rows of like length behind one another: a batch then ends together.
        for text, params in sorted(asked, key=lambda pair: len(pair[0].tokens)):
            engine.submit(list(text.tokens), params, id=text.id)
        with one_torch_thread(self._target.spec.path.startswith("native")):
            while engine.has_work:
                for event in engine.step():
                    if event.result is not None:
                        yield event.id, list(event.result.token_ids)


class EndpointAnswers:
    """A server with OpenAI's interface that serves the target (``POST <url>/chat/completions``).

    Args:
        url: base, as ``http://localhost:8000/v1``. model: name that the server knows the target by.
        tokenizer: the target's, to read the answers' text back. num_parallel: requests under way.
    """

    def __init__(self, url: str, *, model: str, tokenizer: Tokenizer, num_parallel: int = 16) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--endpoint {url!r} is not possible; give a base such as http://localhost:8000/v1")
        self._url = url.rstrip("/")
        self._model, self._tokenizer, self._num_parallel = model, tokenizer, num_parallel

    @property
    def origin(self) -> dict[str, Any]:
        return {"from": self._url, "model": self._model}

    def answers(self, asked: Sequence[tuple[Text, SamplingParams]]) -> Iterator[Answer]:
        with ThreadPoolExecutor(self._num_parallel) as pool:
            running: set[Future[Answer]] = set()
            for text, params in asked:
                running.add(pool.submit(self._ask, text, params))
                if len(running) >= 2 * self._num_parallel:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in running)

    def _ask(self, text: Text, params: SamplingParams) -> Answer:
        if not text.messages:
            raise DataError(f"row {text.id!r} is not a chat; an --endpoint answers chats only")
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._tokenizer.plain_messages(text.messages, tools=text.tools or None),
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "seed": params.seed,
        }
        choice = self._post(body)["choices"][0]
        tokens = self._tokenizer.encode(choice["message"].get("content") or "")
        ends = choice.get("finish_reason") == "stop" and self._tokenizer.eos_token_ids
        return text.id, tokens + list(self._tokenizer.eos_token_ids[:1] if ends else ())

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self._url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                found: dict[str, Any] = json.loads(response.read())
                return found
        except urllib.error.HTTPError as error:
            said = error.read(300).decode("utf-8", "replace")
            raise OutriderError(f"endpoint {self._url} answered {error.code}: {said}") from None
        except (OSError, ValueError) as error:
            raise OutriderError(f"endpoint {self._url} does not answer: {error}; run the same command again") from None


def answer_all(
    texts: Sequence[Text],
    source: AnswerSource,
    settings: AnswerSettings,
    path: Path,
    *,
    on_answer: Callable[[int, int], None] = lambda done, tokens: None,
) -> list[Text]:
    """Prompts with their answers, in the order of ``texts``; rows whose answer is empty are left out.

    Args:
        texts: prompts. source: who answers. settings: how.
        path: JSON Lines file of answers, made or continued.
        on_answer: told how many rows are answered, and how many tokens the last answer has.

    Raises:
        DataError: the file holds answers of another origin.
    """
    origin = {**source.origin, "seed": settings.seed, "max_tokens": settings.max_tokens}
    known: dict[str, list[int]] = {}
    for line in read_lines(path):
        _check_origin(line, origin, path)
        known[line["id"]] = line["tokens"]
    on_answer(len(known), 0)
    asked = [(text, settings.params(i, text)) for i, text in enumerate(texts) if text.id not in known]
    temperatures = {text.id: params.temperature for text, params in asked}
    for id, tokens in source.answers(asked):
        append_line(path, {"id": id, "tokens": tokens, "temperature": temperatures[id], "origin": origin})
        known[id] = tokens
        on_answer(len(known), len(tokens))
    return [text.answered(known[text.id]) for text in texts if known[text.id]]


def _check_origin(line: dict[str, Any], origin: dict[str, Any], path: Path) -> None:
    for name, value in origin.items():
        before = line.get("origin", {}).get(name)
        if before != value:
            raise DataError(
                f"{path} holds answers made with {name} = {before!r}, now it is {value!r}; "
                "delete the file, or give another --out"
            )
