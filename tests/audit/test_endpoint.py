"""Servers that speak the forms of vLLM and SGLang, llama.cpp and TGI; behind each stands our own engine."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from outrider.audit.calibration import CalibrationSettings, audit_calibration
from outrider.audit.calibration_report import CalibrationReport
from outrider.audit.endpoint import EndpointSource
from outrider.audit.faults import fault_named, planted
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.sampling.params import SamplingParams
from tests.audit.support import PARAMS, PROMPTS, drawing_drafter, world

SEEDS = itertools.count(1000)
SHORT = replace(PARAMS, max_tokens=16)
Answer = Callable[[dict[str, Any], list[int]], Any]


def decode(body: dict[str, Any]) -> list[int]:
    """What the engine behind the server answers."""
    known = {"temperature", "top_p", "max_tokens", "min_p"}
    params = SamplingParams(**{name: body[name] for name in known if name in body})
    config = EngineConfig(num_draft_tokens=3, schedule="fixed", num_cached_prefixes=0)
    engine = Engine(world(), drafter=drawing_drafter(), config=config, entropy=lambda: next(SEEDS))
    [result] = engine.generate([body["prompt"]], params)
    return list(result.token_ids)


def openai_answer(body: dict[str, Any], tokens: list[int]) -> Any:
    assert body["return_token_ids"] is True and "seed" not in body and body["top_k"] == -1
    choice = {"text": "", "finish_reason": "stop" if tokens[-1] == 0 else "length", "token_ids": tokens}
    return {"choices": [{**choice, "prompt_token_ids": body["prompt"]}]}


def llama_cpp_answer(body: dict[str, Any], tokens: list[int]) -> Any:
    assert body["samplers"][-1] == "temperature" and body["return_tokens"] and body["seed"] == -1
    ended = "eos" if tokens[-1] == 0 else "limit"
    return {"content": "", "tokens": tokens, "stop_type": ended, "tokens_evaluated": len(body["prompt"])}


@contextmanager
def serving(answer: Answer, *, status: int = 200, seen: list[Any] | None = None) -> Iterator[str]:
    """A server on this machine; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if seen is not None:
                seen.append((self.path, self.headers.get("Authorization"), body))
            body.setdefault("max_tokens", body.get("n_predict", 8))
            found = json.dumps(answer(body, decode(body) if "prompt" in body and status == 200 else [])).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def source(url: str, kind: str = "openai", *, params: SamplingParams = PARAMS, **more: Any) -> EndpointSource:
    return EndpointSource(
        url,
        kind=kind,
        model="table",
        params=params,
        spec=world().spec,
        tokenizer=more.pop("tokenizer", None),
        num_parallel=2,
        **more,
    )


class Recorded:
    """Answers that a source gave once, before a fault was planted in the engine that all servers here share."""

    def __init__(self, wrapped: EndpointSource) -> None:
        self._wrapped, self._given = wrapped, list[Any]()
        self.origin, self.speculation = wrapped.origin, None

    def answer(self, prompts: Any) -> list[Any]:
        if not self._given:
            self._given = self._wrapped.answer(prompts)
        assert [output.prompt_id for output in self._given] == [name for name, _ in prompts]
        return self._given


def test_a_sound_server_passes_beside_its_plain_arm_and_a_faulty_one_does_not() -> None:
    settings = CalibrationSettings(num_tokens=100, is_foreign=True)
    with serving(openai_answer) as url:
        plain, speculative = Recorded(source(url, params=SHORT)), source(url, params=SHORT)

        def audited() -> CalibrationReport:
            return audit_calibration(world(), PROMPTS, source=speculative, plain=plain, params=SHORT, settings=settings)

        report = audited()
        assert report.verdict == "calibrated" and report.null == "two-sample" and report.source["endpoint"] == url
        assert any("does not tell" in line for line in report.unchecked)
        with planted(fault_named("wrong-bonus-row")):
            report = audited()
    assert report.verdict == "biased" and report.cause


