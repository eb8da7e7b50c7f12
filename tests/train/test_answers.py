"""Answers: a fixed function of the row, resumable, from the engine or from a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ConfigError, DataError, OutriderError
from outrider.models.llama import LlamaTarget
from outrider.sampling.params import SamplingParams
from outrider.train.answers import Answer, AnswerSettings, EndpointAnswers, EngineAnswers, answer_all
from outrider.train.corpus import Text

SETTINGS = AnswerSettings(temperatures=(0.0, 1.0), max_tokens=6, seed=3)


def prompts() -> list[Text]:
    return [
        Text(
            id=f"p{index}", line=index + 1, tokens=(1, 2 + index, 3), trained=(False,) * 3, messages=({"role": "user"},)
        )
        for index in range(6)
    ]


def test_answers_do_not_depend_on_the_batch(target: LlamaTarget, tmp_path: Path) -> None:
    many = answer_all(prompts(), EngineAnswers(target, batch_size=8), SETTINGS, tmp_path / "a.jsonl")
    one = answer_all(prompts(), EngineAnswers(target, batch_size=1), SETTINGS, tmp_path / "b.jsonl")
    assert [text.tokens for text in many] == [text.tokens for text in one]
    assert all(2 <= text.num_trained <= 6 for text in many)
    temperatures = [json.loads(line)["temperature"] for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert sorted(temperatures) == [0, 0, 0, 1, 1, 1]


def test_a_cut_file_goes_on(target: LlamaTarget, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    expected = answer_all(prompts(), EngineAnswers(target, batch_size=8), SETTINGS, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])

    class Counting(EngineAnswers):
        asked = 0

        def answers(self, asked: Sequence[tuple[Text, SamplingParams]]) -> Iterator[Answer]:
            Counting.asked = len(asked)
            return super().answers(asked)

    again = answer_all(prompts(), Counting(target, batch_size=8), SETTINGS, path)
    assert Counting.asked == 3
    assert [text.tokens for text in again] == [text.tokens for text in expected]
    other = AnswerSettings(temperatures=(0.0, 1.0), max_tokens=7, seed=3)
    with pytest.raises(DataError, match="max_tokens = 6, now it is 7"):
        answer_all(prompts(), EngineAnswers(target, batch_size=8), other, path)


class Words:
    """A tokenizer of letters."""

    eos_token_ids = (0,)

    def plain_messages(self, messages: Any, *, tools: Any = None) -> list[Any]:
        return list(messages)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture()
def server() -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            reply = json.dumps({"choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}]}).encode()
            self.send_response(200 if body["model"] == "known" else 404)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args: Any) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1", asked
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_answers_of_a_server(server: tuple[str, list[Any]], tmp_path: Path) -> None:
    url, asked = server
    words: Any = Words()
    source = EndpointAnswers(url, model="known", tokenizer=words, num_parallel=2)
    found = answer_all(prompts(), source, SETTINGS, tmp_path / "a.jsonl")
    assert all(text.tokens[3:] == (97, 98, 0) for text in found)
    path, body = asked[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user"}] and body["max_tokens"] == 6 and "seed" in body
    with pytest.raises(OutriderError, match="answered 404"):
        answer_all(prompts(), EndpointAnswers(url, model="x", tokenizer=words), SETTINGS, tmp_path / "b.jsonl")


def test_impossible_settings() -> None:
    with pytest.raises(ConfigError, match="temperatures"):
        AnswerSettings(temperatures=())
    with pytest.raises(ConfigError, match="--endpoint 'host'"):
        EndpointAnswers("host", model="x", tokenizer=Words())  # type: ignore[arg-type]