def test_llama_cpp_in_its_own_order() -> None:
    params = SamplingParams(temperature=0.8, max_tokens=12)
    with serving(llama_cpp_answer) as url:
        report = audit_calibration(
            world(),
            PROMPTS,
            source=source(url, "llama.cpp", params=params),
            params=params,
            settings=CalibrationSettings(num_tokens=500, is_foreign=True, order="llama.cpp"),
        )
    assert report.verdict == "no sign" and report.order == "llama.cpp"


class Spells:
    """A tokenizer of one letter a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token) for token in ids)


def test_tgi_takes_text_and_gives_ids() -> None:
    def answer(body: dict[str, Any], tokens: list[int]) -> Any:
        assert body["parameters"]["details"] and body["parameters"]["top_p"] == 0.95
        prefill = [{"id": token} for token in Spells().encode(body["inputs"])]
        details = {"prefill": prefill, "tokens": [{"id": 3}, {"id": 0}], "finish_reason": "eos_token"}
        return [{"generated_text": "", "details": details}]

    seen: list[Any] = []
    with serving(answer, seen=seen) as url:
        [output] = source(url, "tgi", tokenizer=Spells()).answer([("a", [1, 2])])
    assert output.tokens == (3, 0) and seen[0][0] == "/generate" and seen[0][2]["inputs"] == "bc"


@pytest.mark.parametrize(
    ("changes", "words", "error"),
    [
        ({"token_ids": None, "text": "dc"}, "no token ids.*--retokenise.*risk", ConfigError),
        ({"token_ids": [3, 900]}, "token id 900.*another model", DataError),
        ({"token_ids": []}, "no token ids", ConfigError),
        ({"prompt_token_ids": [1, 1, 2]}, "another prompt", DataError),
    ],
)
def test_answers_that_cannot_be_read_are_refused(changes: dict[str, Any], words: str, error: type[Exception]) -> None:
    def answer(body: dict[str, Any], tokens: list[int]) -> Any:
        return {"choices": [{**openai_answer(body, tokens)["choices"][0], **changes}]}

    with serving(answer) as url, pytest.raises(error, match=words):
        source(url).answer([("a", [1, 2])])


def test_text_is_tokenised_again_only_when_asked_and_a_missing_end_is_put_back() -> None:
    def answer(body: dict[str, Any], tokens: list[int]) -> Any:
        return {"choices": [{"text": "dcb", "finish_reason": "stop"}]}

    with serving(answer) as url:
        [output] = source(url, tokenizer=Spells(), may_retokenise=True).answer([("a", [1, 2])])
        assert output.tokens == (3, 2, 1, 0)
        two_ends = SamplingParams(temperature=0.8, max_tokens=8, stop_token_ids=(5,))
        with pytest.raises(DataError, match="leaves the end token out"):
            source(url, params=two_ends, tokenizer=Spells(), may_retokenise=True).answer([("a", [1, 2])])


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    seen: list[Any] = []
    with serving(openai_answer, seen=seen) as url:
        found = source(f"{url}/", api_key_env="SOME_KEY").answer([("a", [1, 2])])
    assert seen[0][:2] == ("/completions", "Bearer secret") and len(found) == 1
    assert "secret" not in json.dumps(source(url, api_key_env="SOME_KEY").origin)
    with pytest.raises(ConfigError, match="NO_KEY is not set"):
        source(url, api_key_env="NO_KEY")


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="endpoint 'localhost'"):
        source("localhost")
    with pytest.raises(ConfigError, match="'vllm' is unknown"):
        source("http://localhost", "vllm")
    with (
        serving(lambda body, tokens: {"error": "no"}, status=503) as url,
        pytest.raises(OutriderError, match="answered 503"),
    ):
        source(url).answer([("a", [1, 2])])
    with pytest.raises(OutriderError, match="does not answer"):
        source(url).answer([("a", [1, 2])])
    with (
        serving(lambda body, tokens: {"choices": []}) as url,
        pytest.raises(DataError, match="another form than llama"),
    ):
        source(url, "llama.cpp").answer([("a", [1, 2])])
